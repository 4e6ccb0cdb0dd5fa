"""What a run shows: its metrics, and what a person reads."""
