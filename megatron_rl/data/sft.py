"""What a run file says about SFT data: which conversations, which tokens of them, and how they become batches."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rl.config import ConfigModel
from megatron_rl.data.dataset_config import DatasetConfig, check_mixture
from megatron_rl.data.mask import MaskConfig


class StepPacking(ConfigModel):
    """Every step takes samples_per_step conversations of whatever length and spreads them over the ranks: the same
    steps for any number of ranks, each of which renders every conversation."""

    kind: Literal["step"] = "step"
    """A fixed number of conversations per step."""


class StreamPacking(ConfigModel):
    """Every rank packs its own share of the conversations into full microbatches, without communication, and at any
    moment takes one of about the same cost as the others do."""

    kind: Literal["stream"] = "stream"
    """A fixed number of tokens per step."""
    open_bins: int = Field(ge=1, default=256)
    """Microbatches that may still take a conversation (k of Next-k-Fit). Of a log-normal mix less than .1% is left
    empty at 256, about 14% at 1."""
    buffer: int = Field(ge=1, default=256)
    """Packed microbatches that a rank holds to sort them by cost, beside the open ones; 1: no sorting."""
    cost: Literal["attention", "model"] = "attention"
    """How long a microbatch is taken to last. attention: the sum of its squared conversation lengths. model: what the
    model's layers do with them, window attention and the work per token included."""
    microbatches_per_step: int = Field(ge=1, default=1)
    """Microbatches of each rank in one optimizer step."""


PackingConfig = Annotated[StepPacking | StreamPacking, Field(discriminator="kind")]


class SftDataConfig(ConfigModel):
    """Conversations and how they are batched."""

    train: list[DatasetConfig] = Field(min_length=1)
    """Datasets of conversations, each a path or a path with name, weight or epochs. A row has messages and may have
    tools and effort."""
    heldout: list[str] = []
    """Files and folders of conversations whose loss is measured and never trained on."""
    mask: MaskConfig = MaskConfig()
    """Which parts of the assistant's turns are trained."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What a row does that is malformed or that the chat template refuses. error: ends the run, named by file and line.
    skip: is left out, named in RUN/bad_rows.jsonl and counted."""
    check_rows: int | None = Field(ge=1, default=None)
    """Rows of each file that are rendered before anything starts; null: every one. Any other is checked when it is
    drawn."""
    oversized: Literal["error", "truncate", "drop"] = "error"
    """What a conversation of more than context_length tokens does: it ends the run, loses its end, or is left out and
    counted."""
    packing: PackingConfig = StepPacking()
    """How conversations become the microbatches of the ranks."""
    samples_per_step: int = Field(ge=1, default=16)
    """Conversations of one optimizer step, over all ranks. Only for packing.kind step."""
    microbatch_tokens: int = Field(ge=1, default=4096)
    """Most tokens of one packed microbatch on one rank."""

    @model_validator(mode="after")
    def _datasets_go_together(self) -> "SftDataConfig":
        check_mixture(self.train)
        if len(self.train) == 1:
            for name in ("weight", "epochs"):
                if (value := getattr(self.train[0], name)) is not None:
                    raise ValueError(
                        f"train.0.{name} has no effect with one dataset, got {value:g}; remove it: trainer.steps says "
                        "how much is trained"
                    )
        return self
