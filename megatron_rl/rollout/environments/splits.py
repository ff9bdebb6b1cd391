"""Held-out by name: whether a thing is held out follows from what it is, so no two splits can share it."""

import hashlib

HELD_OUT_SHARE = 0.2
"""Share of all keys that no training prompt uses."""


def is_held_out(kind: str, key: str) -> bool:
    """Whether the thing with this key is kept out of training. Stable over machines, processes and versions."""
    digest = hashlib.blake2b(f"{kind}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64
