"""The order of SFT samples: shuffled epochs without end, the same after every restart and for any number of ranks."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rl.config import ConfigError, DataError
from megatron_rl.data.packing import num_positions, pack_for_ranks
from megatron_rl.data.sft import SftDataConfig
from megatron_rl.records import Sample, StepBatch


class SftStream:
    """Draws samples_per_step samples per step; an epoch's rest is carried over, so each sample occurs once per epoch.

    The order within an epoch is drawn from (seed, epoch) alone. DataError without samples, or for one that fits no
    microbatch.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        config: SftDataConfig,
        seed: int,
        data_parallel_size: int,
        pad_multiple: int = 1,
        pad_id: int = 0,
    ) -> None:
        if not samples:
            raise DataError("data.train must have at least one conversation, got none; add files with rows")
        num_positions(samples, capacity=config.microbatch_tokens)
        self._samples, self._config, self._seed = samples, config, seed
        self._data_parallel_size, self._pad_multiple, self._pad_id = data_parallel_size, pad_multiple, pad_id
        self._epoch, self._position = 0, 0
        self._order = self._epoch_order()

    def next_step(self, step: int) -> StepBatch:
        """The next samples_per_step samples, packed for the ranks."""
        samples = [self._samples[self._draw()] for _ in range(self._config.samples_per_step)]
        microbatches = pack_for_ranks(
            samples,
            capacity=self._config.microbatch_tokens,
            data_parallel_size=self._data_parallel_size,
            pad_multiple=self._pad_multiple,
            pad_id=self._pad_id,
        )
        num_trained = sum(batch.num_trained for rank in microbatches for batch in rank)
        return StepBatch(step, microbatches, num_trained, denominator=num_trained)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands and of what; position counts the samples already drawn in this epoch."""
        return {"epoch": self._epoch, "position": self._position, **data_identity(self._samples, self._seed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where the state was taken. ConfigError if seed or data are not the ones it was taken with."""
        check_same_data(state, data_identity(self._samples, self._seed))
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._epoch_order()

    def _draw(self) -> int:
        if self._position == len(self._samples):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order()
        self._position += 1
        return int(self._order[self._position - 1])

    def _epoch_order(self) -> np.ndarray:
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._samples))


def data_identity(samples: Sequence[Sample], seed: int) -> dict[str, Any]:
    """What decides about the order and the contents of batches: the seed, and every sample's tokens and mask."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        digest.update(len(sample.token_ids).to_bytes(8, "little"))
        digest.update(np.asarray(sample.token_ids, dtype=np.int64).tobytes())
        digest.update(np.asarray(sample.loss_mask, dtype=bool).tobytes())
    return {"seed": seed, "num_samples": len(samples), "contents": digest.hexdigest()}


def check_same_data(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """ConfigError if a saved state is of another seed or other data; a state without contents says nothing of them."""
    for name, own in identity.items():
        if state.get(name, own) != own:
            raise ConfigError(
                f"a run must resume with the {name} of its training data at the start, {state[name]}, got {own}; "
                "restore data.train and run.seed, or start in a new run folder"
            )
