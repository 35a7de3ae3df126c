"""Losses: a model and a batch to a scalar and numbers to log."""
