"""Tiny models, Hugging Face's answers for them, and a way to run a script on several gloo ranks."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

RANKS = Path(__file__).parent
make_hf_model = runpy.run_path(str(RANKS.parent / "hf_models.py"))["make_hf_model"]
LENGTHS = [10, 37, 17, 1, 63]
"""Ragged documents; the first three and the last two make 64 tokens each, one half per data-parallel rank."""


def run_ranks(
    script: str,
    world_size: int,
    *arguments: str | Path,
    status: int = 0,
    timeout_s: float = 150,
    prefix: Sequence[str] = (),
) -> None:
    """Runs tests/ranks/<script> on world_size gloo ranks; fails with its output when it ends otherwise than status.

    prefix: a command that runs the command which follows it.
    """
    command = [*prefix, sys.executable]
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


def hf_answers(folder: Path) -> dict[str, Any]:
    """Logits, log-probs, entropies and gradients of sum(weights * log-probs), by transformers, document by document.

    Gradients carry the names of the saved tensors; none is zero, which would hide an error.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(7)
    num_tokens = sum(LENGTHS)
    input_ids, target_ids = (torch.randint(0, 512, (num_tokens,), generator=generator) for _ in range(2))
    weights = torch.randn(num_tokens, generator=generator)
    logits = torch.cat([model(document[None]).logits[0] for document in input_ids.split(LENGTHS)])
    all_logp = logits.log_softmax(-1)
    logp = all_logp.gather(1, target_ids[:, None])[:, 0]
    (logp * weights).sum().backward()
    grads = dict(_saved_grads(model))
    assert all(grad.any() for grad in grads.values()), "every expert has tokens; choose another seed"
    return {
        "lengths": LENGTHS,
        "input_ids": input_ids,
        "target_ids": target_ids,
        "weights": weights,
        "logits": logits.detach(),
        "logp": logp.detach(),
        "entropy": -(all_logp.exp() * all_logp).sum(-1).detach(),
        "grads": grads,
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


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder per model, and beside each <name>.pt with Hugging Face's answers."""
    root = tmp_path_factory.mktemp("models")
    for name, seed in {"plain": 0, "tied": 1, "glm": 3}.items():
        make_hf_model(root / name, name, seed)
        torch.save(hf_answers(root / name), root / f"{name}.pt")
    return root


@pytest.fixture(scope="session")
def measured(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What check_model.py measured on one and on two ranks: {"<layout>/<model>": {quantity: value}}."""
    return _measured(model_folder, tmp_path_factory.mktemp("measured"), (1, 2))


@pytest.fixture(scope="session")
def measured_on_four(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same on four ranks."""
    return _measured(model_folder, tmp_path_factory.mktemp("measured_on_four"), (4,))


def _measured(model_folder: Path, work: Path, world_sizes: Sequence[int]) -> dict[str, Any]:
    """Every layout of a world size in one spawn."""
    for world_size in world_sizes:
        run_ranks("check_model.py", world_size, model_folder, work)
    return {key: value for file in sorted(work.glob("*.json")) for key, value in json.loads(file.read_text()).items()}
