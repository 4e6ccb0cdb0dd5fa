"""One setting at a time from one baseline, over the same seeds: what changed, at what cost, what the seeds support."""
