"""What a run does: its stages, the process beside it, pruning, the demo."""
