"""Run by torchrun on 3 ranks: both heads over 1, 2 and 3 uneven vocabulary shards against the whole vocabulary."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_rl_kernels import linear_distill, linear_logprob
from torch import Tensor

HEADS = runpy.run_path(str(Path(__file__).parents[1] / "heads.py"))
H, V = 12, 97
SHARDS = {1: [97], 2: [13, 84], 3: [1, 61, 35]}
"""Rows of the head per rank; one shard has a single row."""
SENDS = [["logp"], ["logp", "entropy"], ["entropy"], ["kl"]]


def head_of(sends: list[str], **shard: Any) -> Any:
    """The head that forms these results, over a shard; the textbook without one."""
    if not shard:
        return HEADS["textbook_distill" if sends == ["kl"] else "textbook_logprob"]

    def head_fn(hidden: Tensor, head: Tensor, case: Any, temperature: float) -> dict[str, Tensor]:
        options = {"temperature": temperature, "chunk": 64, **shard}
        if sends == ["kl"]:
            return {"kl": linear_distill(hidden, case.teacher, head, **options)}
        return linear_logprob(hidden, head, case.token_ids, **options)._asdict()

    return head_fn


def sharded(case: Any, group: dist.ProcessGroup, sizes: list[int], temperature: float, sends: list[str]) -> Any:
    """As on one rank; the head gradient put together from the shards."""
    rank = dist.get_rank(group)
    start = sum(sizes[:rank])
    mine = replace(case, head=case.head[start : start + sizes[rank]])
    got = HEADS["run"](head_of(sends, vocab_start=start, group=group), mine, temperature, sends)
    parts: list[Tensor] = [torch.empty(0)] * len(sizes)
    dist.all_gather_object(parts, got["head"], group=group)
    return got | {"head": torch.cat(parts)}


def equal_on_ranks(results: dict[str, Tensor], group: dist.ProcessGroup) -> bool:
    """Bitwise, so that no rank can take another decision than its peers."""
    seen: list[dict[str, Tensor]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(seen, results, group=group)
    return all(torch.equal(results[name], other[name]) for other in seen for name in results)


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


def cases_of(num_tokens: int, dtype: torch.dtype, num_draws: int) -> list[Any]:
    """The first tokens of each lie on borders of shards."""
    cases = [HEADS["draw"](num_tokens, H, V, dtype, seed) for seed in range(num_draws)]
    for case in cases:
        case.token_ids[:4] = torch.tensor([0, 1, 12, V - 1])[:num_tokens]
    return cases


def on_one_rank(cases: list[Any], temperature: float, sends: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    return HEADS["pooled"]([HEADS["run"](head_of(sends), case, temperature, sends, dtype) for case in cases])


def measure(
    group: dist.ProcessGroup, num_tokens: int, dtype: torch.dtype, temperature: float, sends: list[str]
) -> dict[str, Any]:
    """On rank 0, what is over the error budget; the honest head's largest error is taken over many more single tokens,
    so that it is no luck."""
    cases = cases_of(num_tokens, dtype, 4 if num_tokens == 1 else 1)
    got = [sharded(case, group, SHARDS[dist.get_world_size(group)], temperature, sends) for case in cases]
    measured: dict[str, Any] = {"equal_on_ranks": equal_on_ranks(got[0], group)}
    if dist.get_rank() == 0:
        many = cases_of(num_tokens, dtype, 60 if num_tokens == 1 else 1)
        exact, honest = (on_one_rank(many, temperature, sends, precision) for precision in (torch.float64, dtype))
        allowed = HEADS["budgets"](exact, honest, dtype)
        exact = on_one_rank(cases, temperature, sends, torch.float64)
        measured["over"] = HEADS["over_budget"](exact, HEADS["pooled"](got), allowed)
        measured["names"] = sorted(allowed)
    return measured | {
        "shards": SHARDS[dist.get_world_size(group)],
        "case": [num_tokens, str(dtype), temperature, sends],
    }


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    cases, messages = [], []
    for size, shards in SHARDS.items():
        group = dist.new_group(list(range(size)))
        if dist.get_rank() >= size:
            continue
        assert isinstance(group, dist.ProcessGroup)
        messages += [refused(group, shards, bad_id) for bad_id in (V, -1)]
        for num_tokens in (301, 1, 0):
            for dtype in (torch.float32, torch.bfloat16):
                for temperature, sends in zip((1.0, 0.7, 2.0, 1.5), SENDS, strict=True):
                    cases.append(measure(group, num_tokens, dtype, temperature, sends))
    of_ranks: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, messages)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"cases": cases, "refusals": [m for messages in of_ranks for m in messages]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
