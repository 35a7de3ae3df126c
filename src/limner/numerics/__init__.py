"""Precisions of training and inference, and number formats of up to 16 bits."""
