"""First look at a Hugging Face model folder: cheap, clear errors before anything heavy starts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatron_rl.config import ConfigError, DataError
from megatron_rl.model.families import family_for

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_FLOATS = ("F32", "BF16", "F16", "F64")
"""Safetensors' names of the precisions that weights may come in."""


def check_model_folder(path: str | Path) -> dict[str, Any]:
    """config.json of the folder, its architecture and options proven supported, its weights those it describes.

    ConfigError or DataError otherwise. Reads of the weights only the headers and imports no Megatron.
    """
    folder = Path(path)
    config = read_hf_config(folder)
    family_for(config).check(config)
    available: dict[str, tuple[int, ...]] = {}
    for file in sorted(set(weight_files(folder).values())):
        available |= _unquantised(file)
    check_tensors(config, available)
    return config


def check_tensors(hf_config: dict[str, Any], available: Mapping[str, tuple[int, ...]]) -> None:
    """DataError unless these tensors, name -> shape, are the model's; names what is missing, extra or misshapen."""
    family = family_for(hf_config)
    expected = {part.name: part.shape for part in family.weight_parts(hf_config)}
    missing = [f"weight {name} is missing" for name in expected if name not in available]
    extra = [
        f"weight {name} has no place in the model"
        for name in available
        if name not in expected and not family.is_redundant(hf_config, name)
    ]
    other_shape = [
        misshapen(name, available[name], shape)
        for name, shape in expected.items()
        if name in available and available[name] != shape
    ]
    problems = missing + sorted(extra) + other_shape
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise DataError(
            f"the weights must be those of config.json ({family.architecture}, {len(expected)} tensors): "
            f"{'; '.join(problems[:5])}{more}"
        )


def misshapen(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """What is wrong with a tensor of another shape."""
    return f"weight {name} must have shape {list(expected)} by config.json, got {list(got)}; use the matching files"


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder as it stands; ConfigError when it is missing or no JSON object."""
    file = folder / "config.json"
    if not file.is_file():
        problem = "no config.json in it" if folder.is_dir() else "no such folder"
        raise ConfigError(
            f"a model folder must hold a config.json, got {folder} ({problem}); "
            "give the path of a Hugging Face model folder, or download one first"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} must be JSON, got: {error}; restore the file of the original model") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(config).__name__}; restore the original file")
    return config


def has_weights(folder: Path) -> bool:
    """Whether a folder holds safetensors weights or their index, whole or not."""
    return (folder / INDEX_NAME).is_file() or any(folder.glob("*.safetensors"))


def weight_files(folder: Path) -> dict[str, Path]:
    """HF tensor name -> safetensors file; for a single-file model the one key "" stands for every name."""
    index = folder / INDEX_NAME
    if index.is_file():
        files = {name: folder / file for name, file in _weight_map(index).items()}
        if missing := sorted({file.name for file in files.values() if not file.is_file()}):
            raise ConfigError(f"{index} names weight files that must exist, missing: {missing}; download them again")
        return files
    single = folder / SINGLE_NAME
    if not single.is_file():
        raise ConfigError(
            f"a model folder must hold {SINGLE_NAME} or {INDEX_NAME}, got neither in {folder}; "
            "convert other weight formats to safetensors first"
        )
    return {"": single}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{index} must be a JSON object with weight_map, got {type(error).__name__}: {error}; download it again"
        ) from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ConfigError(f"weight_map in {index} must name a file for each tensor, got others; download it again")
    return weight_map


def check_whole_file(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (safetensors' dtype, shape) of a file's tensors. ConfigError when its length is not what they take."""
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        raise ConfigError(
            f"{file} must be a whole safetensors file, got {size} bytes ({error}); download or convert it again"
        ) from error


def _unquantised(file: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a safetensors file's tensors; its length and their dtypes are checked."""
    tensors = check_whole_file(file)
    for name, (dtype, _) in tensors.items():
        if dtype not in _FLOATS:
            raise DataError(
                f"weight {name} in {file} must be one of {', '.join(_FLOATS)}, got {dtype}; "
                "use the model's unquantised weights, or those that megatron-rl soup makes of FP8 ones"
            )
    return {name: shape for name, (_, shape) in tensors.items()}
