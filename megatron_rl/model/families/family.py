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
    """Names the Megatron parameter or buffer may have, with layers numbered over the whole model; which one depends on
    the layer implementation. For an expert the name of the linear layer: either a stack with the experts of this rank
    first, or one `weight<i>` per expert of this rank."""
    split: Split = "whole"
    """How the shards of tensor-parallel ranks join: along dimension 0 (rows), 1 (columns), or every rank has all."""
    part: Callable[[Tensor], Tensor] = lambda param: param
    """The view of this rank's parameter that holds its shard; reshaping it to the shard's shape keeps the order."""
    expert: int | None = None
    """Global expert number; None for what every expert-parallel rank holds. An expert's split is over the
    expert-tensor-parallel ranks, any other over the tensor-parallel ranks."""
    layer: int | Literal["first", "last"] = "first"
    """Number of its layer, counted over the whole model; for what is in no layer, the pipeline stage that has it."""
    dtype: str | None = None
    """torch's name of the dtype, where it is not the model's: float32 for the expert bias."""
    copy_on_last: str | None = None
    """Parameter of the last stage that must equal it where first and last stage differ: the head of a tied model."""


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
    """Arguments of Megatron's GPTModel: vocabulary, lengths, RoPE, tied embeddings."""
    weight_parts: Callable[[HfConfig], list[WeightPart]]
    """Every HF tensor of the model, sorted by name; equal on every rank."""
    is_redundant: Callable[[HfConfig, str], bool]
    """Whether files may hold a tensor of this name that the model does not need, such as the head of a tied model."""
