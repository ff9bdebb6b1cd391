"""What cost-sorted buffers save where ranks wait for each other: the real trainer's step on two gloo ranks.

Both sides train on the same microbatches of the same ranks, in rounds of one buffer: in the order in which packing
closes them, and in the order of the cost-sorted buffer. Under torchrun this file is one rank.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tables import Rows, show, write_page

from megatron_rl.data.balance import packed_costs, share_of_ideal, sorted_draws
from megatron_rl.data.cost import CostModel, attention_cost
from megatron_rl.data.packed_stream import PackedStream
from megatron_rl.data.rank_step import BadRow, Counts, DataRank
from megatron_rl.data.sft import StreamPacking
from megatron_rl.records import PackedBatch, Sample

RANKS, CAPACITY, OPEN_BINS, BUFFER = 2, 16_384, 16, 32
NUM_ROWS = 20_000
MEDIAN, SIGMA, SHORTEST = 3600 * CAPACITY / 262_144, 1.6, 8
"""Lengths of the rows: log-normal, cut at the capacity: the mix on which padding is measured, scaled."""


class RandomRows:
    """Endless passes over rows of random tokens."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths, self.pass_length = lengths, len(lengths)
        self.counts = Counts((0,))

    def read(self, draw: int) -> Sample:
        """The draw's row, in an order of its own for each pass."""
        number, place = divmod(draw, self.pass_length)
        row = np.random.default_rng([number]).permutation(self.pass_length)[place]
        tokens = np.random.default_rng([1, row]).integers(10, 500, self._lengths[row] + 1).astype(np.int32)
        return Sample(str(draw), tokens, np.arange(len(tokens)) > 0)

    again = read

    def take_bad_rows(self) -> list[BadRow]:
        """There are none."""
        return []


def row_lengths() -> np.ndarray:
    """Positions of each row. int64 [NUM_ROWS]"""
    drawn = np.random.default_rng(0).lognormal(math.log(MEDIAN), SIGMA, NUM_ROWS)
    return np.clip(drawn, SHORTEST, CAPACITY).astype(np.int64)


def predicted(rounds: int) -> float:
    """Throughput sorted over unsorted if attention were all a step does."""
    costs = packed_costs(
        row_lengths(),
        capacity=CAPACITY,
        open_bins=OPEN_BINS,
        num_ranks=RANKS,
        num_draws=rounds * BUFFER,
        cost=CostModel(),
    )
    return share_of_ideal(sorted_draws(costs, BUFFER)) / share_of_ideal(costs)


def make_sides(rank: int) -> dict[str, PackedStream]:
    """The streams of a rank, with a cost-sorted buffer and without."""
    place, lengths = DataRank(rank, RANKS, CAPACITY), row_lengths()
    return {
        name: PackedStream(
            RandomRows(lengths), StreamPacking(open_bins=OPEN_BINS, buffer=size), place, cost=attention_cost, seed=0
        )
        for name, size in (("sorted", BUFFER), ("unsorted", 1))
    }


def make_model(folder: Path) -> Path:
    """A Qwen3-MoE of two layers, so narrow that attention decides at this context."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=1,
        max_position_embeddings=CAPACITY,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_step(model_path: Path, platform: Any, groups: Any) -> Callable[[list[PackedBatch]], None]:
    """The trainer's own step on microbatches of this rank."""
    from megatron_rl.checkpoint.convert import load_hf
    from megatron_rl.distributed.config import ParallelConfig
    from megatron_rl.loss.head import sft_loss
    from megatron_rl.model.build import build_model
    from megatron_rl.model.config import ModelConfig
    from megatron_rl.trainer.config import OptimizerConfig
    from megatron_rl.trainer.optim import PolicyOptimizer
    from megatron_rl.trainer.step import train_step

    model = build_model(ModelConfig(path=str(model_path), dtype="float32"), ParallelConfig(), groups, platform)
    load_hf(model, model_path, groups)
    policy = PolicyOptimizer(model, groups, OptimizerConfig())

    def loss(out: Any, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        return sft_loss(out.logp, torch.tensor(batch.loss_mask), denominator=RANKS * CAPACITY), {}

    def step(microbatches: list[PackedBatch]) -> None:
        train_step(policy, microbatches, loss, groups, step=0, lr=1e-4, device=platform.device)

    return step


def measure_rank(model_path: Path, out: Path, rounds: int) -> None:
    """Seconds of each side in each round of BUFFER steps, after one step that is not timed; rank 0 writes them.

    busy: the slower rank's CPU seconds of each step, summed, which other work on the machine does not lengthen much.
    """
    from megatron_rl.distributed.config import ParallelConfig
    from megatron_rl.distributed.device import init_process_group, start_platform

    platform = start_platform("cpu")
    init_process_group(platform)
    from megatron_rl.distributed.groups import build_groups

    step = make_step(model_path, platform, build_groups(ParallelConfig(), platform, seed=0))
    sides = make_sides(dist.get_rank())
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}
    tokens: dict[str, list[int]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, stream in sides.items():
            batches = [stream.next_step().microbatches for _ in range(BUFFER)]
            if not number:
                step(batches[0])
            dist.barrier()
            started, working = time.perf_counter(), []
            for microbatches in batches:
                before = time.process_time()
                step(microbatches)
                working.append(time.process_time() - before)
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
            slower = torch.tensor(working, dtype=torch.float64)
            dist.all_reduce(slower, op=dist.ReduceOp.MAX)
            busy[name].append(float(slower.sum()))
            tokens[name].append(sum(batch.num_tokens for microbatches in batches for batch in microbatches))
    assert tokens["sorted"] == tokens["unsorted"], "both sides train on the same microbatches in every round"
    if dist.get_rank() == 0:
        out.write_text(
            json.dumps({"seconds": seconds, "busy": busy, "tokens": RANKS * statistics.mean(tokens["sorted"])})
        )
    dist.destroy_process_group()


def measure(rounds: int, *, docs: bool) -> None:
    """The comparison, minutes a round on two cores; docs: also into docs/performance.md."""
    with tempfile.TemporaryDirectory() as folder:
        model, out = make_model(Path(folder) / "model"), Path(folder) / "out.json"
        print(f"balance of {RANKS} ranks (minutes)", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += [__file__, "--rank", str(model), str(out), "--rounds", str(rounds)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"balance.py failed:\n{done.stdout[-4000:]}")
        measured = json.loads(out.read_text())
    table = balance_table(measured, rounds)
    show(table)
    if docs:
        write_page("balance", [table])


def balance_table(measured: dict[str, Any], rounds: int) -> Rows:
    """One row: tokens per second of each side, the median of the rounds' ratios, and what the costs promise."""
    seconds, tokens = measured["seconds"], measured["tokens"]
    ratio, of_busy = (
        statistics.median(u / s for u, s in zip(measured[kind]["unsorted"], measured[kind]["sorted"], strict=True))
        for kind in ("seconds", "busy")
    )
    rates = [f"{tokens / statistics.median(seconds[name]):,.0f}" for name in ("unsorted", "sorted")]
    return Rows(
        f"{RANKS} ranks, microbatches of {CAPACITY:,} tokens, buffers of {BUFFER} ({rounds} rounds of {BUFFER} steps)",
        ["", "unsorted, tokens/s", "cost-sorted, tokens/s", "ratio", "of CPU seconds", "of attention costs"],
        [["DP2, gloo", *rates, f"{ratio:.2f}x", f"{of_busy:.2f}x", f"{predicted(rounds):.2f}x"]],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="measured buffers of each side")
    parser.add_argument("--docs", action="store_true", help="also write docs/performance.md")
    parser.add_argument("--rank", nargs=2, metavar=("MODEL", "OUT"), help="be one rank under torchrun")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank:
        model, out = map(Path, options.rank)
        measure_rank(model, out, options.rounds)
    else:
        measure(options.rounds, docs=options.docs)


if __name__ == "__main__":
    main()
