"""The log-prob head against materialised logits: time in turns in one run, memory of processes of their own.

python tools/bench/head.py [--rounds N] [--docs] does the head's part of make bench alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from megatron_rl_kernels import linear_logprob
from peak import status_bytes
from tables import Rows, show, write_page
from torch import Tensor

TIMED_SIZES = ((4096, 128, 512), (4096, 512, 32768))
"""Tokens, hidden size, vocabulary: the quickstart's model, and a real vocabulary."""
MEMORY_SIZE = (8192, 512, 131072)
FITTING_TOKENS = (256, 768)
"""Of materialised logits, whose memory at MEMORY_SIZE is extrapolated from these."""
LINEAR_TOKENS = (1024, 4096, 16384, 32768)
LINEAR_SIZE = (128, 32768)


def ours(states: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Sum of log-probs; forms entropies as well."""
    return linear_logprob(states, weight, ids).logp.sum()


def plain(states: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Low-precision logits go to float32 before the softmax, as in losses."""
    return torch.log_softmax((states @ weight.T).float(), dim=-1).gather(1, ids[:, None]).sum()


SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"ours": ours, "plain": plain}


def inputs(num_tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden states, head, token ids), the first two with gradients."""
    torch.manual_seed(0)
    states = torch.randn(num_tokens, hidden).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden).mul_(hidden**-0.5).to(dtype).requires_grad_()
    return states, weight, torch.randint(0, vocabulary, (num_tokens,))


def seconds(side: str, given: tuple[Tensor, Tensor, Tensor], *, backward: bool) -> float:
    """CPU time of this process, which has one thread: what else runs on the machine does not count in."""
    states, weight, _ = given
    states.grad = weight.grad = None
    started = time.process_time()
    out = SIDES[side](*given)
    if backward:
        out.backward()
    return time.process_time() - started


def timed(size: tuple[int, int, int], dtype: torch.dtype, rounds: int) -> list[str]:
    """A row of time_rows. The sides take turns; a share is the median of the rounds' shares."""
    given, cells = inputs(*size, dtype), []
    for backward in (False, True):
        pairs = [[seconds(side, given, backward=backward) for side in SIDES] for _ in range(rounds + 1)][1:]
        mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        cells += [f"{mine:.3f}", f"{theirs:.3f}", f"{statistics.median(a / b for a, b in pairs):.2f}x"]
    return ["T={} H={} V={}".format(*size), str(dtype)[6:], *cells]


def time_rows(rounds: int) -> Rows:
    rows = [timed(size, dtype, rounds) for size in TIMED_SIZES for dtype in (torch.float32, torch.bfloat16)]
    return Rows(
        f"log-prob head, CPU seconds of the forward, and of forward and backward ({rounds} rounds, 1 thread)",
        ["sizes", "dtype", "forward", "plain", "ours / plain", "with backward", "plain", "ours / plain"],
        rows,
    )


def linear_rows() -> Rows:
    """The faster of two passes each; a share of 1 is linear."""
    hidden, vocabulary = LINEAR_SIZE
    of_tokens = {}
    for num_tokens in LINEAR_TOKENS:
        given = inputs(num_tokens, hidden, vocabulary, torch.float32)
        of_tokens[num_tokens] = min(seconds("ours", given, backward=True) for _ in range(2)) / num_tokens
    first = of_tokens[LINEAR_TOKENS[0]]
    return Rows(
        f"log-prob head, forward and backward by tokens, H={hidden} V={vocabulary}, float32, 1 thread",
        ["tokens", "CPU us per token", f"of that at {LINEAR_TOKENS[0]}"],
        [[f"{tokens:,}", f"{each * 1e6:.0f}", f"{each / first:.2f}x"] for tokens, each in of_tokens.items()],
    )


def peak_bytes(side: str, num_tokens: int, hidden: int, vocabulary: int) -> int:
    """What a forward and backward in float32 adds to a fresh process at its fullest, inputs and gradients included."""
    command = [sys.executable, __file__, "--peak", side, *map(str, (num_tokens, hidden, vocabulary))]
    # The peak belongs to the size, not to what the allocator keeps of freed pieces.
    env = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side} at {num_tokens} tokens failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def print_own_peak(side: str, num_tokens: int, hidden: int, vocabulary: int) -> None:
    seconds(side, inputs(2, 8, 16, torch.float32), backward=True)  # libraries load at first use
    before = status_bytes("VmRSS")
    seconds(side, inputs(num_tokens, hidden, vocabulary, torch.float32), backward=True)
    print(status_bytes("VmHWM") - before)


def extrapolated(tokens: tuple[int, int], measured: tuple[int, int], wanted: int) -> float:
    """Bytes at wanted tokens, on the line through both measurements."""
    slope = (measured[1] - measured[0]) / (tokens[1] - tokens[0])
    return measured[1] + slope * (wanted - tokens[1])


def peaks() -> tuple[int, float]:
    """(ours, plain's, extrapolated) in bytes at MEMORY_SIZE."""
    num_tokens, hidden, vocabulary = MEMORY_SIZE
    few, many = (peak_bytes("plain", tokens, hidden, vocabulary) for tokens in FITTING_TOKENS)
    return peak_bytes("ours", *MEMORY_SIZE), extrapolated(FITTING_TOKENS, (few, many), num_tokens)


def memory_rows() -> Rows:
    mine, theirs = peaks()
    line = "{:,} and {:,} tokens".format(*FITTING_TOKENS)
    return Rows(
        f"log-prob head, peak memory of forward and backward, float32 (plain: on the line through {line})",
        ["sizes", "ours, MiB", "plain, MiB", "ours / plain"],
        [
            [
                "T={} H={} V={}".format(*MEMORY_SIZE),
                f"{mine / 2**20:,.0f}",
                f"{theirs / 2**20:,.0f}",
                f"{mine / theirs:.1%}",
            ]
        ],
    )


def measure(rounds: int, *, docs: bool) -> None:
    """Everything about the head, some ten minutes on one core; docs: also into docs/performance.md."""
    tables = []
    for name, make in (("time", lambda: time_rows(rounds)), ("memory", memory_rows), ("linearity", linear_rows)):
        print(f"head: {name} (minutes)", file=sys.stderr, flush=True)
        tables.append(make())
        show(tables[-1])
    if docs:
        write_page("head", tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measured passes of each side")
    parser.add_argument("--docs", action="store_true", help="also write docs/performance.md")
    parser.add_argument("--peak", nargs=4, metavar=("SIDE", "T", "H", "V"), help="print the bytes of one pass, alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        side, *size = options.peak
        print_own_peak(side, *map(int, size))
    else:
        measure(options.rounds, docs=options.docs)


if __name__ == "__main__":
    main()
