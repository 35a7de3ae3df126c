"""Recording of training steps, and a report on where time and memory go."""
