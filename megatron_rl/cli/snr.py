"""megatron-rl snr RUN: how much of the importance ratio is policy movement, and how much is engine noise."""

from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.telemetry.snr_log import SNR_FILE, read_snr
from megatron_rl.telemetry.snr_text import text_report


def snr_report(run: Path) -> str:
    """Tables and verdict of a run folder's calibrations, as plain text.

    ConfigError: no such folder, or no calibrations in it. DataError (file and line): a damaged snr.jsonl.
    """
    if not run.is_dir():
        raise ConfigError(f"snr needs an existing run folder, got {run}; give the run.dir of an RL run")
    records = read_snr(run)
    if not records:
        raise ConfigError(f"snr needs calibrations, but {run / SNR_FILE} has none; set trainer.snr in the run's config")
    return text_report(str(run), records)
