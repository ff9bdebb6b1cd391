"""The bench compares like with like, counts the fastest rival, and writes only its own part of the page."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
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


def test_cost_sorting_is_measured_on_the_same_microbatches_in_another_order(bench: Any) -> None:
    balance = bench("balance")
    sides = balance.make_sides(1)
    for _ in range(2):
        taken = {
            name: [tuple(stream.next_step().microbatches[0].sample_ids) for _ in range(balance.BUFFER)]
            for name, stream in sides.items()
        }
        assert taken["sorted"] != taken["unsorted"] and sorted(taken["sorted"]) == sorted(taken["unsorted"])
    assert 1.2 < balance.predicted(2) < 1.6


def test_ratios_of_data_are_those_of_single_rounds(bench: Any) -> None:
    seconds = {"unsorted": [4.0, 6.0, 9.0], "sorted": [4.0, 3.0, 6.0]}
    measured = {"seconds": seconds, "busy": {"unsorted": [4.0] * 3, "sorted": [2.0] * 3}, "tokens": 12.0}
    assert bench("balance").balance_table(measured, 3).rows[0][1:5] == ["2", "3", "1.50x", "2.00x"]
    rounds = {"a": [(80.0, 10.0), (90.0, 30.0), (60.0, 10.0)]}
    assert bench("loader").loader_table(rounds).rows == [["a", "80", "10", "6.0x", "3.0x"]]


def test_memory_that_does_not_fit_is_read_off_the_line_through_two_sizes_that_do(bench: Any) -> None:
    assert bench("head").extrapolated((256, 768), (1256, 1768), 8192) == 1000 + 8192


def test_the_plain_packer_is_the_same_algorithm(bench: Any) -> None:
    packing = bench("packing")
    lengths = packing.documents(3000).tolist()
    for k in (1, 3, 256):
        assert packing.plain(lengths, packing.CAPACITY, k) == packing.next_k_fit(lengths, packing.CAPACITY, k)


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_karmarkar_karp_deals_every_item_out_once_in_equal_counts(bench: Any, num_parts: int) -> None:
    costs = np.random.default_rng(0).lognormal(0, 1, 40)
    parts = bench("karmarkar_karp").partition(costs, num_parts)
    assert parts.shape == (num_parts, 40 // num_parts)
    assert sorted(parts.ravel().tolist()) == list(range(40))


def test_karmarkar_karp_makes_sums_equal(bench: Any) -> None:
    partition = bench("karmarkar_karp").partition
    costs = np.array([8.0, 7, 6, 5, 4, 4, 3, 3])
    assert costs[partition(costs, 2)].sum(axis=1).tolist() == [20, 20]
    many = np.random.default_rng(1).uniform(0.2, 3, 256)
    sums, dealt = many[partition(many, 8)].sum(axis=1), many.reshape(8, 32).sum(axis=1)
    assert np.ptp(sums) < 0.05 * np.ptp(dealt)


def test_a_balanced_step_holds_the_sequences_of_the_step(bench: Any) -> None:
    packing = bench("packing")
    costs = np.random.default_rng(2).lognormal(0, 1, (4, 3 * packing.STEP))
    balanced = packing.balanced(costs)
    for start in range(0, costs.shape[1], packing.STEP):
        step = slice(start, start + packing.STEP)
        assert sorted(balanced[:, step].ravel()) == sorted(costs[:, step].ravel())
        assert (np.diff(balanced[:, step], axis=1) >= 0).all()
    assert packing.share_with_steps(balanced) > packing.share_with_steps(costs)


@pytest.mark.slow
def test_a_stream_of_documents_is_packed_in_memory_that_does_not_grow_with_it(bench: Any) -> None:
    few, many = (bench("packing").peak_bytes(count) for count in (500_000, 4_000_000))
    assert many <= few + 2**20


@pytest.mark.slow
def test_a_million_documents_are_packed_20_times_faster_than_in_plain_python(bench: Any) -> None:
    (row,) = bench("packing").speed_rows(1).rows
    assert float(row[-1].rstrip("x")) >= 20


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
