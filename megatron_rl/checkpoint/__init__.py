"""Weights in and out as Hugging Face folders, and training state that a run resumes from."""
