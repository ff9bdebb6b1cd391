"""What holds for every test: few threads, no network for model hubs, GPU tests marked by their folder."""

import os
from pathlib import Path

# Before anything imports torch or transformers; child processes inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest

hypothesis.settings.register_profile("house", deadline=None, database=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("house")

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests below tests/gpu, and skips them where no GPU is."""
    gpu_items = [item for item in items if item.path.is_relative_to(GPU_TESTS)]
    if not gpu_items:
        return
    import torch

    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="waits for a machine with a GPU")
    for item in gpu_items:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(missing)
