"""SIGTERM as a wish: noted at once, agreed on by all ranks between two steps, where the run can save and end."""

import ctypes
import signal
import threading
from collections.abc import Sequence
from types import FrameType

import torch
import torch.distributed as dist

SAME_STOP_S = 3.0
"""torchrun and a cluster's scheduler each send a SIGTERM for one and the same stop; one that comes later is another."""


class StopSignal:
    """Notes SIGTERM for the rest of the process; a second one, later, ends it at once. Made in the main thread."""

    def __init__(self) -> None:
        self.came = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        if not self.came:
            self.came = True
            timer = threading.Timer(SAME_STOP_S, _end_at_next_sigterm)
            timer.daemon = True
            timer.start()


def _end_at_next_sigterm() -> None:
    """By the system itself: a handler in Python waits while the main thread is inside a collective or a kernel."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)


def on_any_rank(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Each flag, true on every rank when it is true on one. Collective over the world; one reduction of a few bytes."""
    numbers = torch.tensor([int(flag) for flag in flags], dtype=torch.int32, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return [bool(number) for number in numbers.tolist()]
