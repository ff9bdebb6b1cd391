"""What of the orchestrator is part of a checkpoint."""

import msgspec


class OrchestratorState(msgspec.Struct):
    """Restored from a checkpoint, the orchestrator goes on with the prompts that were not yet trained."""

    next_index: dict[str, int]
    """Environment -> index of its next training prompt."""
    draws: int
    """How many prompts were drawn so far; keys the random choice of environment."""
    groups_trained: int
    """Groups handed to the trainer so far."""


def encode_state(state: OrchestratorState) -> bytes:
    """State as msgpack bytes."""
    return msgspec.msgpack.encode(state)


def decode_state(data: bytes) -> OrchestratorState:
    """Bytes of encode_state as state; msgspec.ValidationError if they are something else."""
    return msgspec.msgpack.decode(data, type=OrchestratorState)
