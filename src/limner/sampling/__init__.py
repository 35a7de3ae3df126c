"""Sampling of image tokens from a prior, and reranking of candidates by a contrastive model."""
