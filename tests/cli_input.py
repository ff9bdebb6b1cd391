"""Run files for tests of the command line; loaded with runpy, since tests are no package."""

import json
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.checkpoint.identity import describe_model, describe_tokenizer


def sft(tiny: Path, tmp_path: Path, **changes: Any) -> str:
    """Path of an SFT run file on the model and data of make_tiny, with other values for whole sections."""
    tree = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(tiny / "model")},
        "context_length": 256,
        "data": {"train": [str(tiny / "train.jsonl")]},
        **changes,
    }
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def rl(tiny: Path, tmp_path: Path, **changes: Any) -> str:
    """The same for RL on the baker task."""
    tree = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(tiny / "model")},
        "environments": [{"name": "baker"}],
        "rollout": {"context_length": 256},
        **changes,
    }
    path = tmp_path / "rl.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def write_checkpoint(run_dir: Path, model: Path, *, step: int, dtype: str = "float32") -> Path:
    """A checkpoint as far as a start looks at it: what it says about model and tokenizer. Returns its folder."""
    folder = run_dir / "checkpoints" / f"step_{step:06}"
    folder.mkdir(parents=True)
    hf_config = json.loads((model / "config.json").read_text())
    meta = {"step": step, "model": describe_model(hf_config, dtype), "tokenizer": describe_tokenizer(model)}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder
