"""Data sets with known contents: synthetic scenes with a checker, emoji, and icons drawn from SVG."""
