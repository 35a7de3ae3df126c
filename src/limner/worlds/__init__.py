"""Worlds whose truth is known: synthetic scenes with their judge, and emoji."""
