"""Conversations to token samples, and samples to packed batches."""
