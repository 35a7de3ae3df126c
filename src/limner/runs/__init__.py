"""What a run does: its stages, the process beside it, how long it will take, pruning, the demo."""
