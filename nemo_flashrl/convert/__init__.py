"""Whole checkpoints: Hugging Face <-> NeMo, and whether two of them are the same model."""
