"""Captions as tokens."""

PAD = -1  # marks a text position that holds no token; the prior has a learned padding token for each (§2.2)
