"""Measures as pure functions: of codes in use, of pictures, of spikes."""
