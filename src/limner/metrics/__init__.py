"""Metrics as pure functions: codebook usage, PSNR of pictures, spikes of training curves."""
