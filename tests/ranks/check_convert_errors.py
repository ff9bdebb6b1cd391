"""Run alone: what converting folders that do not fit says. Writes errors.json."""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_rl.distributed.device import start_platform

PLATFORM = start_platform("cpu")

from megatron.core import parallel_state  # noqa: E402

from megatron_rl.checkpoint.convert import convert  # noqa: E402
from megatron_rl.config import DataError  # noqa: E402


def refusal(source: Path, target: Path) -> str:
    parallel_state.destroy_model_parallel()
    try:
        convert(source, target)
    except DataError as error:
        return str(error)
    return "converted"


def main() -> None:
    models, work = Path(sys.argv[1]), Path(sys.argv[2])
    broken = shutil.copytree(models / "plain", work / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.extra"] = tensors["lm_head.weight"] = torch.zeros(2, 2)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, broken / "model.safetensors")
    errors = {"hf": refusal(broken, work / "out")}
    not_numbers = shutil.copytree(models / "plain", work / "not_numbers")
    tensors = load_file(not_numbers / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, not_numbers / "model.safetensors")
    errors["nan"] = refusal(not_numbers, work / "out")

    convert_to = work / "megatron"
    parallel_state.destroy_model_parallel()
    convert(models / "plain", convert_to)
    smaller = shutil.copytree(convert_to, work / "smaller")
    config = json.loads((smaller / "config.json").read_text())
    (smaller / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    errors["another size"] = refusal(smaller, work / "out")
    shutil.copyfile(models / "glm" / "config.json", smaller / "config.json")
    errors["another family"] = refusal(smaller, work / "out")
    (work / "errors.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main()
