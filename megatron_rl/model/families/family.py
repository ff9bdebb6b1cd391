"""What this project must know of one Hugging Face architecture. Importable without Megatron."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megatron_rl.distributed.config import ParallelConfig

Split = Literal["whole", "rows", "columns"]
HfConfig = dict[str, Any]


@dataclass(frozen=True)
class WeightPart:
    """One HF tensor and the part of a Megatron parameter that holds it."""

    name: str
    """HF tensor name."""
    shape: tuple[int, ...]
    """Shape of the whole HF tensor."""
    params: tuple[str, ...]
    """Names the Megatron parameter may have; which one depends on the layer implementation. For an expert the name
    of the linear layer: either a stack [experts of this rank, out, in] or one `weight<i>` per expert of this rank."""
    split: Split = "whole"
    """How the shards of tensor-parallel ranks join: along dimension 0 (rows), 1 (columns), or every rank has all."""
    part: Callable[[Tensor], Tensor] = lambda param: param
    """The view of this rank's parameter that holds its shard; reshaping it to the shard's shape keeps the order."""
    expert: int | None = None
    """Global expert number; None for what every expert-parallel rank holds."""


@dataclass(frozen=True)
class Family:
    """An architecture as pure functions of its config.json."""

    architecture: str
    check: Callable[[HfConfig], None]
    """ConfigError for options that would be computed wrongly."""
    check_parallel: Callable[[HfConfig, ParallelConfig], None]
    """ConfigError for sizes that the parallel layout does not divide."""
    transformer_kwargs: Callable[[HfConfig], dict[str, Any]]
    """Arguments of Megatron's TransformerConfig."""
    model_kwargs: Callable[[HfConfig], dict[str, Any]]
    """Arguments of Megatron's GPTModel: vocabulary, lengths, RoPE base, tied embeddings."""
    weight_parts: Callable[[HfConfig], list[WeightPart]]
    """Every HF tensor of the model, sorted by name; equal on every rank."""
    redundant_tensors: Callable[[HfConfig], dict[str, tuple[int, ...]]]
    """HF tensors that a file may hold and the model does not need, such as the head of a tied model."""
