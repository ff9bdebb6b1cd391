"""Records travel as msgpack and come back equal; what is not plain data is refused."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.records import PackedBatch, Sample, Segment, StepBatch, wire


def batch(num_tokens: int, *, with_rl: bool) -> PackedBatch:
    random = np.random.default_rng(num_tokens)
    ids = random.integers(0, 500, num_tokens + 1).astype(np.int32)
    return PackedBatch(
        input_ids=ids[:-1],
        target_ids=ids[1:],
        loss_mask=random.random(num_tokens) > 0.5,
        cu_seqlens=np.array([0, num_tokens], dtype=np.int32),
        sample_ids=["a/b#1"],
        advantages=random.normal(size=num_tokens).astype(np.float32) if with_rl else None,
        engine_logp=np.where(random.random(num_tokens) > 0.5, np.nan, -1.5).astype(np.float32) if with_rl else None,
        info=[{"reward": 0.5, "environment": "größe"}],
    )


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    elif isinstance(left, msgspec.Struct):
        for name in left.__struct_fields__:
            assert_equal(getattr(left, name), getattr(right, name))
    else:
        assert left == right


@given(st.integers(0, 50), st.booleans())
def test_a_step_batch_comes_back_bit_for_bit(num_tokens: int, with_rl: bool) -> None:
    step = StepBatch(
        step=7,
        microbatches=[[batch(num_tokens, with_rl=with_rl)], [batch(num_tokens + 1, with_rl=with_rl)]],
        num_trained=11,
        denominator=2.5,
        metrics={"reward/mean": ("mean", 1.5, 3.0)},
    )
    reply = wire.decode(wire.encode(wire.BatchReply(batch=step)), wire.Reply)
    assert_equal(reply, wire.BatchReply(batch=step))


def test_requests_are_told_apart_by_their_tag() -> None:
    requests = (
        wire.BatchRequest(1, 2, 3),
        wire.StateRequest(1),
        wire.EvalRequest(1, 2),
        wire.CalibrationRequest(1, 2, 3, 4),
        wire.RunFinished(1),
    )
    for request in requests:
        assert wire.decode(wire.encode(request), wire.Request) == request


def test_objects_that_only_pickle_could_carry_are_refused() -> None:
    with pytest.raises(ValueError, match="arrays on the wire"):
        wire.encode(np.array([object()]))
    with pytest.raises(TypeError, match="plain data and numpy arrays"):
        wire.encode({"x": object()})
    with pytest.raises(msgspec.ValidationError):
        wire.decode(wire.encode(wire.StateRequest(1)), wire.Reply)


def test_streams_that_are_not_aligned_are_refused() -> None:
    ids, mask = np.zeros(3, dtype=np.int32), np.array([False, True, True])
    logp, version = np.zeros(3, dtype=np.float32), np.zeros(3, dtype=np.int32)
    with pytest.raises(ValueError, match=r"Segment\.engine_logp.*expected 3, got 2"):
        Segment(ids, mask, logp[:2], version)
    with pytest.raises(ValueError, match=r"Sample\.advantages.*expected 3, got 2"):
        Sample("a", ids, mask, advantages=logp[:2])
    with pytest.raises(ValueError, match="token 0 has no predecessor"):
        Sample("a", ids, ~mask)
