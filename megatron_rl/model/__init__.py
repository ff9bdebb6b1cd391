"""Hugging Face config.json to a Megatron GPTModel, its packed forward, and its weights under their HF names."""
