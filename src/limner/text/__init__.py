"""Tokenization of captions."""

PAD = -1  # marks a text position without token, where the prior has a learned padding token (§2.2)
