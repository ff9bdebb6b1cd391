"""Packing kind stream in the real trainer: ranks with data of their own, stopped and resumed.

That no step is an exception, for any number of ranks, tests/unit/test_data_stream.py shows on the streams alone.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli.tiny import make_tiny

RANKS, STEPS, CAPACITY = 2, 6, 128
STOPS = (1, 2, 4)
"""In the middle of the first buffer, before its last draw, in the middle of the second."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]) -> Path:
    """What check_sft_stream.py left: a run folder per run, and each rank's digests."""
    folder = tmp_path_factory.mktemp("stream")
    model = make_tiny(folder / "tiny", seed=0, num_train=8, num_heldout=2).model
    turns = [
        [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "ja " * (1 + i * i % 40)}]
        for i in range(12)
    ]
    lines = [json.dumps({"messages": messages}) for messages in turns]
    (folder / "rows.jsonl").write_text("\n".join([*lines[:5], '{"messages": [', *lines[5:]]) + "\n")
    run_script("check_sft_stream.py", RANKS, model, folder / "rows.jsonl", folder, *map(str, (STEPS, *STOPS)))
    return folder


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_rank_goes_on_with_the_microbatches_it_would_have_had(work: Path) -> None:
    digests = [json.loads((work / f"digests-{rank}.json").read_text()) for rank in range(RANKS)]
    assert len({digest for own in digests for digest in own["straight"]}) > RANKS * STEPS - 3, "they differ"
    for stopped in STOPS:
        for own in digests:
            assert own[f"resumed-{stopped}"] == own["straight"][stopped:], f"stopped after step {stopped}"


def test_losses_and_counts_of_a_resumed_run_are_those_of_one_that_never_stopped(work: Path) -> None:
    straight = metrics_of(work / "straight")
    assert [record["step"] for record in straight] == list(range(1, STEPS + 1))
    timed = ("time", "perf/")
    for stopped in STOPS:
        resumed = metrics_of(work / f"resumed-{stopped}")
        for before, after in zip(straight, resumed, strict=True):
            same = [{k: v for k, v in record.items() if not k.startswith(timed)} for record in (before, after)]
            assert same[0] == same[1], f"step {before['step']} of the run stopped after {stopped}"


def test_rows_are_counted_once_over_all_ranks_and_the_bad_one_is_named_once(work: Path) -> None:
    record = metrics_of(work / "straight")[-1]
    assert record["data/epochs/rows"] == pytest.approx(record["data/rows"] / 13) and record["data/rows"] > 2 * 13
    assert record["data/bad_rows"] == pytest.approx(record["data/rows"] / 13, abs=1)
    named = [json.loads(line) for line in (work / "straight" / "bad_rows.jsonl").read_text().splitlines()]
    assert [row["row"] for row in named] == [f"{work / 'rows.jsonl'}:6"]
    assert named[0]["reason"].startswith("a row must be one JSON object, got malformed JSON")
    assert (work / "resumed-2" / "bad_rows.jsonl").read_text() == (work / "straight" / "bad_rows.jsonl").read_text()


def test_padding_and_the_spread_of_costs_are_recorded(work: Path) -> None:
    for record in metrics_of(work / "straight"):
        assert 0 <= record["data/padding_share"] < 0.5 and 1 <= record["data/cost_spread"] <= RANKS
        assert record["tokens/trained"] < RANKS * CAPACITY * (1 - record["data/padding_share"]) + 1
