"""Records to bytes and back: msgpack with numpy arrays as extension data. No pickle, ever.

Source of the format: an array is (dtype string, shape, little-endian bytes).
"""

from typing import Any

import msgspec
import numpy as np

from megatron_rl.records.batch import PackedBatch, StepBatch

_ALLOWED_DTYPES = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "float32", "float64"})


class BatchRequest(msgspec.Struct, tag=True):
    """Trainer -> orchestrator: give me the batch of this step."""

    step: int
    weight_version: int
    data_parallel_size: int


class StateRequest(msgspec.Struct, tag=True):
    """Trainer -> orchestrator: your state after the batch of this step, for the checkpoint."""

    step: int


class EvalRequest(msgspec.Struct, tag=True):
    """Trainer -> orchestrator: evaluate the held-out splits on the weights the engine now has."""

    step: int
    weight_version: int


class CalibrationRequest(msgspec.Struct, tag=True):
    """Trainer -> orchestrator: fresh rollouts of the weights both sides hold now, to be measured and not trained."""

    step: int
    weight_version: int
    data_parallel_size: int
    num_rollouts: int


class RunFinished(msgspec.Struct, tag=True):
    """Trainer -> orchestrator: the last step is done; stop."""

    step: int


class BatchReply(msgspec.Struct, tag=True):
    batch: StepBatch


class StateReply(msgspec.Struct, tag=True):
    state: bytes


class CalibrationReply(msgspec.Struct, tag=True):
    microbatches: list[list[PackedBatch]]
    """[data-parallel rank][microbatch], as in StepBatch; advantages are 0."""


class EvalReply(msgspec.Struct, tag=True):
    metrics: dict[str, tuple[str, float, float]]


class Acknowledged(msgspec.Struct, tag=True):
    pass


class Failed(msgspec.Struct, tag=True):
    """Orchestrator -> trainer: what went wrong, in one line, and where to read more."""

    message: str


Request = BatchRequest | StateRequest | EvalRequest | CalibrationRequest | RunFinished
Reply = BatchReply | StateReply | EvalReply | CalibrationReply | Acknowledged | Failed


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.name not in _ALLOWED_DTYPES:
            raise ValueError(f"arrays on the wire are {sorted(_ALLOWED_DTYPES)}, got {value.dtype}")
        return (value.dtype.name, value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"records hold plain data and numpy arrays, got {type(value).__name__}")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        if dtype not in _ALLOWED_DTYPES:
            raise ValueError(f"arrays on the wire are {sorted(_ALLOWED_DTYPES)}, got {dtype}")
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    raise TypeError(f"no decoder for {kind}")


def encode(record: Any) -> bytes:
    """Any record, or list of records, as msgpack bytes."""
    return msgspec.msgpack.encode(record, enc_hook=_encode_array)


def decode(data: bytes, kind: Any) -> Any:
    """Bytes as a record of the given kind (a class or a union of records). Arrays are read-only.

    msgspec.ValidationError names what does not fit.
    """
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)
