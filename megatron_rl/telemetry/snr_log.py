"""Signal and noise of the importance ratio: run_dir/snr.jsonl, one calibration per line.

log r = log policy - log engine of a sampled token. A calibration has the same weights on both sides, so its log r is
engine noise; the live window has noise and policy movement. JSON has no infinity: a number that is not finite is null.
"""

from pathlib import Path

import msgspec

from megatron_rl.config.errors import DataError
from megatron_rl.telemetry import jsonl

SNR_FILE = "snr.jsonl"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the mean of the uncapped ratio is 1, and what is probably wrong if not."""

    ok: bool
    tokens: int
    """Tokens with both log-probs."""
    missing: float
    """Share of tokens whose engine log-prob is missing."""
    mean_ratio: float | None
    standard_error: float | None
    z: float | None
    """(mean_ratio - 1) / standard_error."""
    diagnosis: str
    """One word: ok, missing, temperature, truncated, sampler or other."""
    reason: str
    """What was found, in one line."""
    cure: str
    """What to do; empty if ok."""


class RatioSummary(msgspec.Struct, frozen=True, kw_only=True):
    """log r over all tokens of one pass."""

    tokens: int
    mean_ratio: float | None
    """Uncapped; 1 for an honest sampler."""
    standard_error: float | None
    """Of mean_ratio."""
    capped_mean_ratio: float | None
    """Mean of min(r, 2); below 1 by construction, no sign of a bias."""
    abs_mean: float | None
    abs_median: float | None
    abs_p99: float | None
    abs_max: float | None
    ess: float | None
    """Effective sample size of the weights r over the number of tokens."""
    k3: float | None
    """Mean of r - 1 - log r: estimates KL(engine || policy) per token, in nats."""
    outside: float | None
    """Share of tokens with r outside [0.5, 2]."""
    outside_on_forks: float | None
    """Share of those that are among the 20% of tokens with the lowest confidence."""
    mass_on_forks: float | None
    """Share of the sum of |log r| that those 20% carry."""


class BinRow(msgspec.Struct, frozen=True, kw_only=True):
    """One confidence bin: p of the policy in [low, high). Bounds and 2 sd_alpha are of log r."""

    low: float
    high: float
    tokens_cal: int
    tokens_live: int
    var_cal: float | None
    """Noise: variance of log r in the calibration."""
    var_live: float | None
    """Variance of log r in the live window."""
    var_signal: float | None
    """max(var_live - var_cal, 0): cut off, so above 0 on average where nothing moves."""
    snr: float | None
    """var_signal / var_cal; null without a live window."""
    snr_error: float | None
    """Standard error of snr, tokens taken as independent."""
    shrink: float
    """lambda = snr / (1 + snr); 1 without a live window."""
    noise_lower: float | None
    noise_upper: float | None
    """Quantiles of the calibration's log r; null where there were too few tokens."""
    signal: float | None
    """2 sd_alpha, what the bounds should let pass; null without a live window."""
    guard_lower: float | None
    guard_upper: float | None
    """Widest bounds that keep the effective sample size; null where it binds nowhere."""
    lower: float
    upper: float
    """Derived bounds."""
    pool: list[int] | None = None
    """The rows whose tokens together gave shrink and bounds, this one's being too few; null: its own alone. []: not
    even those were enough, shrink is 1 and only the effective sample size bounds r."""
    outside: float | None = None
    """Share of the live tokens (without a live window: of the calibration's) outside the derived bounds."""
    verdict: str = ""
    """signal-dominated, mixed or noise-dominated; empty if not measured."""


class SnrRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One calibration and what follows from it."""

    step: int
    """Optimizer steps done when it was made."""
    weight_version: int
    identity: Identity
    calibration: RatioSummary
    live: RatioSummary | None
    """None before the first step."""
    rows: list[BinRow]
    verdict: str
    """signal-dominated, mixed, noise-dominated, or noise only without a live window."""
    snr: float | None
    """Of all bins, weighted by their live tokens; cut off at 0 for all together."""
    snr_error: float | None = None
    """Standard error of snr, tokens taken as independent."""
    advice: list[str]
    """What the measurement asks for, most urgent first."""
    notes: list[str]
    """Where the numbers are weaker than they look."""
    quantile: float
    """Upper quantile of the noise that noise_upper is."""
    ess_floor: float
    phase: str = "rl"


class SnrLog:
    """Appends to run_dir/snr.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        """Creates the folder and cuts off a torn last line."""
        self._path = run_dir / SNR_FILE
        run_dir.mkdir(parents=True, exist_ok=True)
        jsonl.drop_torn_line(self._path)

    def write(self, record: SnrRecord) -> None:
        """Adds one record; it is in the file when this returns."""
        jsonl.append_line(self._path, msgspec.json.encode(record))


def read_snr(run_dir: Path) -> list[SnrRecord]:
    """All calibrations in order; none if there is no file, a torn last line is left out. DataError: file and line."""
    path = run_dir / SNR_FILE
    return [_decode(path, number, line) for number, line in jsonl.whole_lines(path)]


def truncate_snr(run_dir: Path, step: int, *, phase: str) -> None:
    """Drops the phase's calibrations beyond step; all of them for step 0. DataError: file and line."""
    path = run_dir / SNR_FILE

    def keep(number: int, line: bytes) -> bool:
        record = _decode(path, number, line)
        return record.phase != phase or 0 < step >= record.step

    jsonl.keep_lines(path, keep)


def _decode(path: Path, number: int, line: bytes) -> SnrRecord:
    try:
        return msgspec.json.decode(line, type=SnrRecord)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}:{number}: every line must be a calibration: {error}; remove the line") from error
