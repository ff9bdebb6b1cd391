"""Run alone: what recomputation keeps for the backward pass, what it computes twice, and what gradients it gives."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.distributed.device import init_process_group, start_platform

PLATFORM = start_platform("cpu")

from megatron_rl.checkpoint.convert import load_hf  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, ParallelGroups, build_groups  # noqa: E402
from megatron_rl.model.build import ModelConfig, build_model  # noqa: E402
from megatron_rl.model.forward import DeviceBatch, taken_logprobs  # noqa: E402

LENGTHS = (40, 24)
COUNTED = ("PackedAttention", "ExpertLayer", "SwiGluMLP", "SelfAttention")


def measure(folder: Path, recompute: Any, groups: ParallelGroups) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(runs of each kind of module, bytes kept between forward and backward), gradients."""
    config = ModelConfig(path=str(folder), recompute=recompute)
    model = build_model(config, ParallelConfig(), groups, PLATFORM)
    load_hf(model, folder, groups)
    runs: Counter[str] = Counter()
    for module in model.modules():
        if type(module).__name__ in COUNTED:
            module.register_forward_hook(lambda module, *_: runs.update([type(module).__name__]))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(sum(LENGTHS)) % 512
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = taken_logprobs(model, DeviceBatch(ids, ids, borders, LENGTHS), groups).logp.sum()
    kept_bytes = sum(kept.values())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"runs": dict(runs), "kept_bytes": kept_bytes}, gradients


def main() -> None:
    folder, work = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    init_process_group(PLATFORM)
    groups = build_groups(ParallelConfig(), PLATFORM, seed=1)
    results = {}
    plain: dict[str, torch.Tensor] = {}
    for recompute in ("none", "selective", "full"):
        results[recompute], gradients = measure(folder, recompute, groups)
        plain = plain or gradients
        assert gradients.keys() == plain.keys()
        results[recompute]["equal"] = all(torch.equal(gradients[name], plain[name]) for name in plain)
    (work / "recompute.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
