"""The one training loop, and its checkpoints."""
