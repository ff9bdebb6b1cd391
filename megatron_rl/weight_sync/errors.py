"""What can go wrong between a new weight version and the engines that should serve it."""

from megatron_rl.config import RunError


class WeightSyncError(RunError):
    """A version did not reach an engine whole. Every engine that did not take it still serves the one before."""


class WeightsLostError(Exception):
    """An engine took part of a version and could not go back; it must not answer any more."""
