"""Worlds whose truth is known: synthetic scenes with their judge, emoji, and icons drawn from SVG."""
