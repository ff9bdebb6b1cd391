"""Sampled rollouts token by token, as the loss saw them: run_dir/rollouts.jsonl, one rollout per line."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from megatron_rl.config.errors import DataError
from megatron_rl.telemetry import jsonl

ROLLOUTS_FILE = "rollouts.jsonl"

_Record = TypeVar("_Record", bound=msgspec.Struct)


class TokenRecord(msgspec.Struct):
    """One trained token sequence. Lists are [T], entry t belongs to token t; a number that is not finite is null."""

    step: int
    """Optimizer step that trained on it, from 1."""
    sample_id: str
    group_id: str
    environment: str
    reward: float | None
    advantage: float | None
    tokens: list[str]
    """Text of each token, special tokens spelled out."""
    trained: list[bool]
    """The engine sampled the token and the loss saw it; prompt and tool tokens are False."""
    engine_logp: list[float | None]
    """Natural log-prob from the engine that sampled."""
    policy_logp: list[float | None]
    """Natural log-prob from the trainer, before the step."""
    kept: list[bool]
    """B-TV mask k: False where the policy-gradient term of the token is 0."""
    gradient_scale: list[float | None]
    """c_t in (0, 1]: what the gradient bound multiplies the token's loss by."""
    weight_version: list[int]
    """Version of the weights that sampled the token; -1 where not sampled."""
    phase: str = "rl"

    def __post_init__(self) -> None:
        for name in ("trained", "engine_logp", "policy_logp", "kept", "gradient_scale", "weight_version"):
            if len(getattr(self, name)) != len(self.tokens):
                raise ValueError(
                    f"TokenRecord.{name} must have one entry per token: "
                    f"expected {len(self.tokens)}, got {len(getattr(self, name))}"
                )


class RolloutHead(msgspec.Struct):
    """What it takes to choose among rollouts without decoding their tokens."""

    step: int
    phase: str = "rl"


class RolloutLog:
    """Appends to run_dir/rollouts.jsonl, at most max_per_step rollouts for each step."""

    def __init__(self, run_dir: Path, *, max_per_step: int = 64) -> None:
        """Creates the folder and cuts off a torn last line."""
        self._path = run_dir / ROLLOUTS_FILE
        self._max_per_step = max_per_step
        self._step = -1
        self._written = 0
        run_dir.mkdir(parents=True, exist_ok=True)
        jsonl.drop_torn_line(self._path)

    def write(self, step: int, records: Sequence[TokenRecord]) -> None:
        """Adds the first records up to the cap; ValueError for a record of another step."""
        if step != self._step:
            self._step, self._written = step, 0
        for record in records[: max(0, self._max_per_step - self._written)]:
            if record.step != step:
                raise ValueError(f"rollouts of step {step} must say so, got step {record.step} in {record.sample_id}")
            jsonl.append_line(self._path, msgspec.json.encode(record))
            self._written += 1


def read_rollout_heads(run_dir: Path) -> Iterator[tuple[int, RolloutHead]]:
    """(line number, head) of every rollout; cheap even where the rollouts are long. DataError with file and line."""
    path = run_dir / ROLLOUTS_FILE
    for number, line in jsonl.whole_lines(path):
        yield number, _decode(path, number, line, RolloutHead)


def read_rollouts(run_dir: Path, lines: set[int] | None = None) -> Iterator[TokenRecord]:
    """The rollouts at the given line numbers, or all, in order. DataError with file and line."""
    path = run_dir / ROLLOUTS_FILE
    for number, line in jsonl.whole_lines(path):
        if lines is None or number in lines:
            yield _decode(path, number, line, TokenRecord)


def truncate_rollouts(run_dir: Path, step: int, *, phase: str) -> None:
    """Drops the phase's rollouts beyond step; all of them for step 0."""
    path = run_dir / ROLLOUTS_FILE

    def keep(number: int, line: bytes) -> bool:
        head = _decode(path, number, line, RolloutHead)
        return head.phase != phase or 0 < step >= head.step

    jsonl.keep_lines(path, keep)


def _decode(path: Path, number: int, line: bytes, kind: type[_Record]) -> _Record:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}:{number}: every line must be a rollout record: {error}; remove the line") from error
