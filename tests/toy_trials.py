"""A short trial, in a module that other processes can import."""

import math
import os
import signal


def trial(*, number: int, counter: str, needed: str = "") -> dict:
    """`counter` is a file that grows by a byte with each trial. Without a file named `needed` the process is killed."""
    if needed and not os.path.exists(needed):
        os.kill(os.getpid(), signal.SIGKILL)
    with open(counter, "a") as file:
        file.write("x")
    return {"loss": [0.1, math.nan, math.inf], "number": number}
