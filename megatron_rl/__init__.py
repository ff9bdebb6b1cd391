"""Megatron-Core trainer for Mixture-of-Experts language models: SFT and RL against vLLM."""
