"""Run by torchrun: Hugging Face to Megatron and back, for every layout, from weights that are NaN."""

import json
import sys
import unittest.mock
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from megatron_rl.distributed.device import init_process_group, start_platform

PLATFORM = start_platform("cpu")

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402

from megatron_rl.checkpoint import hf_files  # noqa: E402
from megatron_rl.checkpoint.convert import convert, save_hf  # noqa: E402
from megatron_rl.checkpoint.sharded import load_sharded, save_sharded  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, ParallelGroups, build_groups  # noqa: E402
from megatron_rl.model.build import build_from_config  # noqa: E402
from megatron_rl.model.folder import read_hf_config, weight_files  # noqa: E402
from megatron_rl.model.policy import PolicyModel  # noqa: E402

LAYOUTS: dict[int, dict[str, ParallelConfig]] = {
    2: {
        "dp2": ParallelConfig(),
        "tp2": ParallelConfig(tensor=2),
        "ep2": ParallelConfig(expert=2),
        "etp2": ParallelConfig(tensor=2, expert_tensor=2),
        "pp2": ParallelConfig(pipeline=2),
    },
    4: {
        "tp2_ep2": ParallelConfig(tensor=2, expert=2),
        "ep2_etp2": ParallelConfig(tensor=2, expert=2, expert_tensor=2),
        "tp2_pp2": ParallelConfig(tensor=2, pipeline=2),
    },
}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of an HF folder."""
    found = {}
    for file in sorted(set(weight_files(folder).values())):
        with safe_open(file, framework="pt") as handle:
            found.update({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118
    return found


def differing(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names whose bytes, dtype or shape differ, and those that only one has."""
    return [
        name
        for name in sorted(got.keys() | expected.keys())
        if name not in got
        or name not in expected
        or got[name].dtype != expected[name].dtype
        or not torch.equal(got[name], expected[name])
    ]


def built(folder: Path, dtype: str, parallel: ParallelConfig) -> tuple[PolicyModel, ParallelGroups]:
    parallel_state.destroy_model_parallel()
    groups = build_groups(parallel, PLATFORM, seed=0)
    return build_from_config(read_hf_config(folder), dtype, parallel, groups, PLATFORM), groups


def converted(source: Path, target: Path, **options: Any) -> Path:
    parallel_state.destroy_model_parallel()
    convert(source, target, **options)
    return target


def through_layout(megatron: Path, work: Path, dtype: str, parallel: ParallelConfig) -> Path:
    """The HF folder that a live model writes after it has loaded the checkpoint; beside it what the model saves."""
    model, groups = built(megatron, dtype, parallel)
    load_sharded(megatron / "state", model, groups)
    save_hf(model, work / "live", groups, source=megatron)
    if groups.rank == 0:
        (work / "saved" / "state").mkdir(parents=True)
        (work / "saved" / "config.json").write_text((megatron / "config.json").read_text())
    dist.barrier()
    save_sharded(work / "saved" / "state", model, groups)
    return work / "live"


def by_megatron(megatron: Path, work: Path) -> Path:
    """The HF folder of what Megatron's own loader makes of a converted checkpoint."""
    model, groups = built(megatron, "float32", ParallelConfig(tensor=2))
    state = model.sharded_state_dict(metadata={"singleton_local_shards": False, "dp_cp_group": groups.pg.dp_cp})
    tensors = {name: item for name, item in state.items() if not name.endswith("_extra_state")}
    loaded: Any = dist_checkpointing.load({"model": tensors}, str(megatron / "state"))
    model.load_state_dict(loaded["model"], strict=False)
    save_hf(model, work / "by_megatron", groups, source=megatron)
    return work / "by_megatron"


def check(source: Path, work: Path, dtype: str, layouts: Mapping[str, ParallelConfig], results: dict[str, Any]) -> None:
    """Through every layout, and from a checkpoint that a live model has saved where experts and stages are cut."""
    exact, case = cast(tensors_of(source), dtype), f"{source.name} {dtype}"
    megatron = converted(source, work / "megatron", dtype=dtype)
    for layout, parallel in layouts.items():
        live = through_layout(megatron, work / layout, dtype, parallel)
        results[f"{case} {layout}"] = differing(tensors_of(live), exact)
        if layout in ("etp2", "pp2", "ep2_etp2"):
            back = converted(work / layout / "saved", work / layout / "back")
            results[f"{case} {layout} saved"] = differing(tensors_of(back), exact)


def check_variants(source: Path, work: Path, results: dict[str, Any]) -> None:
    """Of what check has converted: Megatron's own loader, several files, another dtype."""
    exact, megatron = tensors_of(source), work / "megatron"
    results[f"{source.name} read by Megatron"] = differing(tensors_of(by_megatron(megatron, work)), exact)
    with unittest.mock.patch.object(hf_files, "MAX_SHARD_BYTES", 100_000):
        many = converted(megatron, work / "many")
    assert len(list(many.glob("model-*.safetensors"))) > 2, "every rank writes a file"
    results[f"{source.name} in several files"] = differing(tensors_of(many), exact)
    lower = converted(megatron, work / "lower", dtype="bfloat16")
    results[f"{source.name} written in bfloat16"] = differing(tensors_of(lower), cast(exact, "bfloat16"))


def cast(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """All but the expert bias, which is float32 in every model."""
    return {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(getattr(torch, dtype))
        for name, tensor in tensors.items()
    }


def main() -> None:
    root, work = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    init_process_group(PLATFORM)
    results: dict[str, Any] = {}
    layouts = LAYOUTS[dist.get_world_size()]
    for name in ("plain", "glm"):
        check(root / name, work / name, "float32", layouts, results)
    if dist.get_world_size() == 2:
        check_variants(root / "glm", work / "glm", results)
        check(root / "glm", work / "glm_bf16", "bfloat16", {"pp2": layouts["pp2"]}, results)
        check(root / "tied", work / "tied", "float32", {"pp2": layouts["pp2"]}, results)
    if dist.get_rank() == 0:
        (work / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
