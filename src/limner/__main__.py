"""`python -m limner` runs the command `limner`."""

import sys

from limner.cli import main

if __name__ == "__main__":
    sys.exit(main())
