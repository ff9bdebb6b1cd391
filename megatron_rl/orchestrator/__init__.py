"""Owns prompts, environments and groups; feeds the trainer packed batches. Never imports torch.distributed."""
