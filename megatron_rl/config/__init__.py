"""Loading, checking and printing of run configs."""

from megatron_rl.config.errors import ConfigError, DataError, RunError, RunStop
from megatron_rl.config.model import ConfigModel

__all__ = ["ConfigError", "ConfigModel", "DataError", "RunError", "RunStop"]
