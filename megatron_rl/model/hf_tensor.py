"""What a tensor of a Hugging Face folder is called and looks like. Imports nothing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HfTensorSpec:
    """Name, dtype (torch's name without the module) and shape of one HF tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
