"""Packing and balance: times in turns in one run, memory of processes of their own, ranks simulated.

python tools/bench/packing.py [--rounds N] [--docs] does this part of make bench alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from karmarkar_karp import partition
from peak import status_bytes
from tables import Rows, show, write_page

from megatron_rl.data.balance import packed_costs, share_of_ideal, sorted_draws
from megatron_rl.data.cost import CostModel
from megatron_rl.data.next_k_fit import NextKFit, next_k_fit
from megatron_rl.data.packers import PACKERS, padding

CAPACITY, OPEN_BINS = 262_144, 256
MEDIAN, SIGMA = 3600, 1.6
TIMED_DOCUMENTS, PADDED_DOCUMENTS = 1_000_000, 200_000
STREAMED_DOCUMENTS = (1_000_000, 4_000_000, 16_000_000)
CHUNK = 4096
NUM_RANKS, NUM_DRAWS, STEP = 64, 2000, 8
"""Draws of each rank; sequences of one rank in one optimizer step."""
COSTS = {
    "hybrid: 10 of 50 layers full attention, 3.5B active weights": CostModel(full=10 * 12288, per_token=2 * 3.46e9),
    "full attention in 50 layers, 3.5B active weights": CostModel(full=50 * 12288, per_token=2 * 3.46e9),
    "attention alone": CostModel(),
}


def documents(count: int, *, seed: int = 0) -> np.ndarray:
    """A heavy-tailed mix: log-normal lengths, cut at the capacity. int64 [count]"""
    lengths = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, count)
    return lengths.astype(np.int64).clip(1, CAPACITY)


def plain(lengths: list[int], capacity: int, k: int) -> list[list[int]]:
    """Next-k-Fit as one writes it by hand."""
    bins: list[list[int]] = []
    open_bins: list[list[int]] = []
    rooms: list[int] = []
    for document, length in enumerate(lengths):
        for place, room in enumerate(rooms):
            if room >= length:
                rooms[place] = room - length
                open_bins[place].append(document)
                break
        else:
            if len(rooms) == k:
                del rooms[0], open_bins[0]
            rooms.append(capacity - length)
            open_bins.append([document])
            bins.append(open_bins[-1])
    return bins


def seconds(pack: Callable[[list[int], int, int], list[list[int]]], lengths: list[int]) -> float:
    """CPU time of this process."""
    started = time.process_time()
    pack(lengths, CAPACITY, OPEN_BINS)
    return time.process_time() - started


def speed_rows(rounds: int) -> Rows:
    lengths = documents(TIMED_DOCUMENTS).tolist()
    if next_k_fit(lengths, CAPACITY, OPEN_BINS) != plain(lengths, CAPACITY, OPEN_BINS):  # loads compiled code, too
        sys.exit("the packer and the plain loop must give the same bins")
    pairs = [(seconds(next_k_fit, lengths), seconds(plain, lengths)) for _ in range(rounds)]
    mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    return Rows(
        f"Next-k-Fit, {TIMED_DOCUMENTS:,} documents to lists of bins, CPU seconds ({rounds} rounds)",
        ["open bins", "ours", "plain Python", "ratio"],
        [[str(OPEN_BINS), f"{mine:.3f}", f"{theirs:.2f}", f"{ratio:.0f}x"]],
    )


def stream(count: int) -> None:
    """Packs count documents as they come, and lets go of each bin when it is closed."""
    packer: NextKFit[int] = NextKFit(CAPACITY, OPEN_BINS)
    for chunk in range(-(-count // CHUNK)):
        packer.add_many(documents(CHUNK, seed=chunk), np.arange(CHUNK))


def print_own_peak(count: int) -> None:
    stream(20 * CHUNK)  # libraries load at first use, and all bins open
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    stream(count)
    print(status_bytes("VmHWM") - before)


def peak_bytes(count: int) -> int:
    """What streaming count documents adds to a fresh process at its fullest."""
    done = subprocess.run([sys.executable, __file__, "--peak", str(count)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"streaming {count} documents failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def memory_rows() -> Rows:
    return Rows(
        f"Next-k-Fit as a stream in chunks of {CHUNK:,}, k = {OPEN_BINS}: memory above that of the first chunks",
        ["documents", "peak, MiB"],
        [[f"{count:,}", f"{peak_bytes(count) / 2**20:.1f}"] for count in STREAMED_DOCUMENTS],
    )


def padding_rows() -> Rows:
    lengths = documents(PADDED_DOCUMENTS)
    packers = {f"Next-k-Fit, k = {k}": ("next_k_fit", k) for k in (1, 4, 16, 64, OPEN_BINS)}
    packers |= {name.replace("_", "-"): (name, OPEN_BINS) for name in PACKERS if name != "next_k_fit"}
    rows = []
    for name, (packer, k) in packers.items():
        numbers = PACKERS[packer](lengths, CAPACITY, open_bins=k)
        rows.append([name, f"{numbers.max() + 1:,}", f"{padding(numbers, lengths, CAPACITY):.3%}"])
    return Rows(f"padding of {PADDED_DOCUMENTS:,} documents", ["packer", "sequences", "padding"], rows)


def share_with_steps(costs_RN: np.ndarray) -> float:
    """share_of_ideal of ranks that meet once per STEP sequences."""
    return share_of_ideal(costs_RN.reshape(len(costs_RN), -1, STEP).sum(axis=2))


def balanced(costs_RN: np.ndarray) -> np.ndarray:
    """The same costs with every step's sequences dealt out anew by Karmarkar-Karp, each rank's from cheap to dear."""
    steps = []
    for start in range(0, costs_RN.shape[1], STEP):
        costs = costs_RN[:, start : start + STEP].ravel()
        steps.append(np.sort(costs[partition(costs, len(costs_RN))], axis=1))
    return np.concatenate(steps, axis=1)


def balance_rows(name: str, cost: CostModel) -> Rows:
    lengths = documents(PADDED_DOCUMENTS)
    costs_RN = packed_costs(
        lengths, capacity=CAPACITY, open_bins=OPEN_BINS, num_ranks=NUM_RANKS, num_draws=NUM_DRAWS, cost=cost
    )
    random = share_of_ideal(np.random.default_rng(0).permuted(costs_RN, axis=1))
    orders = {"as packed": ("no", costs_RN)}
    orders |= {f"cost-sorted, b = {size}": ("no", sorted_draws(costs_RN, size)) for size in (16, 64, 256, 1000)}
    orders["Karmarkar-Karp over each step's global batch"] = ("yes", balanced(costs_RN))
    rows = []
    for order, (talk, drawn) in orders.items():
        each = share_of_ideal(drawn)
        rows.append([order, talk, f"{each:.1%}", f"{each / random:.2f}x", f"{share_with_steps(drawn):.1%}"])
    return Rows(
        f"{NUM_RANKS} ranks, {name}: throughput, of ranks of equal cost",
        ["order", "ranks talk", "meet after each", "over random", f"meet after {STEP}"],
        rows,
    )


def measure(rounds: int, *, docs: bool) -> None:
    """Everything about packing and balance, a minute; docs: also into docs/performance.md."""
    makers: list[Callable[[], Rows]] = [lambda: speed_rows(rounds), memory_rows, padding_rows]
    makers += [lambda name=name, cost=cost: balance_rows(name, cost) for name, cost in COSTS.items()]
    print("packing (a minute)", file=sys.stderr, flush=True)
    tables = []
    for make in makers:
        tables.append(make())
        show(tables[-1])
    if docs:
        write_page("packing", tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measured passes of each side")
    parser.add_argument("--docs", action="store_true", help="also write docs/performance.md")
    parser.add_argument("--peak", type=int, metavar="DOCUMENTS", help="print the bytes of one stream, alone")
    options = parser.parse_args()
    if options.peak:
        print_own_peak(options.peak)
    else:
        measure(options.rounds, docs=options.docs)


if __name__ == "__main__":
    main()
