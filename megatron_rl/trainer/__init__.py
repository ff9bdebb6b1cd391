"""Megatron-Core trainers: SFT and RL."""
