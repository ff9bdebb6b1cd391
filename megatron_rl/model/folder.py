"""First look at a Hugging Face model folder: cheap, clear errors before anything heavy starts."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatron_rl.config import ConfigError
from megatron_rl.model.families import family_for

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def check_model_folder(path: str | Path) -> dict[str, Any]:
    """config.json of the folder, its architecture and options proven supported, its weight files present.

    ConfigError otherwise. Reads of the weights only the headers and imports no Megatron.
    """
    folder = Path(path)
    config = read_hf_config(folder)
    family_for(config).check(config)
    for file in sorted(set(weight_files(folder).values())):
        _check_weights(file)
    return config


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


def _check_weights(file: Path) -> None:
    """Header and length of a safetensors file: what a broken download gets wrong."""
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        raise ConfigError(
            f"{file} must be a whole safetensors file, got {size} bytes ({error}); download or convert it again"
        ) from error
