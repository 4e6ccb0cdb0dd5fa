"""Everything that is refused before a model is built."""
