"""Scores of trained models, and their pages."""
