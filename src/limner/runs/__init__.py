"""What a run does: its stages, the process beside, pruning, the demonstration."""
