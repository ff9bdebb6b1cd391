"""Checkpoints averaged number by number, as Hugging Face folders: weighted sums, read and written in small pieces.

Sums are taken in float64 and rounded once. So a soup of equal checkpoints is the checkpoint, bit by bit, whatever the
weights: each product is off by 2^-53 of itself, and no stored dtype has a number that near to another. Weights that
are 0 are not read. Imports no Megatron.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rl.checkpoint.folders import new_folder
from megatron_rl.checkpoint.fp8_weights import QUANTIZATION_KEY
from megatron_rl.checkpoint.hf_files import HfFiles, copy_companions
from megatron_rl.checkpoint.soup_member import Member, matrix_shape, open_members
from megatron_rl.config import ConfigError, DataError
from megatron_rl.model.hf_tensor import HfTensorSpec

SoupDtype = Literal["float32", "bfloat16", "float16"]
PIECE_NUMBERS = 2**18
"""Numbers of one weight that are in memory at a time, in float64 twice and as they are stored; at least one row."""
_SUM_TOLERANCE = 1e-6


def soup_weights(count: int, weights: Sequence[float] | None = None, *, normalise: bool = False) -> list[float]:
    """Weights of count checkpoints that sum to 1 within float64; equal ones where None.

    ConfigError for another number of them, for one that is negative or not finite, if all are 0, and if they sum to
    something else than 1, within a millionth, unless normalise.
    """
    if weights is None:
        if normalise:
            raise ConfigError("--normalise has no effect without --weights; add those or remove this")
        return [1 / count] * count
    if len(weights) != count:
        raise ConfigError(
            f"--weights must be one number for each checkpoint, got {len(weights)} for {count}; add or remove"
        )
    if bad := [weight for weight in weights if not (math.isfinite(weight) and weight >= 0)]:
        raise ConfigError(f"--weights must be finite and not negative, got {bad[0]:g}; give shares such as .7,.3")
    total = math.fsum(weights)
    if total == 0:
        raise ConfigError("--weights must not all be 0, got only zeros; give the checkpoint you want a share")
    if not normalise and abs(total - 1) > _SUM_TOLERANCE:
        raise ConfigError(
            f"--weights must sum to 1, got {total:g}; correct them, or divide by the sum with --normalise"
        )
    return [weight / total for weight in weights]


def soup(
    sources: Sequence[Path],
    target: Path,
    *,
    weights: Sequence[float] | None = None,
    dtype: SoupDtype | None = None,
    on_written: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Writes the Hugging Face folder target: sum of weights[k] * sources[k], or their mean. Returns target.

    Tokenizer, chat template and generation config are those of the first, and config.json too, without its
    quantisation. Each tensor keeps its dtype, and FP8 becomes bfloat16; dtype is another for all but the tensors that a
    checkpoint stores wider than the rest of it. on_written gets bytes written and bytes in all.

    ConfigError or DataError, before anything is written, for checkpoints that differ in config, tokenizer, names or
    shapes, for no room, and for a target that exists; DataError for a number that is not finite, and no folder is left.
    """
    target = Path(target)
    check_new(target)
    with ExitStack() as stack:
        members = open_members(stack, [Path(source) for source in sources])
        layout = soup_layout(members, dtype)
        total = num_bytes(layout)
        check_room(target, total)
        shares = soup_weights(len(members)) if weights is None else weights
        used = [(member, share) for member, share in zip(members, shares, strict=True) if share]
        with new_folder(target) as partial:
            files, done = HfFiles(partial, layout), 0
            for spec in layout:
                files.write_pieces(spec.name, _pieces(spec, used))
                done += num_bytes([spec])
                on_written(done, total)
            files.write_index()
            _write_config(partial, members[0].config, dtype or members[0].main_dtype)
            copy_companions(members[0].folder, partial)
    return target


def check_new(target: Path) -> None:
    """ConfigError for a folder that holds something already."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"a soup must be written into a new folder, got {target}, which exists; choose another")


def check_room(target: Path, needed: int) -> None:
    """ConfigError when the disk of target has fewer free bytes than needed."""
    folder = next(path for path in target.absolute().parents if path.is_dir())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"the disk of {target} must have room for {needed / 2**30:.3g} GiB, got {free / 2**30:.3g} GiB free; "
            "make room or choose another folder"
        )


def soup_layout(members: Sequence[Member], dtype: SoupDtype | None = None) -> list[HfTensorSpec]:
    """What a soup holds, in the order of the first member. DataError where dtypes differ and none is chosen."""
    first = members[0]
    layout = []
    for name, shape in first.shapes.items():
        pinned = {m.dtypes[name] for m in members if _width(m.dtypes[name]) > _width(m.main_dtype)}
        stored = {m.dtypes[name]: m for m in members}
        if pinned:
            layout.append(HfTensorSpec(name, max(pinned, key=_width), shape))
        elif dtype or len(stored) == 1:
            layout.append(HfTensorSpec(name, dtype or first.dtypes[name], shape))
        else:
            notes = " and ".join(f"{found} in {member.folder}" for found, member in stored.items())
            raise DataError(f"weight {name} must have one dtype, got {notes}; choose that of the soup with --dtype")
    return layout


def num_bytes(layout: Sequence[HfTensorSpec]) -> int:
    """Of the tensors alone."""
    return sum(math.prod(spec.shape) * _width(spec.dtype) for spec in layout)


def _pieces(spec: HfTensorSpec, used: Sequence[tuple[Member, float]]) -> Iterator[Tensor]:
    """The averaged tensor, some rows at a time."""
    if not math.prod(spec.shape):
        return
    num_rows, length = matrix_shape(spec.shape)
    step = max(1, PIECE_NUMBERS // length)
    for start in range(0, num_rows, step):
        rows = range(start, min(start + step, num_rows))
        average = _average(spec.name, used, rows)
        _check_range(average, spec, used, rows)
        yield average.to(getattr(torch, spec.dtype))


def _average(name: str, used: Sequence[tuple[Member, float]], rows: range) -> Tensor:
    """float64; the sum begins with the first product, since 0 + -0.0 would be 0.0."""
    (first, weight), *others = used
    total = first.read(name, rows).mul_(weight)
    for member, weight in others:
        total.add_(member.read(name, rows), alpha=weight)
    return total


def _check_range(average: Tensor, spec: HfTensorSpec, used: Sequence[tuple[Member, float]], rows: range) -> None:
    """DataError when a number is not finite, or not in the soup's dtype. NaN and infinity of a member last in a sum."""
    extremes = torch.stack(average.aminmax())
    if extremes.to(getattr(torch, spec.dtype)).isfinite().all():
        return
    for member, _ in used:
        if not member.read(spec.name, rows).isfinite().all():
            raise DataError(
                f"{member.folder}: weight {spec.name} must hold finite numbers, got NaN or infinity; use undamaged ones"
            )
    raise DataError(
        f"weight {spec.name} of the soup must fit {spec.dtype}, got {extremes.abs().max():.3g}; choose another --dtype"
    )


def _width(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def _write_config(folder: Path, hf_config: dict[str, Any], dtype: str) -> None:
    """config.json as it was, without quantisation, but with the dtype that most weights beside it have."""
    key = "torch_dtype" if "torch_dtype" in hf_config and "dtype" not in hf_config else "dtype"
    kept = {name: value for name, value in hf_config.items() if name != QUANTIZATION_KEY}
    (folder / "config.json").write_text(json.dumps({**kept, key: dtype}, indent=2, sort_keys=True) + "\n")
