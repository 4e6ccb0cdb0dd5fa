"""What is wrong with a run, before one, or with a node; the evidence and the setting to change."""
