"""Hugging Face folder <-> model <-> Megatron checkpoint folder, streaming tensor by tensor."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.checkpoint.config import Direction
from megatron_rl.checkpoint.folders import STATE_NAME, new_folder
from megatron_rl.checkpoint.sharded import load_sharded, save_sharded
from megatron_rl.config import ConfigError
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.distributed.device import PlatformKind, init_process_group, start_platform
from megatron_rl.distributed.groups import ParallelGroups, build_groups
from megatron_rl.model.build import build_from_config
from megatron_rl.model.families import family_for
from megatron_rl.model.folder import INDEX_NAME, SINGLE_NAME, check_model_folder, read_hf_config, weight_files
from megatron_rl.model.hf_weights import HfTensorSpec, export_hf, hf_layout, import_hf
from megatron_rl.model.policy import PolicyModel

MAX_SHARD_BYTES = 4 * 2**30
"""Largest safetensors file; a single larger tensor gets a file of its own."""

COMPANION_PATTERNS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
"""Files of an HF folder that stay valid when only the weights change."""


def load_hf(model: PolicyModel, folder: Path, groups: ParallelGroups) -> None:
    """Fills the model from a folder's safetensors; each rank reads what it holds. DataError when they do not fit."""
    files = weight_files(Path(folder))
    with ExitStack() as stack:
        handles = [stack.enter_context(safe_open(file, framework="pt")) for file in sorted(set(files.values()))]
        place = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118
        available = {name: tuple(handle.get_slice(name).get_shape()) for name, handle in place.items()}
        import_hf(model, groups, lambda name: place[name].get_tensor(name), available=available)


def save_hf(model: PolicyModel, folder: Path, groups: ParallelGroups, *, source: Path) -> None:
    """Writes a folder that transformers and the engine load: weights, config.json, tokenizer and companions of source.

    Collective; rank 0 writes. The folder appears whole or not at all, in place of an older one; it is there on return.
    """
    shards = _shard_plan(hf_layout(model, groups))
    if groups.rank == 0:
        with new_folder(Path(folder)) as partial:
            _write_config(partial, model.hf_config, model.config.params_dtype)
            copy_companions(Path(source), partial)
            _write_weights(partial, export_hf(model, groups), shards)
    else:
        for _ in export_hf(model, groups):
            pass
    dist.barrier()


def convert(
    source: Path,
    target: Path,
    *,
    direction: Direction | None = None,
    hf_source: Path | None = None,
    parallel: ParallelConfig | None = None,
    platform_kind: PlatformKind = "cpu",
    dtype: str | None = None,
) -> Path:
    """HF folder -> Megatron checkpoint folder, or that or a run's checkpoint -> HF folder. Returns target.

    Joins the ranks torchrun started, or runs alone; direction follows from what source holds where None. hf_source: a
    folder whose tokenizer and companions go into an HF folder, source itself where None. dtype: of the result, that of
    config.json where None. ConfigError or DataError when source does not fit.
    """
    source, target, parallel = Path(source), Path(target), parallel or ParallelConfig()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"a conversion must write into a new folder, got {target}, which exists; choose another")
    direction = direction or ("to_hf" if (source / STATE_NAME).is_dir() else "to_megatron")
    hf_config = check_model_folder(source) if direction == "to_megatron" else _check_megatron_folder(source)
    platform = start_platform(platform_kind)
    init_process_group(platform)
    groups = build_groups(parallel, platform, seed=0)
    name = dtype or hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    model = build_from_config(hf_config, name, parallel, groups, platform)
    if direction == "to_hf":
        load_sharded(source / STATE_NAME, model, groups)
        save_hf(model, target, groups, source=Path(hf_source or source))
        return target
    load_hf(model, source, groups)
    with new_folder(target, collective=True) as partial:
        if groups.rank == 0:
            (partial / STATE_NAME).mkdir()
            _write_config(partial, hf_config, model.config.params_dtype)
            copy_companions(source, partial)
        dist.barrier()
        save_sharded(partial / STATE_NAME, model, groups)
    return target


def copy_companions(source: Path, target: Path) -> None:
    """Copies tokenizer, chat template and generation config."""
    for pattern in COMPANION_PATTERNS:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def _check_megatron_folder(folder: Path) -> dict[str, Any]:
    config = read_hf_config(folder)
    family_for(config).check(config)
    if not (folder / STATE_NAME).is_dir():
        raise ConfigError(
            f"a Megatron checkpoint folder must hold {STATE_NAME}/ beside config.json, got none in {folder}; "
            "give a folder that a run or a conversion has written"
        )
    return config


def _write_config(folder: Path, hf_config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """config.json as it was, but with the dtype of the weights beside it."""
    key = "torch_dtype" if "torch_dtype" in hf_config and "dtype" not in hf_config else "dtype"
    config = {**hf_config, key: str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _shard_plan(layout: list[HfTensorSpec]) -> dict[str, str]:
    """Tensor name -> file name, in layout order, each file at most MAX_SHARD_BYTES."""
    numbers, number, used = {}, 0, 0
    for spec in layout:
        size = torch.Size(spec.shape).numel() * getattr(torch, spec.dtype).itemsize
        if used and used + size > MAX_SHARD_BYTES:
            number, used = number + 1, 0
        numbers[spec.name] = number
        used += size
    if number == 0:
        return dict.fromkeys(numbers, SINGLE_NAME)
    return {name: f"model-{n + 1:05}-of-{number + 1:05}.safetensors" for name, n in numbers.items()}


def _write_weights(folder: Path, tensors: Iterator[tuple[str, Tensor | None]], plan: Mapping[str, str]) -> None:
    """Writes each file when its last tensor has come, so that one file's tensors are held at a time."""
    held: dict[str, Tensor] = {}
    current, num_bytes = "", 0
    for name, tensor in tensors:
        assert tensor is not None, f"rank 0 owns {name}"
        if held and plan[name] != current:
            save_file(held, folder / current, metadata={"format": "pt"})
            held = {}
        current = plan[name]
        held[name] = tensor.cpu()
        num_bytes += tensor.nbytes
    save_file(held, folder / current, metadata={"format": "pt"})
    if current != SINGLE_NAME:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(plan)}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
