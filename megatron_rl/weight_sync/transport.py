"""What a transport must do: one-sided writes into a memory that the engine has registered before.

Invariants: only the half named by buffer_index is written; a write that ran into its deadline may still land later, so
both its source and its target are given up, never used again and never freed.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from torch import Tensor


class TransportError(Exception):
    """Bytes did not arrive, or not in time. The message names the peer."""


class ArenaAddress(msgspec.Struct, frozen=True):
    """What a writer must know of an arena. Plain data: it travels as JSON."""

    peer: str
    """Unique name of this incarnation of the engine."""
    metadata: str
    """Base64 of the transport's own connection data."""
    buffers: list[int]
    """Address of each half in the engine's memory."""
    nbytes: int
    """Bytes of one half."""


class Piece(msgspec.Struct, frozen=True):
    """One run of bytes to copy."""

    source: int
    """Bytes from the start of the writer's staging memory."""
    target: int
    """Bytes from the start of the arena half."""
    nbytes: int


class Arena(Protocol):
    """Engine side: two halves of registered memory."""

    @property
    def halves(self) -> Sequence[Tensor]:
        """uint8 [nbytes] each."""
        ...

    @property
    def address(self) -> ArenaAddress: ...

    def close(self) -> None:
        """Ends the registration; the memory may go once no write is under way."""
        ...


class ArenaWriter(Protocol):
    """Trainer side: registered staging memory and connections to arenas."""

    staging: Tensor
    """uint8, what pieces are read from."""

    def connect(self, address: ArenaAddress) -> None:
        """TransportError if the peer cannot be reached."""
        ...

    def write(self, pieces: Sequence[Piece], *, buffer_index: int, timeout_s: float) -> None:
        """All pieces into that half of every connected arena, at the same time. TransportError names who failed."""
        ...

    def close(self) -> None: ...
