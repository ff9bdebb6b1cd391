"""Every random generator of a trainer rank, as one file."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def random_state() -> bytes:
    """Python, numpy, torch, this rank's GPU and Megatron's tracked states, as torch.save writes them."""
    kind, keys, *position = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *position),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "megatron": _tracker().get_states(),
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load_random_state(file: Path) -> None:
    """Restores what random_state gave. Reads tensors and plain values only, never code."""
    state: dict[str, Any] = torch.load(file, weights_only=True)
    kind, keys, *position = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *position))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    _tracker().set_states(state["megatron"])


def _tracker() -> Any:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "build_groups makes the tracker"
    return tracker
