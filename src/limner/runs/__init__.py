"""Training runs: stages, parallel training on a CPU, time estimates, codebook pruning, and the demo."""
