"""Layout and manifest of one weight version as it travels from trainer to engine."""

import msgspec


class TensorSlot(msgspec.Struct, frozen=True):
    """Where one HF-named tensor lies in the staging arena."""

    name: str
    dtype: str
    """torch dtype name without the module: float32, bfloat16."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the arena; a multiple of 64."""
    nbytes: int


class WeightManifest(msgspec.Struct):
    """One complete weight version: every slot has a checksum, or the engine refuses it."""

    version: int
    buffer_index: int
    """Half of the double-buffered arena that was written."""
    checksums: dict[str, str]
    """Slot name -> hex digest of its bytes."""
