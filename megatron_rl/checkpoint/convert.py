"""Hugging Face folder <-> model <-> Megatron checkpoint folder, streaming tensor by tensor."""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from megatron_rl.checkpoint.config import Direction
from megatron_rl.checkpoint.conversion import start_conversion
from megatron_rl.checkpoint.folders import META_NAME, STATE_NAME, new_folder, partial_folder, reading
from megatron_rl.checkpoint.hf_files import HfFiles, copy_companions
from megatron_rl.checkpoint.identity import describe_model
from megatron_rl.checkpoint.safetensors_file import SafetensorsReader
from megatron_rl.checkpoint.stream import hf_of_checkpoint, pieces_of_hf
from megatron_rl.checkpoint.torch_dist import write_pieces
from megatron_rl.config import ConfigError
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.distributed.device import PlatformKind, init_process_group
from megatron_rl.distributed.groups import ParallelGroups, build_groups
from megatron_rl.model.build import build_from_config
from megatron_rl.model.families import family_for
from megatron_rl.model.folder import check_model_folder, read_hf_config, weight_files
from megatron_rl.model.hf_tensor import HfTensorSpec
from megatron_rl.model.hf_weights import check_available, export_hf, hf_layout, import_hf
from megatron_rl.model.policy import PolicyModel


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

    Collective; rank 0 writes, one tensor at a time. The folder appears whole or not at all, in place of an older one;
    it is there on return.
    """
    if groups.rank == 0:
        with new_folder(Path(folder)) as partial:
            files = HfFiles(partial, hf_layout(model, groups))
            _write_config(partial, model.hf_config, str(model.config.params_dtype).removeprefix("torch."))
            copy_companions(Path(source), partial)
            for name, tensor in export_hf(model, groups):
                assert tensor is not None, f"rank 0 owns {name}"
                files.write(name, tensor)
            files.write_index()
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
    platform_kind: PlatformKind | None = None,
    dtype: str | None = None,
) -> Path:
    """HF folder -> Megatron checkpoint folder, or that or a run's checkpoint -> HF folder. Returns target.

    Ranks that torchrun started share the work; none holds more than a layer, and a checkpoint is read by any parallel
    layout whoever wrote it. direction follows from what source holds where None. hf_source: a folder whose tokenizer
    and companions go into an HF folder, source itself where None. platform_kind: of the runs that write or read the
    checkpoint; None: what is recorded in source, else cpu. dtype: of the result, that of config.json where None; a
    checkpoint is converted to HF as it is. ConfigError or DataError when source does not fit: before anything is
    written, but for NaN, which is found on the way. No folder is left then.
    """
    source, target = Path(source), Path(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"a conversion must write into a new folder, got {target}, which exists; choose another")
    direction = direction or ("to_hf" if (source / STATE_NAME).is_dir() else "to_megatron")
    hf_config = check_model_folder(source) if direction == "to_megatron" else _check_megatron_folder(source)
    platform = start_conversion(source, platform_kind)
    init_process_group(platform)
    groups = build_groups(ParallelConfig(), platform, seed=0)
    stored = _stored_dtype(source, hf_config)
    to_hf = direction == "to_hf"
    with torch.device("meta"):
        nowhere = dataclasses.replace(platform, device=torch.device("meta"))
        name = stored if to_hf else dtype or stored
        model = build_from_config(hf_config, name, ParallelConfig(), groups, nowhere)
    if to_hf:
        with reading(source, cure="convert or copy it again"):
            _write_hf(model, groups, source, target, companions=Path(hf_source or source), dtype=dtype or stored)
    else:
        _write_megatron(model, groups, source, target, platform.kind)
    return target


def _write_megatron(
    model: PolicyModel, groups: ParallelGroups, source: Path, target: Path, platform: PlatformKind
) -> None:
    dtype = str(model.config.params_dtype).removeprefix("torch.")
    meta = {"platform": platform, "model": describe_model(model.hf_config, dtype)}
    with SafetensorsReader(sorted(set(weight_files(source).values()))) as weights:
        check_available(model, weights.shapes)
        pieces = pieces_of_hf(model, groups, weights.read, share=groups.rank, num_shares=groups.world_size)
        with new_folder(target, collective=True) as partial:
            if groups.rank == 0:
                (partial / STATE_NAME).mkdir()
                _write_config(partial, model.hf_config, dtype)
                (partial / META_NAME).write_text(json.dumps(meta, indent=2) + "\n")
                copy_companions(source, partial)
            dist.barrier()
            write_pieces(partial / STATE_NAME, pieces)


def _write_hf(
    model: PolicyModel, groups: ParallelGroups, source: Path, target: Path, *, companions: Path, dtype: str
) -> None:
    layout = [HfTensorSpec(part.name, part.dtype or dtype, part.shape) for part in model.weight_parts]
    files = HfFiles(partial_folder(target), layout)
    mine = sorted(set(files.plan.values()))[groups.rank :: groups.world_size]
    names = [spec.name for spec in layout if files.plan[spec.name] in mine]
    tensors = hf_of_checkpoint(model, groups, source / STATE_NAME, names)
    first = list(itertools.islice(tensors, 1))  # nothing is written before the checkpoint has proven whole
    dtypes = {spec.name: getattr(torch, spec.dtype) for spec in layout}
    with new_folder(target, collective=True) as partial:
        for name, tensor in itertools.chain(first, tensors):
            files.write(name, tensor.to(dtypes[name]))
        if groups.rank == 0:
            files.write_index()
            _write_config(partial, model.hf_config, dtype)
            copy_companions(companions, partial)


def _check_megatron_folder(folder: Path) -> dict[str, Any]:
    config = read_hf_config(folder)
    family_for(config).check(config)
    if not (folder / STATE_NAME).is_dir():
        raise ConfigError(
            f"a Megatron checkpoint folder must hold {STATE_NAME}/ beside config.json, got none in {folder}; "
            "give a folder that a run or a conversion has written"
        )
    return config


def _stored_dtype(source: Path, hf_config: Mapping[str, Any]) -> str:
    """torch's name of the dtype the weights have; a run may train in another than its model's config.json says."""
    meta = source / META_NAME
    if meta.is_file():
        return json.loads(meta.read_text())["model"]["dtype"]
    return hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"


def _write_config(folder: Path, hf_config: Mapping[str, Any], dtype: str) -> None:
    """config.json as it was, but with the dtype of the weights beside it."""
    key = "torch_dtype" if "torch_dtype" in hf_config and "dtype" not in hf_config else "dtype"
    (folder / "config.json").write_text(json.dumps({**hf_config, key: dtype}, indent=2, sort_keys=True) + "\n")
