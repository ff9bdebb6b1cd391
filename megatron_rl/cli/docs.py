"""Writes docs/configuration.md from the config models: python -m megatron_rl.cli.docs [FILE]."""

import sys
from pathlib import Path

from megatron_rl.checkpoint.mergemix import MergeMixConfig
from megatron_rl.cli.runs import RlRun, SftRun
from megatron_rl.config import ConfigModel
from megatron_rl.config.reference import config_reference
from megatron_rl.data.distill.config import BackfillRun, PrefillRun

ROOTS: list[tuple[str, type[ConfigModel]]] = [
    ("megatron-rl sft", SftRun),
    ("megatron-rl rl", RlRun),
    ("megatron-rl distill, kind: prefill", PrefillRun),
    ("megatron-rl distill, kind: backfill", BackfillRun),
    ("megatron-rl mergemix", MergeMixConfig),
]
"""Commands that read a run file, and what is in it."""


def reference() -> str:
    """The configuration reference as Markdown."""
    return config_reference(ROOTS)


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/configuration.md").write_text(reference(), encoding="utf-8")
