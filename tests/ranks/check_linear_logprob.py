"""Run by torchrun on 3 ranks: the head over 1, 2 and 3 uneven vocabulary shards against the whole vocabulary."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_rl_kernels import linear_logprob
from torch import Tensor

T, H, V = 45, 12, 97
SHARDS = {1: [97], 2: [13, 84], 3: [1, 61, 35]}
"""Rows of the head per rank; one shard has a single row."""
NAMES = ["logp", "entropy", "hidden_grad", "head_grad"]


def textbook(hidden: Tensor, head: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = (hidden @ head.t() / temperature).log_softmax(-1)
    return logp.gather(1, token_ids[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def loss_of(logp: Tensor, entropy: Tensor, weights: Tensor, with_entropy: bool) -> Tensor:
    return logp @ weights[0].to(logp) + (entropy @ weights[1].to(logp) if with_entropy else 0.0)


def on_one_rank(case: dict[str, Tensor], dtype: torch.dtype, temperature: float, with_entropy: bool) -> list[Tensor]:
    hidden = case["hidden"].to(dtype, copy=True).requires_grad_()
    head = case["head"].to(dtype, copy=True).requires_grad_()
    logp, entropy = textbook(hidden, head, case["token_ids"], temperature)
    loss_of(logp, entropy, case["weights"], with_entropy).backward()
    assert hidden.grad is not None and head.grad is not None
    return [t.detach().double() for t in (logp, entropy, hidden.grad, head.grad)]


def sharded(
    case: dict[str, Tensor], group: dist.ProcessGroup, sizes: list[int], temperature: float, with_entropy: bool
) -> list[Tensor]:
    """As on_one_rank; the head gradient put together from the shards."""
    rank = dist.get_rank(group)
    start = sum(sizes[:rank])
    hidden = case["hidden"].clone().requires_grad_()
    shard = case["head"][start : start + sizes[rank]].clone().requires_grad_()
    out = linear_logprob(
        hidden, shard, case["token_ids"], vocab_start=start, group=group, temperature=temperature, chunk=16
    )
    loss_of(out.logp, out.entropy, case["weights"], with_entropy).backward()
    assert hidden.grad is not None and shard.grad is not None
    grads: list[Tensor | None] = [None] * len(sizes)
    dist.all_gather_object(grads, shard.grad, group=group)
    head_grad = torch.cat([grad for grad in grads if grad is not None])
    return [t.detach().double() for t in (out.logp, out.entropy, hidden.grad, head_grad)]


def equal_on_ranks(tensors: list[Tensor], group: dist.ProcessGroup) -> bool:
    """Bitwise, so that no rank can take another decision than its peers."""
    seen: list[list[Tensor] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(seen, tensors, group=group)
    return all(torch.equal(a, b) for other in seen for a, b in zip(tensors, other or [], strict=True))


def refused(group: dist.ProcessGroup, sizes: list[int], bad_id: int) -> str:
    """The message for a token id outside the whole vocabulary; every rank must raise, or the group would hang later."""
    rank = dist.get_rank(group)
    try:
        linear_logprob(
            torch.zeros(3, H),
            torch.zeros(sizes[rank], H),
            torch.tensor([0, bad_id, V - 1]),
            vocab_start=sum(sizes[:rank]),
            group=group,
        )
    except ValueError as error:
        return str(error)
    return ""


def draw(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(V, (T,), generator=generator)
    token_ids[:4] = torch.tensor([0, 1, 12, V - 1])  # borders of shards
    return {
        "hidden": torch.randn(T, H, generator=generator),
        "head": torch.randn(V, H, generator=generator),
        "token_ids": token_ids,
        "weights": torch.randn(2, T, generator=generator),
    }


def measure(group: dist.ProcessGroup, shards: list[int], temperature: float, with_entropy: bool) -> dict[str, Any]:
    """Largest errors over four draws, ours and those of a float32 head on one rank."""
    error, honest, equal = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0.0), True
    for case in map(draw, range(4)):
        exact = on_one_rank(case, torch.float64, temperature, with_entropy)
        low = on_one_rank(case, torch.float32, temperature, with_entropy)
        got = sharded(case, group, shards, temperature, with_entropy)
        equal &= equal_on_ranks(got, group)
        for name, e, h, g in zip(NAMES, exact, low, got, strict=True):
            error[name] = max(error[name], float((g - e).abs().max()))
            honest[name] = max(honest[name], float((h - e).abs().max()))
    return {"shards": shards, "temperature": temperature, "error": error, "honest": honest, "equal_on_ranks": equal}


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    cases, messages = [], []
    for size, shards in SHARDS.items():
        group = dist.new_group(list(range(size)))
        if dist.get_rank() >= size:
            continue
        assert isinstance(group, dist.ProcessGroup)
        messages += [refused(group, shards, bad_id) for bad_id in (V, -1)]
        for temperature, with_entropy in [(1.0, False), (0.7, True), (2.0, True)]:
            cases.append(measure(group, shards, temperature, with_entropy))
    of_ranks: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, messages)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"cases": cases, "refusals": [m for messages in of_ranks for m in messages or []]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
