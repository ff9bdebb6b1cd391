"""The bench compares like with like, counts the fastest rival, and writes only its own part of the page."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[2] / "tools" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """import of a script of tools/bench by name."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_padded_batches_of_all_ranks_hold_every_target_once(bench: Any, world_size: int) -> None:
    documents = bench("documents")
    for samples in documents.steps_of_samples():
        of_rank = [documents.padded(samples, rank=rank, world_size=world_size) for rank in range(world_size)]
        rows = [row for batches in of_rank for batch in batches for row in zip(batch.ids, batch.labels, strict=True)]
        found = sorted(tuple(labels[labels != -100].tolist()) for _, labels in rows)
        assert found == sorted(tuple(sample.token_ids[1:].tolist()) for sample in samples)
        assert all(torch.equal(ids[1:][labels[1:] != -100], labels[labels != -100]) for ids, labels in rows)
        assert sum(map(len, found)) == documents.num_trained(samples)


def test_two_ranks_of_the_plain_loop_share_the_tokens_fairly(bench: Any) -> None:
    documents = bench("documents")
    for samples in documents.steps_of_samples():
        cells = [sum(b.ids.numel() for b in documents.padded(samples, rank=r, world_size=2)) for r in range(2)]
        assert max(cells) < 1.1 * min(cells)


def test_of_several_plain_loops_the_fastest_counts(bench: Any) -> None:
    row = {
        "layout": "DP2, bfloat16",
        "seconds": {"ours": 2.0, "1 process/bfloat16 weights": 8.0, "1 process/autocast": 4.0, "DDP/autocast": 3.0},
        "ratio": {"1 process/bfloat16 weights": 4.0, "1 process/autocast": 2.0, "DDP/autocast": 1.5},
    }
    cells = bench("run").trainer_row(row, 6000.0)
    assert cells == ["DP2, bfloat16", "3,000", "1,500 (autocast)", "2.00x", "2,000 (autocast)", "1.50x"]


def test_measurements_replace_what_lies_between_the_marks_and_nothing_else(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tables = bench("tables")
    page = tmp_path / "performance.md"
    page.write_text(tables.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(tables, "PAGE", page)
    headings = page.read_text(encoding="utf-8").count("## ")
    for part, cells in (("trainer", ("old", "new")), ("head", ("old", "other"))):
        for cell in cells:
            tables.write_page(part, [tables.Rows("one", ["layout", "ours"], [["1 process", cell]])])
    text = page.read_text(encoding="utf-8")
    assert "| 1 process | new |" in text and "| 1 process | other |" in text and "old |" not in text
    assert text.startswith("# Performance\n") and text.count("## ") == headings


def test_memory_that_does_not_fit_is_read_off_the_line_through_two_sizes_that_do(bench: Any) -> None:
    assert bench("head").extrapolated((256, 768), (1256, 1768), 8192) == 1000 + 8192


@pytest.mark.slow
def test_the_head_needs_at_most_15_percent_of_the_memory_of_materialised_logits(bench: Any) -> None:
    ours, plain = bench("head").peaks()
    assert 0 < ours <= 0.15 * plain


@pytest.mark.slow
def test_both_sides_start_at_the_same_loss_in_every_kind_of_layout(tmp_path: Path, bench: Any) -> None:
    """trainer.py stops where they do not."""
    from megatron_rl.cli.tiny import make_tiny

    model = make_tiny(tmp_path, num_train=16, num_heldout=8).model
    out = tmp_path / "rows.json"
    names = ["DP2", "TP2", "PP2, 4 microbatches", "CP2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(BENCH / "trainer.py"), str(model), str(out), "1", *names]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=600)
    rows = json.loads(out.read_text())["rows"]
    assert [row["layout"] for row in rows] == names
    assert all(row["seconds"]["ours"] > 0 and set(row["ratio"]) > {"DDP/float32 weights"} for row in rows)
