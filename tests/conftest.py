"""Two test processes share two cores: each computes with one thread."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts
