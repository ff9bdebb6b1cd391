"""Tiny models, Hugging Face's answers for them, and a way to run a script on several gloo ranks."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.checkpoint.folders import latest_checkpoint

RANKS = Path(__file__).parent
LENGTHS = [10, 37, 17, 1, 63]
"""Ragged documents; the first three and the last two make 64 tokens each, one half per data-parallel rank."""


def run_ranks(script: str, world_size: int, *arguments: str | Path, status: int = 0, timeout_s: float = 150) -> None:
    """Runs tests/ranks/<script> on world_size gloo ranks; fails with its output when it ends otherwise than status."""
    command = [sys.executable]
    if world_size > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    process = subprocess.run(
        [*command, str(RANKS / script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert process.returncode == status, f"{script} on {world_size} ranks failed:\n{process.stdout[-6000:]}"


@pytest.fixture(scope="session")
def run_script() -> Callable[..., None]:
    """run_ranks, for tests."""
    return run_ranks


def make_hf_model(folder: Path, seed: int, **overrides: Any) -> Path:
    """A random Qwen3-MoE as transformers saves it; gains of norms are random so that a forgotten one shows."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **overrides}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.mul_(3.0)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def hf_answers(folder: Path) -> dict[str, Any]:
    """Logits, log-probs, entropies and gradients of sum(weights * log-probs), by transformers, document by document.

    Gradients carry the names of the saved tensors.
    """
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(7)
    num_tokens = sum(LENGTHS)
    input_ids, target_ids = (torch.randint(0, 512, (num_tokens,), generator=generator) for _ in range(2))
    weights = torch.randn(num_tokens, generator=generator)
    logits = torch.cat([model(document[None]).logits[0] for document in input_ids.split(LENGTHS)])
    all_logp = logits.log_softmax(-1)
    logp = all_logp.gather(1, target_ids[:, None])[:, 0]
    (logp * weights).sum().backward()
    return {
        "lengths": LENGTHS,
        "input_ids": input_ids,
        "target_ids": target_ids,
        "weights": weights,
        "logits": logits.detach(),
        "logp": logp.detach(),
        "entropy": -(all_logp.exp() * all_logp).sum(-1).detach(),
        "grads": dict(_saved_grads(model)),
    }


def _saved_grads(model: torch.nn.Module) -> Any:
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name.endswith("gate_up_proj"):
            for expert, grad in enumerate(parameter.grad):
                gate, up = grad.chunk(2)
                stem = f"{name.removesuffix('.gate_up_proj')}.{expert}"
                yield from ((f"{stem}.gate_proj.weight", gate), (f"{stem}.up_proj.weight", up))
        elif name.endswith("experts.down_proj"):
            for expert, grad in enumerate(parameter.grad):
                yield f"{name.removesuffix('.down_proj')}.{expert}.down_proj.weight", grad
        else:
            yield name, parameter.grad


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": dict(tie_word_embeddings=True, norm_topk_prob=False, rope_theta=1e4, rms_norm_eps=1e-4),
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder per model of MODELS, and beside each <name>.pt with Hugging Face's answers."""
    root = tmp_path_factory.mktemp("models")
    for seed, (name, overrides) in enumerate(MODELS.items()):
        make_hf_model(root / name, seed, **overrides)
        torch.save(hf_answers(root / name), root / f"{name}.pt")
    return root


@pytest.fixture(scope="session")
def measured(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What check_model.py measured: {"<layout>/<model>": {quantity: value}}, every layout in two spawns."""
    work = tmp_path_factory.mktemp("measured")
    for world_size in (1, 2):
        run_ranks("check_model.py", world_size, model_folder, work)
    return {key: value for file in sorted(work.glob("*.json")) for key, value in json.loads(file.read_text()).items()}


@pytest.fixture(scope="session")
def training_runs(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What check_resume.py recorded: {"straight" | "resumed": {layout or check: record}}."""
    work = tmp_path_factory.mktemp("training")
    # The straight run of one rank ends by killing itself while it saves.
    run_ranks("check_resume.py", 1, "straight", model_folder, work, status=-signal.SIGKILL)
    run_ranks("check_resume.py", 2, "straight", model_folder, work)
    killed = latest_checkpoint(work / "killed")
    for world_size in (1, 2):
        run_ranks("check_resume.py", world_size, "resumed", model_folder, work)
    records: dict[str, dict[str, Any]] = {"straight": {}, "resumed": {"after_kill": killed and killed.name}}
    for mode, record in records.items():
        for file in sorted(work.glob(f"{mode}-*.json")):
            record.update(json.loads(file.read_text()))
    return records
