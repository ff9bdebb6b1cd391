"""What must be equal for a checkpoint to fit a run, and how large one is. Imports no Megatron."""

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.config import CheckpointConfig
from megatron_rl.checkpoint.folders import META_NAME, check_whole, checkpoints, latest_checkpoint, reading
from megatron_rl.config import ConfigError
from megatron_rl.distributed.device import PlatformKind
from megatron_rl.model.families import family_for
from megatron_rl.model.families.family import HfConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
_TEMPLATE_PATTERN = "chat_template*"
_TOKENIZER_SETTINGS = ("chat_template", "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens")


def describe_model(hf_config: HfConfig, dtype: str) -> dict[str, Any]:
    """What a state is the state of: every setting that the model computes with. dtype is torch's name.

    The digest covers every tensor's name and shape.
    """
    family = family_for(hf_config)
    settings = family.transformer_kwargs(hf_config) | family.model_kwargs(hf_config)
    shapes = json.dumps([(part.name, part.shape) for part in family.weight_parts(hf_config)])
    return {
        "architecture": family.architecture,
        "dtype": dtype,
        **{key: getattr(value, "__name__", value) for key, value in sorted(settings.items())},
        "tensors": hashlib.sha256(shapes.encode()).hexdigest()[:16],
    }


def describe_tokenizer(folder: Path) -> dict[str, str]:
    """File name -> digest of what decides about a text's tokens: vocabulary, special tokens, chat template.

    Of tokenizer_config.json only those settings count: libraries write their own version and paths into it.
    """
    digests = describe_vocabulary(folder) | _digests(sorted(folder.rglob(_TEMPLATE_PATTERN)))
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        tree = json.loads(settings.read_text(encoding="utf-8"))
        chosen = {key: tree[key] for key in sorted(tree) if key in _TOKENIZER_SETTINGS or key.endswith("_token")}
        digests[settings.name] = _digest(json.dumps(chosen, sort_keys=True).encode())
    return digests


def describe_vocabulary(folder: Path) -> dict[str, str]:
    """File name -> digest of what decides which token an id is."""
    return _digests([folder / name for name in _TOKENIZER_FILES])


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """One note for each setting that both have with another value."""
    return [f"{key} {there[key]} there, {here[key]} here" for key in here if key in there and there[key] != here[key]]


def check_same(
    path: Path,
    saved: Mapping[str, Any],
    *,
    model: Mapping[str, Any],
    tokenizer: Mapping[str, str],
    platform: PlatformKind,
) -> None:
    """ConfigError when the checkpoint at path, whose meta.json is saved, is of another platform, model or tokenizer.

    A checkpoint that says nothing about its platform or tokenizer is accepted: none was recorded for it.
    """
    if (saved_on := saved.get("platform", platform)) != platform:
        raise ConfigError(
            f"checkpoint {path} must be resumed on its own platform, got {platform}, but it was saved on {saved_on}, "
            "which names its tensors otherwise; convert it to a Hugging Face folder and start from that"
        )
    if different := differences(saved["model"], model):
        raise ConfigError(
            f"checkpoint {path} must be of the model that the run file names, got: {'; '.join(different)}; "
            "restore model.path and model.dtype, or start in another run folder"
        )
    recorded = saved.get("tokenizer", tokenizer)
    changed = sorted(name for name in recorded.keys() | tokenizer.keys() if recorded.get(name) != tokenizer.get(name))
    if changed:
        raise ConfigError(
            f"checkpoint {path} must be resumed with the tokenizer it was trained with, got other contents of "
            f"{', '.join(changed)} in model.path; restore them, or start in another run folder"
        )


def check_resumable(
    run_dir: Path, model_path: Path, hf_config: HfConfig, dtype: str, *, platform: PlatformKind
) -> None:
    """ConfigError when the newest checkpoint of the run folder is not of this model, dtype, tokenizer and platform."""
    check_whole(Path(run_dir) / "checkpoints")
    path = latest_checkpoint(Path(run_dir) / "checkpoints")
    if path is None:
        return
    with reading(path):
        saved = json.loads((path / META_NAME).read_text(encoding="utf-8"))
        model, tokenizer = describe_model(hf_config, dtype), describe_tokenizer(Path(model_path))
        check_same(path, saved, model=model, tokenizer=tokenizer, platform=platform)


def num_parameters(hf_config: HfConfig) -> int:
    """Numbers in all weights of the model."""
    return sum(math.prod(part.shape) for part in family_for(hf_config).weight_parts(hf_config))


def checkpoint_bytes(hf_config: HfConfig, dtype: str) -> int:
    """Weights and two float32 moments: 12 bytes a parameter in float32; in bfloat16 14, with float32 master weights."""
    itemsize = getattr(torch, dtype).itemsize
    return num_parameters(hf_config) * (itemsize + 8 + (0 if itemsize == 4 else 4))


def check_disk_space(
    run_dir: Path, hf_config: HfConfig, dtype: str, *, config: CheckpointConfig, export: bool, references: int = 0
) -> None:
    """ConfigError when the run folder's disk has no room for what the run writes: checkpoints and exported weights.

    references: policies that become the run's reference between two checkpoints; another one stays for each checkpoint.

    An old checkpoint goes when the new one is complete, so there are keep_last + 1 for a moment; those that are there
    already need no more room. What keep_every_steps keeps comes on top: it grows with the run and is not counted.
    """
    num_new = max(1, config.keep_last + 1 - len(checkpoints(Path(run_dir) / "checkpoints")))
    each, exported = checkpoint_bytes(hf_config, dtype), num_parameters(hf_config) * getattr(torch, dtype).itemsize
    num_references = num_new + references if references else 0
    needed = num_new * each + (exported if export else 0) + num_references * exported
    folder = next(path for path in [Path(run_dir).absolute(), *Path(run_dir).absolute().parents] if path.is_dir())
    free = shutil.disk_usage(folder).free
    if free < needed:
        what = f"one more checkpoint of {_gib(each)}"
        if num_new > 1:
            what = f"{num_new} checkpoints of {_gib(each)}, one more than trainer.checkpoint.keep_last while it saves,"
        if export:
            what += f" and {_gib(exported)} of exported weights"
        if references:
            what += f" and {num_references} reference policies of {_gib(exported)}"
        raise ConfigError(
            f"the disk of run.dir {run_dir} must have room for {what}, together {_gib(needed)}, got {_gib(free)} free; "
            "make room, keep fewer or choose another run.dir"
        )


def _digests(files: Sequence[Path]) -> dict[str, str]:
    return {file.name: _digest(file.read_bytes()) for file in files if file.is_file()}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
