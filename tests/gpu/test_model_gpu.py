"""The Transformer Engine model of every family against transformers on one GPU, in bfloat16."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

LENGTHS = [64, 17, 1, 46]
SIZES = dict(hidden_size=256, intermediate_size=512, moe_intermediate_size=128, head_dim=64)
"""That fit the fused kernels."""
make_hf_model = runpy.run_path(str(Path(__file__).parents[1] / "hf_models.py"))["make_hf_model"]


def hf_model(folder: Path, name: str) -> Any:
    """A random model saved to folder in bfloat16, the expert bias in float32 as released models have it."""
    from transformers import AutoModelForCausalLM

    exact = make_hf_model(folder / "exact", name, 0, **SIZES)
    model: Any = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.bfloat16)
    model.save_pretrained(folder / "hf")
    return model.cuda()


@pytest.fixture(scope="module")
def one_rank() -> tuple[Any, Any, Any]:
    """(platform, parallel config, groups) of one process on the GPU."""
    from megatron_rl.distributed.device import init_process_group, start_platform

    platform = start_platform("cuda")
    init_process_group(platform)
    from megatron_rl.distributed.groups import ParallelConfig, build_groups

    parallel = ParallelConfig()
    return platform, parallel, build_groups(parallel, platform, seed=0)


@pytest.mark.parametrize("name", ["plain", "glm", "glm_air"])
@torch.no_grad()
def test_logits_are_as_good_as_transformers_own_bfloat16(name: str, tmp_path: Path, one_rank: Any) -> None:
    """Error against float32 at most twice that of transformers in bfloat16; weights survive the way bitwise."""
    from safetensors.torch import load_file

    platform, parallel, groups = one_rank
    from megatron_rl.checkpoint.convert import load_hf, save_hf
    from megatron_rl.model.build import ModelConfig, build_model
    from megatron_rl.model.forward import DeviceBatch, full_logits

    reference = hf_model(tmp_path, name)
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
