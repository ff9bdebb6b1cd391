"""The trained model: Megatron's GPTModel up to the final hidden states. The head belongs to the loss."""

from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_rl.model.families.family import Family, HfConfig, WeightPart


class PolicyModel(GPTModel):
    """GPTModel whose forward ends after the final norm."""

    hf_config: HfConfig
    """config.json of the model it was built from."""
    weight_parts: list[WeightPart]
    """Where each HF tensor lives; sorted by name, equal on every rank."""
    family: Family

    def _postprocess(self, hidden_states: Tensor, **_unused: Any) -> Tensor:  # type: ignore[override]
        return hidden_states

    @property
    def head_weight(self) -> Tensor:
        """This rank's rows of the output projection, [V / tp, H]; the embedding itself when tied."""
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        assert weight is not None, "one pipeline stage holds embedding and head"
        return weight
