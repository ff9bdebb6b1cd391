"""Run by torchrun: measures the model against Hugging Face's answers under every layout of this world size."""

import hashlib
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.distributed.device import init_process_group, start_platform

PLATFORM = start_platform("cpu")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402

from megatron_rl.checkpoint import convert, hf_files  # noqa: E402
from megatron_rl.config import DataError  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, ParallelGroups, build_groups  # noqa: E402
from megatron_rl.model.build import ModelConfig, build_model  # noqa: E402
from megatron_rl.model.config import Recompute  # noqa: E402
from megatron_rl.model.forward import DeviceBatch, head_logits, head_logprobs  # noqa: E402
from megatron_rl.model.hf_weights import export_gradients, export_hf, hf_layout, import_hf  # noqa: E402
from megatron_rl.model.pipeline import from_last_stage, run_microbatches  # noqa: E402
from megatron_rl.model.policy import PolicyModel  # noqa: E402
from megatron_rl.trainer.config import OptimizerConfig  # noqa: E402
from megatron_rl.trainer.optim import PolicyOptimizer  # noqa: E402


@dataclass(frozen=True)
class Layout:
    """Sizes of the groups, and how a data-parallel rank's documents are cut and recomputed."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    pipeline: int = 1
    context: int = 1
    microbatches: int = 1
    recompute: Recompute = "none"

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            tensor=self.tensor,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            pipeline=self.pipeline,
            context=self.context,
        )


LR, OPTIMIZER = 1e-3, OptimizerConfig()
MODELS = ("plain", "tied", "glm")
TIED_LAYOUTS = ("single", "tp2", "pp2", "cp2", "tp2_pp2", "pp2_ep2_dp2")
"""Where a tied head takes another way than a head of its own."""
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {
        "single": Layout(),
        "five_microbatches": Layout(microbatches=5),
        "selective_recompute": Layout(microbatches=2, recompute="selective"),
        "full_recompute": Layout(recompute="full"),
    },
    2: {
        "dp2": Layout(),
        "ep2": Layout(expert=2, microbatches=2),
        "tp2": Layout(tensor=2),
        "tp2_ep2_etp1": Layout(tensor=2, expert=2),
        "tp2_etp2": Layout(tensor=2, expert_tensor=2),
        "pp2": Layout(pipeline=2, microbatches=4),
        "cp2": Layout(context=2, microbatches=2),
        "pp2_full_recompute": Layout(pipeline=2, microbatches=3, recompute="full"),
        "tp2_ep2_selective_recompute": Layout(tensor=2, expert=2, recompute="selective"),
    },
    4: {
        "tp2_ep2_dp2": Layout(tensor=2, expert=2),
        "ep2_etp2_dp4": Layout(expert=2, expert_tensor=2),
        "tp2_pp2": Layout(tensor=2, pipeline=2, microbatches=4),
        "tp2_cp2_ep2": Layout(tensor=2, context=2, expert=2, microbatches=2),
        "pp2_ep2_dp2": Layout(pipeline=2, expert=2, microbatches=2),
    },
}


def parts_of(num_documents: int, num_parts: int) -> list[range]:
    """Consecutive documents, as many parts as asked for; the last parts are empty where there are too few."""
    borders = [part * num_documents // num_parts for part in range(num_parts + 1)]
    return [range(*pair) for pair in itertools.pairwise(borders)]


def batch_of(answers: dict[str, Any], documents: range, multiple: int) -> tuple[DeviceBatch, slice]:
    """The named documents as one batch, a document of padding at its end; and their tokens in the answers."""
    lengths = answers["lengths"]
    start = sum(lengths[: documents.start])
    mine = [lengths[d] for d in documents]
    span = slice(start, start + sum(mine))
    padding = -sum(mine) % multiple or (0 if mine else multiple)
    lengths = (*mine, padding) if padding else tuple(mine)
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    ids, targets = (torch.cat([answers[n][span], torch.zeros(padding).long()]) for n in ("input_ids", "target_ids"))
    return DeviceBatch(ids, targets, borders, lengths), span


def logits_of(model: PolicyModel, batch: DeviceBatch, groups: ParallelGroups) -> torch.Tensor:
    """[T, V] on every rank, through all stages."""

    def score(hidden: torch.Tensor, _number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden.new_zeros(()), head_logits(model, hidden, batch, groups)

    outputs = run_microbatches(model, [batch], score, groups, train=False)
    return from_last_stage(outputs[0] if outputs else torch.empty(0), groups)


def per_document_logits(model: PolicyModel, answers: dict[str, Any], groups: ParallelGroups) -> torch.Tensor:
    """Each document alone."""
    rows = []
    for document, length in enumerate(answers["lengths"]):
        batch, _ = batch_of(answers, range(document, document + 1), groups.tp_size)
        rows.append(logits_of(model, batch, groups)[:length])
    return torch.cat(rows)


def gradients(
    model: PolicyModel, answers: dict[str, Any], groups: ParallelGroups, num_microbatches: int
) -> dict[str, Any]:
    """Gradients by HF name on rank 0, their norm, loss and largest errors; then a step of the distributed optimizer."""
    policy = PolicyOptimizer(model, groups, OPTIMIZER)
    documents = parts_of(len(answers["lengths"]), groups.dp_size)[groups.dp_rank]
    microbatches = [
        batch_of(answers, range(documents.start + part.start, documents.start + part.stop), groups.tp_size)
        for part in parts_of(len(documents), num_microbatches)
    ]

    def score(hidden: torch.Tensor, number: int) -> tuple[torch.Tensor, list[float]]:
        batch, span = microbatches[number]
        out = head_logprobs(policy.ddp, hidden, batch, groups)
        count = span.stop - span.start
        loss = (out.logp[:count] * answers["weights"][span]).sum()
        logp_error = (out.logp.detach()[:count] - answers["logp"][span]).abs()
        entropy_error = (out.entropy.detach()[:count] - answers["entropy"][span]).abs()
        return loss, [float(loss.detach()), *(float(e.max()) if count else 0.0 for e in (logp_error, entropy_error))]

    policy.zero_grad()
    batches = [batch for batch, _ in microbatches]
    forwards: list[None] = []
    watched = model.decoder.layers[-1].mlp.register_forward_hook(lambda *_: forwards.append(None))  # type: ignore
    outputs = from_last_stage(run_microbatches(policy.ddp, batches, score, groups, train=True), groups)
    watched.remove()
    # Whole sums on every rank, where the distributed optimizer would be content with its shards.
    finalize_model_grads([policy.ddp], pg_collection=groups.pg, force_all_reduce=True)
    policy.optimizer.prepare_grads()
    loss = torch.tensor(sum(output[0] for output in outputs))
    dist.all_reduce(loss, group=groups.dp_group)
    grads = {name: grad.clone() for name, grad in export_gradients(model, groups) if grad is not None}
    grad_norm = float(policy.optimizer.get_grad_norm())  # type: ignore[arg-type]
    policy.zero_grad()
    run_microbatches(policy.ddp, batches, score, groups, train=True)
    policy.step(LR, step=0)
    return {
        "grads": grads,
        "grad_norm": grad_norm,
        "loss": float(loss),
        "forwards": len(forwards) / len(batches),
        "logp_error": max(output[1] for output in outputs),
        "entropy_error": max(output[2] for output in outputs),
    }


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


def update_error(before: torch.Tensor, after: torch.Tensor, grad: torch.Tensor, grad_norm: float) -> float:
    """How far AdamW's first step is from its closed form, in steps, where float32 knows the gradient well enough."""
    clipped = grad.double() * min(1.0, OPTIMIZER.clip_grad / grad_norm)
    expected = clipped / (clipped.abs() + OPTIMIZER.eps)
    known = grad.abs() > 1e-3 * grad.abs().max()
    return float(((before - after).double() / LR - expected)[known].abs().max())


def tied_error(model: PolicyModel, groups: ParallelGroups) -> float:
    """Largest difference between the copies of a tied embedding on the first and the last stage."""
    if groups.pp_size == 1 or not model.share_embeddings_and_output_weights:
        return 0.0
    shape = (model.vocab_size // groups.tp_size, model.config.hidden_size)
    mine = model.shared_embedding_or_output_weight()
    copies = [torch.zeros(shape) for _ in range(groups.pp_size)]
    dist.all_gather(copies, torch.zeros(shape) if mine is None else mine.detach(), group=groups.pp_group)
    return float((copies[0] - copies[-1]).abs().max())


def measure(name: str, layout: Layout, groups: ParallelGroups, root: Path, work: Path) -> dict[str, Any]:
    answers = torch.load(root / f"{name}.pt")
    config = ModelConfig(path=str(root / name), recompute=layout.recompute)
    model = build_model(config, layout.parallel, groups, PLATFORM)
    nan_before = all(bool(tensor.isnan().all()) for tensor in model.global_tensors().values())
    convert.load_hf(model, root / name, groups)
    packed = logits_of(model, batch_of(answers, range(5), groups.tp_size)[0], groups)[: len(answers["logits"])]
    alone = per_document_logits(model, answers, groups)
    owners_right = exported_to_owners(model, groups, root / name)
    convert.save_hf(model, work / "back", groups, source=root / name)
    before = {name: tensor.clone() for name, tensor in export_hf(model, groups) if tensor is not None}
    got = gradients(model, answers, groups, layout.microbatches)
    after = {name: tensor for name, tensor in export_hf(model, groups) if tensor is not None}
    grads, exact = got.pop("grads"), answers["grads"]
    result = {
        **got,
        "nan_before_load": nan_before,
        "tied_error": tied_error(model, groups),
        "logits_error": float((packed - answers["logits"]).abs().max()),
        "packing_error": float((packed - alone).abs().max()),
        "owners_right": owners_right,
        "files_equal": file_hashes(work / "back") == file_hashes(root / name),
        "companions": (work / "back" / "tokenizer_config.json").is_file(),
        "exact_loss": float((answers["logp"] * answers["weights"]).sum()),
        "exact_grad_norm": float(torch.stack([g.norm() for g in exact.values()]).norm()),
    }
    if groups.rank == 0:
        result["update_error"] = max(
            update_error(before[n], after[n], exact[n], result["exact_grad_norm"]) for n in exact
        )
        result["grad_names_equal"] = sorted(grads) == sorted(exact)
        errors = [float((grads[n] - exact[n]).norm() / exact[n].norm()) for n in grads]
        result["grad_error"] = float(np.max(errors))  # NaN if one is, where max() would hide it
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
    hf_files.MAX_SHARD_BYTES = 100_000
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
    for name, layout in LAYOUTS[world_size].items():
        groups = build_groups(layout.parallel, PLATFORM, seed=1)
        for model in MODELS:
            if model == "tied" and name not in TIED_LAYOUTS:
                continue
            results[f"{name}/{model}"] = measure(model, layout, groups, root, work / f"{name}_{model}")
        if name == "single":
            results["refusals"] = refusals(root, groups)
            results["small_files"] = saved_in_small_files(root, work, groups)
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        (work / f"world{world_size}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
