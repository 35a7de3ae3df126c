"""A trial that is over at once, in a module that other processes can import."""

import math
import os
import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    number: int
    counter: str  # a file that grows by a byte with each trial
    needed: str = ""  # without a file of this name the process is killed


def trial(of: Setting) -> dict:
    if of.needed and not os.path.exists(of.needed):
        os.kill(os.getpid(), signal.SIGKILL)
    with open(of.counter, "a") as file:
        file.write("x")
    return {"loss": [0.1, math.nan, math.inf], "number": of.number}
