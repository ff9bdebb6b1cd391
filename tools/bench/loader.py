"""Whether the trainer ever waits for its data: rows read, rendered and packed per second against rows trained.

Both in one thread of one process and in turn: the loader reads a JSONL file of conversations with tool calls through
the whole of packing kind stream; the trainer makes its own step on what came out.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tables import Rows, show, write_page

from megatron_rl.cli.tiny import make_tiny

MICROBATCH_TOKENS, MICROBATCHES, OPEN_BINS, BUFFER = 4096, 4, 16, 16
LONG_TURNS = 48
"""Questions and answers that make one conversation of the long ones."""


def write_long_rows(rows: Path, path: Path) -> Path:
    """Conversations of LONG_TURNS turns each, without tools, made of the rows' own questions and answers."""
    short = [json.loads(line)["messages"][:2] for line in rows.read_text(encoding="utf-8").splitlines()]
    turns = [[question, {"role": "assistant", "content": answer["content"]}] for question, answer in short]
    joined = [list(chain(*turns[at : at + LONG_TURNS])) for at in range(0, len(turns), LONG_TURNS)]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in joined), encoding="utf-8")
    return path


def make_stream(model: Path, rows: Path) -> Any:
    """The stream of a run's only rank, as examples/sft/tiny_cpu.yaml masks it."""
    from megatron_rl.data.cost import attention_cost
    from megatron_rl.data.mixture import Mixture
    from megatron_rl.data.rank_step import DataRank
    from megatron_rl.data.render import ChatRenderer, load_tokenizer
    from megatron_rl.data.samples import MixtureSamples, SampleRules
    from megatron_rl.data.sft import SftDataConfig
    from megatron_rl.data.stream import make_stream as stream_of

    packing = {"kind": "stream", "open_bins": OPEN_BINS, "buffer": BUFFER, "microbatches_per_step": MICROBATCHES}
    mask = {"wrong_tool_calls": "train"}
    config = SftDataConfig.model_validate({"train": [str(rows)], "packing": packing, "mask": mask})
    renderer = ChatRenderer(load_tokenizer(model))
    source = MixtureSamples(Mixture(config.train, seed=0), renderer, SampleRules.of(config, MICROBATCH_TOKENS))
    return stream_of(config, source, DataRank(0, 1, MICROBATCH_TOKENS, 1, renderer.pad_id), cost=attention_cost, seed=0)


def make_step(model_path: Path) -> Any:
    """The trainer's own step in a world of one rank."""
    from torch._C._distributed_c10d import HashStore

    from megatron_rl.distributed.device import start_platform

    platform = start_platform("cpu")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    from megatron_rl.checkpoint.convert import load_hf
    from megatron_rl.distributed.config import ParallelConfig
    from megatron_rl.distributed.groups import build_groups
    from megatron_rl.loss.head import sft_loss
    from megatron_rl.model.build import build_model
    from megatron_rl.model.config import ModelConfig
    from megatron_rl.trainer.config import OptimizerConfig
    from megatron_rl.trainer.optim import PolicyOptimizer
    from megatron_rl.trainer.step import train_step

    groups = build_groups(ParallelConfig(), platform, seed=0)
    model = build_model(ModelConfig(path=str(model_path), dtype="float32"), ParallelConfig(), groups, platform)
    load_hf(model, model_path, groups)
    policy = PolicyOptimizer(model, groups, OptimizerConfig())

    def loss(out: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return sft_loss(out.logp, torch.tensor(batch.loss_mask), denominator=MICROBATCH_TOKENS), {}

    return lambda batches: train_step(policy, batches, loss, groups, step=0, lr=1e-4, device=platform.device)


def rates(model: Path, rows: Path, step: Any, rounds: int) -> list[tuple[float, float]]:
    """(tokens per second of the loader, of the trainer) of each round, after one that fills the buffers."""
    stream, found = make_stream(model, rows), []
    step(stream.next_step().microbatches)
    for _ in range(rounds):
        started = time.perf_counter()
        batches = stream.next_step().microbatches
        loaded = time.perf_counter()
        step(batches)
        trained = time.perf_counter()
        tokens = sum(batch.num_tokens - batch.num_padding for batch in batches)
        found.append((tokens / (loaded - started), tokens / (trained - loaded)))
    return found


def loader_table(of_rows: dict[str, list[tuple[float, float]]]) -> Rows:
    """One line per kind of rows: median rates, the median of the rounds' ratios, and the worst."""
    lines, rounds = [], 0
    for name, found in of_rows.items():
        ratios, rounds = [loader / trainer for loader, trainer in found], len(found)
        loader, trainer = (statistics.median(side) for side in zip(*found, strict=True))
        shown = (f"{statistics.median(ratios):.1f}x", f"{min(ratios):.1f}x")
        lines.append([name, f"{loader:,.0f}", f"{trainer:,.0f}", *shown])
    return Rows(
        f"loader and trainer, tiny qwen3_moe, 1 thread each ({rounds} rounds of {MICROBATCHES} microbatches)",
        ["", "loader, tokens/s", "trainer, tokens/s", "ratio", "worst round"],
        lines,
    )


def measure(rounds: int, *, docs: bool) -> None:
    """The comparison, some minutes; docs: also into docs/performance.md."""
    print("loader (minutes)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(Path(folder), num_train=4000, num_heldout=2)
        long, step = write_long_rows(tiny.train, Path(folder) / "long.jsonl"), make_step(tiny.model)
        files = {"one question and a call": tiny.train, f"{LONG_TURNS} questions": long}
        table = loader_table({name: rates(tiny.model, rows, step, rounds) for name, rows in files.items()})
    show(table)
    if docs:
        write_page("loader", [table])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each side")
    parser.add_argument("--docs", action="store_true", help="also write docs/performance.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(options.rounds, docs=options.docs)


if __name__ == "__main__":
    main()
