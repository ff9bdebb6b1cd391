"""Times what this project claims to be fast at, as ratios measured in turn in one process: make bench.

Rows: the trainer's step against a plain Hugging Face loop on the same model and tokens, and the log-prob head against
materialised logits. One thread, float32; absolute figures belong to the machine and the minute.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from megatron_rl_kernels import linear_logprob
from rich.console import Console
from rich.table import Table

ROUNDS = 7


def in_turn(ours: Callable[[], None], theirs: Callable[[], None]) -> tuple[float, float, float]:
    """(median seconds of ours, of theirs, median of the pairwise ratio theirs / ours) after one warm-up each."""
    ours()
    theirs()
    pairs = [(_seconds(ours), _seconds(theirs)) for _ in range(ROUNDS)]
    return (
        statistics.median(p[0] for p in pairs),
        statistics.median(p[1] for p in pairs),
        statistics.median(p[1] / p[0] for p in pairs),
    )


def _seconds(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def head_row(num_tokens: int, hidden: int, vocabulary: int) -> tuple[str, float, float, float]:
    """Forward and backward of the head against log_softmax over materialised logits."""
    torch.manual_seed(0)
    states = torch.randn(num_tokens, hidden, requires_grad=True)
    weight = torch.randn(vocabulary, hidden).mul_(hidden**-0.5).requires_grad_()
    ids = torch.randint(0, vocabulary, (num_tokens,))

    def ours() -> None:
        linear_logprob(states, weight, ids).logp.sum().backward()

    def theirs() -> None:
        torch.log_softmax(states @ weight.T, dim=-1).gather(1, ids[:, None]).sum().backward()

    return f"head T={num_tokens} H={hidden} V={vocabulary}, forward+backward", *in_turn(ours, theirs)


def trainer_row() -> tuple[str, float, float, float]:
    """One optimizer step on 64 documents of 32 to 128 tokens, tiny Qwen3-MoE of the quickstart."""
    from transformers import AutoModelForCausalLM

    from megatron_rl.cli.tiny import make_tiny
    from megatron_rl.data.packing import pack_samples
    from megatron_rl.records import Sample

    folder = Path(tempfile.mkdtemp())
    model_path = make_tiny(folder, seed=0, num_train=16, num_heldout=8).model
    hf_model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    hf_model.set_experts_implementation("grouped_mm")
    random = np.random.default_rng(0)
    samples = []
    for index in range(64):
        ids = random.integers(10, 500, int(random.integers(32, 129))).astype(np.int32)
        mask = np.ones(len(ids), dtype=bool)
        mask[0] = False
        samples.append(Sample(str(index), ids, mask))
    batch = pack_samples(samples, capacity=16384)[0]
    return "trainer step, 64 documents, against HF (grouped_mm experts)", *in_turn(
        _megatron_step(model_path, batch), _hf_step(hf_model, samples)
    )


def _megatron_step(model_path: Path, batch) -> Callable[[], None]:
    from megatron_rl.distributed.config import ParallelConfig
    from megatron_rl.distributed.device import init_process_group, start_platform

    platform = start_platform("cpu")
    init_process_group(platform)
    from megatron_rl.checkpoint.convert import load_hf
    from megatron_rl.distributed.groups import build_groups
    from megatron_rl.loss.head import sft_loss
    from megatron_rl.model.build import build_model
    from megatron_rl.model.config import ModelConfig
    from megatron_rl.model.forward import DeviceBatch, taken_logprobs
    from megatron_rl.trainer.config import OptimizerConfig
    from megatron_rl.trainer.optim import PolicyOptimizer
    from megatron_rl.trainer.step import train_step

    parallel = ParallelConfig()
    groups = build_groups(parallel, platform, seed=0)
    model = build_model(ModelConfig(path=str(model_path)), parallel, groups, platform)
    load_hf(model, model_path, groups)
    policy = PolicyOptimizer(model, groups, OptimizerConfig(lr=1e-4))
    mask = torch.tensor(batch.loss_mask)

    def loss(packed):
        out = taken_logprobs(policy.ddp, DeviceBatch.from_packed(packed, platform.device), groups)
        return sft_loss(out.logp, mask, denominator=packed.num_trained), {}

    def step() -> None:
        train_step(policy, [batch], loss, lr=1e-4)

    return step


def _hf_step(model, samples) -> Callable[[], None]:
    """Padded batch, as a plain loop has it; documents sorted by length so that padding costs little."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ordered = sorted(samples, key=lambda s: len(s.token_ids))
    batches = []
    for start in range(0, len(ordered), 16):
        part = ordered[start : start + 16]
        longest = max(len(s.token_ids) for s in part)
        ids, labels = torch.zeros(len(part), longest, dtype=torch.long), torch.full((len(part), longest), -100)
        for row, sample in enumerate(part):
            tokens = torch.tensor(sample.token_ids, dtype=torch.long)
            ids[row, : len(tokens)], labels[row, 1 : len(tokens)] = tokens, tokens[1:]
        batches.append((ids, labels))
    total = sum(int((labels != -100).sum()) for _, labels in batches)

    def step() -> None:
        optimizer.zero_grad()
        for ids, labels in batches:
            logits = model(ids).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            (loss / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def main() -> None:
    """Prints one table."""
    torch.set_num_threads(1)
    table = Table(title=f"ours against theirs, one thread, float32, median of {ROUNDS} pairs")
    for column in ("what", "ours, s", "theirs, s", "theirs / ours"):
        table.add_column(column, justify="left" if column == "what" else "right")
    rows = [trainer_row(), head_row(4096, 128, 512), head_row(4096, 512, 32768)]
    for name, ours, theirs, ratio in rows:
        table.add_row(name, f"{ours:.3f}", f"{theirs:.3f}", f"{ratio:.2f}x")
    Console().print(table)


if __name__ == "__main__":
    main()
