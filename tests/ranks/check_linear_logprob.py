"""Run by torchrun on 3 ranks: the head over 1, 2 and 3 uneven vocabulary shards against the whole vocabulary.

Rank 0 writes one record per case: largest errors against float64, and those of a float32 head on one rank.
"""

import json
import sys
from pathlib import Path

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
    return [t.detach().double() for t in (out.logp, out.entropy, hidden.grad, torch.cat([g for g in grads if g is not None]))]


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


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    case = {
        "hidden": torch.randn(T, H, generator=generator),
        "head": torch.randn(V, H, generator=generator),
        "token_ids": torch.randint(V, (T,), generator=generator),
        "weights": torch.randn(2, T, generator=generator),
    }
    case["token_ids"][:4] = torch.tensor([0, 1, 12, V - 1])  # borders of shards
    records = []
    for size, shards in SHARDS.items():
        group = dist.new_group(list(range(size)))
        if dist.get_rank() >= size:
            continue
        assert group is not None
        for temperature, with_entropy in [(1.0, False), (0.7, True), (2.0, True)]:
            exact = on_one_rank(case, torch.float64, temperature, with_entropy)
            honest = on_one_rank(case, torch.float32, temperature, with_entropy)
            got = sharded(case, group, shards, temperature, with_entropy)
            records.append(
                {
                    "shards": shards,
                    "temperature": temperature,
                    "error": {n: float((g - e).abs().max()) for n, g, e in zip(NAMES, got, exact, strict=True)},
                    "honest": {n: float((h - e).abs().max()) for n, h, e in zip(NAMES, honest, exact, strict=True)},
                    "equal_on_ranks": equal_on_ranks(got, group),
                    "refused": [refused(group, shards, bad_id) for bad_id in (V, -1)],
                }
            )
    everywhere: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, [message for record in records for message in record["refused"]])
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"cases": records, "refused_everywhere": all(all(seen or []) for seen in everywhere)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
