"""Starting a run: processes here, jobs on a cluster."""
