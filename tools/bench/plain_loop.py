"""The other side: a training loop over Hugging Face transformers as one writes it by hand."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import documents
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron_rl.records import Sample

LR, BETAS, CLIP = 1e-4, (0.9, 0.95), 1.0
Step = Callable[[int], float]
"""Number of the step -> mean loss per trained token before it, in nats."""


def load_model(path: Path, dtype: torch.dtype) -> Any:
    """With experts as grouped matrix products, its fastest form on a CPU."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.set_experts_implementation("grouped_mm")
    return model


def plain_step(
    model: Any, steps: list[list[Sample]], *, autocast: bool = False, ddp: bool = False, threads: int = 1
) -> Step:
    """AdamW, clipping, four padded batches a step; autocast: products in bfloat16 over float32 weights.

    ddp: under DistributedDataParallel over all ranks, which share the batches.
    """
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if ddp else (1, 0)
    batches = [documents.padded(samples, rank=rank, world_size=world_size) for samples in steps]
    totals = [documents.num_trained(samples) for samples in steps]
    module = DistributedDataParallel(model) if ddp else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)

    def step(number: int) -> float:
        torch.set_num_threads(threads)
        number %= len(batches)
        optimizer.zero_grad()
        total_loss = torch.zeros(())
        for index, batch in enumerate(batches[number]):
            is_last = index == len(batches[number]) - 1
            with contextlib.nullcontext() if is_last or not ddp else module.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits = module(batch.ids).logits[:, :-1]
                    loss = torch.nn.functional.cross_entropy(
                        logits.flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum"
                    )
                # DistributedDataParallel takes the mean over ranks.
                loss = loss * world_size / totals[number]
                loss.backward()
            total_loss += loss.detach() / world_size
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if ddp:
            dist.all_reduce(total_loss)
        return float(total_loss)

    return step
