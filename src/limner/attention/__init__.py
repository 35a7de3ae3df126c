"""Attention patterns, attention in training and in decoding, and the cache of keys and values."""
