"""How the processes of one start of a run find each other in a store that has seen other starts.

`torchrun` starts processes anew when one has died, when a machine is lost or when one joins. They get the store of
those before, with the addresses of the dead (pytorch#135712). The number of restarts that each is told tells starts
apart only while there is one agent: one that joins counts from zero. So they agree on a name themselves:

    each        hello/RANK  = a number of its own, drawn anew
    the first   call        = its own number, and those that it has found
    each        here/CALL   that the call has the right number of it
    the first   go/CALL     when all have said so

What an earlier start has left is no answer to a number that was just drawn; the first process calls again when a
hello changes, and the others answer the latest call.
"""

from __future__ import annotations

import secrets
import time
from hashlib import sha256

from torch import distributed

_OFTEN = 0.02  # seconds between looks into the store


def agreed(store: distributed.Store, rank: int, world: int, seconds: float) -> str:
    """A name that these processes have in common and no others ever had. Raises `TimeoutError` if they do not meet."""
    own, deadline = secrets.token_hex(8), time.monotonic() + seconds
    store.set(f"hello/{rank}", own)
    called, answered = "", ""
    while time.monotonic() < deadline:
        if rank == 0:
            names = [f"hello/{i}" for i in range(world)]
            if store.check(names):
                found = " ".join(value.decode() for value in store.multi_get(names))
                if found != called:
                    called = found
                    store.set("call", called)
        if store.check(["call"]):
            call = store.get("call").decode()
            numbers = call.split(" ")
            if len(numbers) == world and numbers[rank] == own:
                name = sha256(call.encode()).hexdigest()[:16]
                if name != answered:
                    answered = name
                    store.set(f"here/{name}/{rank}", "")
                if rank == 0 and store.check([f"here/{name}/{i}" for i in range(world)]):
                    store.set(f"go/{name}", "")
                if store.check([f"go/{name}"]):
                    return name
        time.sleep(_OFTEN)
    raise TimeoutError(f"not all {world} processes were there within {seconds:g} s")
