"""The trained model: Megatron's GPTModel up to the final hidden states. The head belongs to the loss."""

import re
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_rl.model.families.family import Family, HfConfig, WeightPart

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


class PolicyModel(GPTModel):
    """One pipeline stage of GPTModel whose forward ends after the final norm."""

    hf_config: HfConfig
    """config.json of the model it was built from."""
    weight_parts: list[WeightPart]
    """Where each HF tensor lives; sorted by name, equal on every rank."""
    family: Family
    layers: range
    """The layers of this stage, counted over the whole model."""

    def _postprocess(self, hidden_states: Tensor, **_unused: Any) -> Tensor:  # type: ignore[override]
        return hidden_states

    def setup_embeddings_and_output_layer(self) -> None:
        """Marks embedding and head for Megatron's optimizer and gradient reduction.

        Megatron also makes the two copies of a tied embedding equal here; loading weights fills both.
        """
        embedding: Any = self.embedding.word_embeddings.weight if self.pre_process else None
        head: Any = self.output_layer.weight if self.post_process else None
        for weight in (embedding, head):
            if weight is not None:
                weight.is_embedding_or_output_parameter = True
        if not self.share_embeddings_and_output_weights or not (self.pre_process or self.post_process):
            return
        weight: Any = self.shared_embedding_or_output_weight()
        if self.pre_process and self.post_process:
            weight.zero_out_wgrad = True
            return
        weight.shared_embedding = True
        if self.post_process:
            weight.shared = True

    def global_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers of this stage by name, layers counted over the whole model."""
        state = self.state_dict(keep_vars=True)
        return {self.global_name(name): tensor for name, tensor in state.items() if not name.endswith("_extra_state")}

    def global_name(self, name: str) -> str:
        """The name of a parameter with its layer counted over the whole model instead of over this stage."""
        return _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + self.layers.start}.", name)

    @property
    def head_weight(self) -> Tensor:
        """This rank's rows of the output projection, [V / tp, H]; the embedding itself when tied. Last stage only."""
        assert self.post_process, "the last pipeline stage holds the head"
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        assert weight is not None, "a stage that ends the model has a head"
        return weight
