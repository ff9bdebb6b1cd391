"""Verbs of the megatron-rl command and the entry points of its processes."""
