"""The Transformer Engine model against transformers on one GPU, in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LENGTHS = [64, 17, 1, 46]


def hf_model(folder: Path) -> Any:
    """A random Qwen3-MoE whose sizes fit the fused kernels, saved to folder."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        dtype="bfloat16",
    )
    config = Qwen3MoeConfig(**sizes)
    model: Any = Qwen3MoeForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return model.cuda()


@torch.no_grad()
def test_logits_are_as_good_as_transformers_own_bfloat16(tmp_path: Path) -> None:
    """Error against float32 at most twice that of transformers in bfloat16; weights survive the way bitwise."""
    from safetensors.torch import load_file

    from megatron_rl.checkpoint.convert import load_hf, save_hf
    from megatron_rl.distributed.device import init_process_group, start_platform

    reference = hf_model(tmp_path / "hf")
    platform = start_platform("cuda")
    init_process_group(platform)
    from megatron_rl.distributed.groups import ParallelConfig, build_groups
    from megatron_rl.model.build import ModelConfig, build_model
    from megatron_rl.model.forward import DeviceBatch, full_logits

    parallel = ParallelConfig()
    groups = build_groups(parallel, platform, seed=0)
    model = build_model(ModelConfig(path=str(tmp_path / "hf"), dtype="bfloat16"), parallel, groups, platform)
    load_hf(model, tmp_path / "hf", groups)
    ids = torch.randint(0, 512, (sum(LENGTHS),), device="cuda")
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()
    got = full_logits(model, DeviceBatch(ids, ids, borders, tuple(LENGTHS)), groups)
    honest = torch.cat([reference(document[None]).logits[0].float() for document in ids.split(LENGTHS)])
    exact_model = reference.float()
    exact = torch.cat([exact_model(document[None]).logits[0] for document in ids.split(LENGTHS)])
    assert (got - exact).abs().mean() <= 2 * (honest - exact).abs().mean()

    save_hf(model, tmp_path / "back", groups, source=tmp_path / "hf")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
