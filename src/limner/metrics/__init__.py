"""Metrics as pure functions: codebook usage, distances of features, spikes of training curves."""
