"""Made-up Hugging Face folders for tests of checkpoints; loaded with runpy, since tests are no package."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor], *, num_files: int = 1, tokenizer: str = "{}", **config: Any
) -> Path:
    """A folder that a soup takes: weights in num_files files, config.json of config, a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "made_up", **config}))
    (folder / "tokenizer.json").write_text(tokenizer)
    if num_files == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        names = sorted(tensors)[number::num_files]
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's files, by the library."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors
