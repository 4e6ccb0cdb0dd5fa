"""Weights on the move: Hugging Face folder -> shards, live shards -> Hugging Face names, export."""
