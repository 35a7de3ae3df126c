"""In which number format things are computed, and formats of up to 16 bits."""
