"""First look at a Hugging Face model folder: cheap, clear errors before anything heavy starts."""

import json
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.model.families import family_for

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def check_model_folder(path: str | Path) -> dict[str, Any]:
    """config.json of the folder, its architecture and options proven supported, its weight files present.

    ConfigError otherwise. Reads no weights and imports no Megatron.
    """
    folder = Path(path)
    config = read_hf_config(folder)
    family_for(config).check(config)
    weight_files(folder)
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
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} must be JSON, got: {error}; restore the file of the original model") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(config).__name__}; restore the original file")
    return config


def weight_files(folder: Path) -> dict[str, Path]:
    """HF tensor name -> safetensors file; for a single-file model the one key "" stands for every name."""
    index = folder / INDEX_NAME
    if index.is_file():
        files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
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
