"""The SFT trainer's data: this rank's microbatches step by step, and what all ranks must know of each other's."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.data.ahead import StepsAhead
from megatron_rl.data.mixture import Mixture
from megatron_rl.data.packing import pack_for_ranks
from megatron_rl.data.rank_step import BadRow, Counts, DataRank
from megatron_rl.data.render import ChatRenderer
from megatron_rl.data.rows import open_rows
from megatron_rl.data.samples import MixtureSamples, SampleRules, read_samples
from megatron_rl.data.sft import SftDataConfig
from megatron_rl.data.stream import data_identity, make_stream, microbatch_cost, saved_steps, states_to_resume
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.records import PackedBatch
from megatron_rl.telemetry import jsonl
from megatron_rl.telemetry.values import Last, Mean, Value

BAD_ROWS_FILE = "bad_rows.jsonl"
"""In a run folder: {"row": path:line, "reason"} of every row that was left out as bad, once each."""


@dataclass(frozen=True)
class StepShare:
    """What a rank tells the others about its part of a step."""

    num_trained: int
    num_tokens: int
    costs: list[float]
    """Of each microbatch."""
    counts: Counts
    bad_rows: list[BadRow]
    wait_s: float
    """How long the trainer waited for the microbatches."""


@dataclass(frozen=True)
class SftStep:
    """One step of this rank, and what holds for all of them."""

    microbatches: list[PackedBatch]
    num_trained: int
    """Trained targets of all ranks."""
    num_tokens: int
    """Of all ranks, without padding."""
    metrics: dict[str, Value]
    """Equal on all ranks."""


class SftData:
    """Collective over the data-parallel group: its ranks make the same calls. Other ranks hold copies of its data."""

    def __init__(
        self,
        config: SftDataConfig,
        renderer: ChatRenderer,
        groups: ParallelGroups,
        *,
        run_dir: Path,
        context_length: int,
        seed: int,
        hf_config: dict[str, Any],
    ) -> None:
        self._config, self._groups, self._renderer = config, groups, renderer
        self._rules = SampleRules.of(config, context_length)
        self._mixture = Mixture(config.train, seed=seed)
        self._identity = data_identity(config, self._mixture, context_length)
        self._cost = microbatch_cost(config, hf_config)
        place = DataRank(groups.dp_rank, groups.dp_size, config.microbatch_tokens, groups.tp_size, renderer.pad_id)
        source = MixtureSamples(self._mixture, renderer, self._rules)
        self._stream = make_stream(config, source, place, cost=self._cost, seed=seed)
        self._ahead = StepsAhead(self._stream)
        self._state: dict[str, Any] = {}
        self._bad_rows = _BadRowsFile(run_dir / BAD_ROWS_FILE) if groups.rank == 0 else None

    def heldout(self) -> list[PackedBatch]:
        """This rank's share of the held-out rows, as many microbatches as every other rank has."""
        groups = self._groups
        samples = [
            sample
            for path in self._config.heldout
            for sample in read_samples(open_rows(path), self._renderer, self._rules)
        ]
        return pack_for_ranks(
            samples,
            capacity=self._config.microbatch_tokens,
            data_parallel_size=groups.dp_size,
            pad_multiple=groups.tp_size,
            pad_id=self._renderer.pad_id,
        )[groups.dp_rank]

    def load(self, saved: bytes) -> None:
        """Goes on where save was called. ConfigError if the data is not what the run started with."""
        self._stream.load(states_to_resume(saved, self._identity))

    def save(self) -> bytes:
        """Where all ranks stand after the step that was taken last."""
        return saved_steps(self._identity, self._gather(self._state))

    def next_step(self) -> SftStep:
        """The next step. DataError for a row that ends the run."""
        started = time.monotonic()
        step = self._ahead.next_step()
        wait_s = time.monotonic() - started
        self._state = step.state
        own = StepShare(
            num_trained=sum(batch.num_trained for batch in step.microbatches),
            num_tokens=sum(batch.num_tokens - batch.num_padding for batch in step.microbatches),
            costs=[float(self._cost(_document_lengths(batch))) for batch in step.microbatches],
            counts=step.counts,
            bad_rows=step.bad_rows,
            wait_s=wait_s,
        )
        shares: list[StepShare] = self._gather(own)
        if self._bad_rows is not None:
            self._bad_rows.add([row for share in shares for row in share.bad_rows])
        return SftStep(
            step.microbatches,
            num_trained=sum(share.num_trained for share in shares),
            num_tokens=sum(share.num_tokens for share in shares),
            metrics=self._metrics(shares),
        )

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._ahead.close()

    def _metrics(self, shares: Sequence[StepShare]) -> dict[str, Value]:
        counts = sum((share.counts for share in shares[1:]), shares[0].counts)
        metrics: dict[str, Value] = {
            "data/rows": Last(sum(counts.rows)),
            "perf/data_wait_s": Last(max(share.wait_s for share in shares)),
        }
        for name, drawn, rows in zip(self._mixture.names, counts.rows, self._mixture.datasets, strict=True):
            metrics[f"data/epochs/{name}"] = Last(drawn / len(rows))
        for name in ("bad", "oversized", "truncated", "untrained"):
            if count := getattr(counts, name):
                metrics[f"data/{name}_rows"] = Last(count)
        if len(shares) > 1:
            metrics["data/cost_spread"] = Last(cost_spread([share.costs for share in shares]))
        if self._config.packing.kind == "stream":
            room = self._config.microbatch_tokens * sum(len(share.costs) for share in shares)
            metrics["data/padding_share"] = Mean(room - sum(share.num_tokens for share in shares), room)
        return metrics

    def _gather(self, own: Any) -> list[Any]:
        gathered: list[Any] = [None] * self._groups.dp_size
        dist.all_gather_object(gathered, own, group=self._groups.dp_group)
        return gathered


def cost_spread(costs: Sequence[Sequence[float]]) -> float:
    """How much longer ranks that wait for each other at every microbatch take than with equal costs; 1 at best.

    costs [rank][microbatch]: the dearest of each turn, summed, over the mean rank's total.
    """
    dearest = sum(max(turn) for turn in zip(*costs, strict=True))
    mean = sum(map(sum, costs)) / len(costs)
    return dearest / mean if mean else 1.0


def _document_lengths(batch: PackedBatch) -> list[int]:
    """Positions of each document, without the padding."""
    borders = batch.cu_seqlens[: len(batch.sample_ids) + 1]
    return (borders[1:] - borders[:-1]).tolist()


class _BadRowsFile:
    """Names each bad row once, however often it is met and the run is resumed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        jsonl.drop_torn_line(path)
        self._named = {json.loads(line)["row"] for _, line in jsonl.whole_lines(path)}

    def add(self, rows: Sequence[BadRow]) -> None:
        for row in rows:
            if row.source not in self._named:
                self._named.add(row.source)
                record = {"row": row.source, "reason": row.reason}
                jsonl.append_line(self._path, json.dumps(record, ensure_ascii=False).encode())
