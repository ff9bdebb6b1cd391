"""Writes docs/configuration.md from the config models: python -m megatron_rl.cli.docs [FILE]."""

import sys
from pathlib import Path

from megatron_rl.cli.runs import RlRun, SftRun
from megatron_rl.config.reference import config_reference


def reference() -> str:
    """The configuration reference as Markdown."""
    return config_reference([("megatron-rl sft", SftRun), ("megatron-rl rl", RlRun)])


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/configuration.md").write_text(reference(), encoding="utf-8")
