"""Run by torchrun: measures the model against Hugging Face's answers under every layout of this world size."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.distributed.device import init_process_group, start_platform

PLATFORM = start_platform("cpu")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402

from megatron_rl.checkpoint import convert  # noqa: E402
from megatron_rl.config import DataError  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, ParallelGroups, build_groups  # noqa: E402
from megatron_rl.model.build import ModelConfig, build_model  # noqa: E402
from megatron_rl.model.forward import DeviceBatch, full_logits, taken_logprobs  # noqa: E402
from megatron_rl.model.hf_weights import export_hf, hf_layout, import_hf  # noqa: E402
from megatron_rl.model.policy import PolicyModel  # noqa: E402

LAYOUTS = {
    1: {"single": ParallelConfig()},
    2: {
        "dp2": ParallelConfig(),
        "ep2": ParallelConfig(expert=2),
        "tp2": ParallelConfig(tensor=2),
        "tp2_ep2": ParallelConfig(tensor=2, expert=2),
    },
}


def batch_of(answers: dict[str, Any], documents: range) -> tuple[DeviceBatch, slice]:
    """The named documents as one packed batch, and their tokens in the answers."""
    lengths = answers["lengths"]
    start = sum(lengths[: documents.start])
    mine = [lengths[d] for d in documents]
    span = slice(start, start + sum(mine))
    borders = torch.tensor([0, *mine]).cumsum(0).int()
    return DeviceBatch(answers["input_ids"][span], answers["target_ids"][span], borders, tuple(mine)), span


def per_document_logits(model: PolicyModel, answers: dict[str, Any], groups: ParallelGroups) -> torch.Tensor:
    """Each document alone; where ranks share the sequence, with a padding document that fills the multiple."""
    rows = []
    for ids in answers["input_ids"].split(answers["lengths"]):
        padding = -len(ids) % groups.tp_size
        lengths = (len(ids), padding) if padding else (len(ids),)
        padded = torch.cat([ids, ids.new_zeros(padding)])
        borders = torch.tensor([0, *lengths]).cumsum(0).int()
        rows.append(full_logits(model, DeviceBatch(padded, padded, borders, lengths), groups)[: len(ids)])
    return torch.cat(rows)


def gradients(
    model: PolicyModel, answers: dict[str, Any], groups: ParallelGroups
) -> tuple[dict[str, torch.Tensor], float, float, float]:
    """({HF name: gradient} on rank 0, Megatron's gradient norm, largest error of log-probs, of entropies)."""
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model, pg_collection=groups.pg
    )
    config = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0)
    optimizer = get_megatron_optimizer(config, [ddp], use_gloo_process_groups=False, pg_collection=groups.pg)
    documents = range(5) if groups.dp_size == 1 else (range(3), range(3, 5))[groups.dp_rank]
    batch, span = batch_of(answers, documents)
    ddp.zero_grad_buffer()
    out = taken_logprobs(ddp, batch, groups)
    (out.logp * answers["weights"][span]).sum().backward()
    finalize_model_grads([ddp], pg_collection=groups.pg)
    optimizer.prepare_grads()
    grads = export_hf(model, groups, select=lambda parameter: parameter.main_grad)  # type: ignore[attr-defined]
    on_rank_0 = {name: grad.clone() for name, grad in grads if grad is not None}
    logp_error = (out.logp.detach() - answers["logp"][span]).abs().max()
    entropy_error = (out.entropy.detach() - answers["entropy"][span]).abs().max()
    return on_rank_0, float(optimizer.get_grad_norm()), float(logp_error), float(entropy_error)


def file_hashes(folder: Path) -> dict[str, str]:
    """HF name -> digest of its bytes and shape."""
    from safetensors.torch import load_file

    tensors = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    return {k: hashlib.sha256(repr(v.shape).encode() + v.numpy().tobytes()).hexdigest() for k, v in tensors.items()}


def exported_to_owners(model: PolicyModel, groups: ParallelGroups, reference: Path) -> bool:
    """Every tensor arrives whole, only on the rank that was named for it."""
    expected = file_hashes(reference)
    names = [spec.name for spec in hf_layout(model, groups)]
    owners = {name: index % groups.world_size for index, name in enumerate(names)}
    right = sorted(names) == names == sorted(expected)
    for name, tensor in export_hf(model, groups, owners=owners):
        right &= (tensor is not None) == (owners[name] == groups.rank)
        if tensor is not None:
            right &= (
                hashlib.sha256(repr(tensor.shape).encode() + tensor.numpy().tobytes()).hexdigest() == expected[name]
            )
    verdict = torch.tensor(int(right))
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict)


def measure(name: str, parallel: ParallelConfig, groups: ParallelGroups, root: Path, work: Path) -> dict[str, Any]:
    answers = torch.load(root / f"{name}.pt")
    model = build_model(ModelConfig(path=str(root / name)), parallel, groups, PLATFORM)
    nan_before = all(bool(parameter.isnan().all()) for parameter in model.parameters())
    convert.load_hf(model, root / name, groups)
    packed = full_logits(model, batch_of(answers, range(5))[0], groups)
    alone = per_document_logits(model, answers, groups)
    owners_right = exported_to_owners(model, groups, root / name)
    convert.save_hf(model, work / "back", groups, source=root / name)
    grads, grad_norm, logp_error, entropy_error = gradients(model, answers, groups)
    result = {
        "nan_before_load": nan_before,
        "logits_error": float((packed - answers["logits"]).abs().max()),
        "packing_error": float((packed - alone).abs().max()),
        "owners_right": owners_right,
        "files_equal": file_hashes(work / "back") == file_hashes(root / name),
        "companions": (work / "back" / "tokenizer_config.json").is_file(),
        "logp_error": logp_error,
        "entropy_error": entropy_error,
        "grad_norm": grad_norm,
    }
    if groups.rank == 0:
        exact = answers["grads"]
        result["exact_grad_norm"] = float(torch.stack([g.norm() for g in exact.values()]).norm())
        result["grad_names_equal"] = sorted(grads) == sorted(exact)
        result["grad_error"] = max(float((grads[n] - exact[n]).norm() / exact[n].norm()) for n in grads)
    return result


def refusals(root: Path, groups: ParallelGroups) -> dict[str, str]:
    """What importing damaged weights says."""
    from safetensors.torch import load_file

    model = build_model(ModelConfig(path=str(root / "plain")), ParallelConfig(), groups, PLATFORM)
    whole = load_file(root / "plain" / "model.safetensors")
    norm, head = "model.norm.weight", "lm_head.weight"
    damaged = {
        "missing": {k: v for k, v in whole.items() if k != norm},
        "extra": {**whole, "model.layers.9.mlp.gate.weight": whole[head]},
        "misshapen": {**whole, head: whole[head][:-1]},
        "nan": {**whole, norm: torch.full_like(whole[norm], torch.nan)},
        "whole": whole,
    }
    said = {}
    for name, tensors in damaged.items():
        try:
            available = {k: tuple(v.shape) for k, v in tensors.items()}
            import_hf(model, groups, tensors.__getitem__, available=available)
            said[name] = ""
        except DataError as error:
            said[name] = str(error)
    return said


def saved_in_small_files(root: Path, work: Path, groups: ParallelGroups) -> dict[str, Any]:
    """A folder cut into many files, read again by this project."""
    convert.MAX_SHARD_BYTES = 100_000
    model = build_model(ModelConfig(path=str(root / "plain")), ParallelConfig(), groups, PLATFORM)
    convert.load_hf(model, root / "plain", groups)
    convert.save_hf(model, work / "small", groups, source=root / "plain")
    convert.load_hf(model, work / "small", groups)
    equal = file_hashes(work / "small") == file_hashes(root / "plain")
    sizes = [file.stat().st_size for file in (work / "small").glob("*.safetensors")]
    return {"equal": equal, "files": len(sizes), "largest": max(sizes)}


def main() -> None:
    root, work = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    init_process_group(PLATFORM)
    results = {}
    world_size = dist.get_world_size()
    for layout, parallel in LAYOUTS[world_size].items():
        groups = build_groups(parallel, PLATFORM, seed=1)
        for name in ("plain", "tied"):
            results[f"{layout}/{name}"] = measure(name, parallel, groups, root, work / f"{layout}_{name}")
        if world_size == 1:
            results["refusals"] = refusals(root, groups)
            results["small_files"] = saved_in_small_files(root, work, groups)
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        (work / f"world{world_size}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
