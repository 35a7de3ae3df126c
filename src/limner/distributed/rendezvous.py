"""Rendezvous of the processes of one start of a run, in a store that earlier starts have used.

`torchrun` restarts the processes when one has died, or when a machine is lost or joins. The new processes get the old
store, with the addresses of dead ones (pytorch#135712). The restart count of `torchrun` cannot distinguish starts,
because an agent that joins counts from zero. The processes therefore agree on a name by these entries of the store:

    each rank   hello/RANK      a random number, drawn at each start
    rank 0      call            the numbers of all ranks
    each rank   here/CALL/RANK  set if the call contains the rank's number
    rank 0      go/CALL         set when all ranks have answered

Entries of earlier starts do not match the new numbers. Rank 0 renews the call when a hello changes, and the other ranks
answer the latest call.
"""

from __future__ import annotations

import secrets
import time
from hashlib import sha256

from torch import distributed

POLL_INTERVAL = 0.02  # seconds between polls of the store


def agree_on_run_id(store: distributed.Store, rank: int, world_size: int, seconds: float) -> str:
    """Return a name shared by these processes and unique to this start. Raises `TimeoutError` after `seconds`."""
    nonce, deadline = secrets.token_hex(8), time.monotonic() + seconds
    store.set(f"hello/{rank}", nonce)
    called, answered = "", ""
    while time.monotonic() < deadline:
        if rank == 0:
            names = [f"hello/{i}" for i in range(world_size)]
            if store.check(names):
                numbers = " ".join(value.decode() for value in store.multi_get(names))
                if numbers != called:
                    called = numbers
                    store.set("call", called)
        if store.check(["call"]):
            call = store.get("call").decode()
            nonces = call.split(" ")
            if len(nonces) == world_size and nonces[rank] == nonce:
                name = sha256(call.encode()).hexdigest()[:16]
                if name != answered:
                    answered = name
                    store.set(f"here/{name}/{rank}", "")
                if rank == 0 and store.check([f"here/{name}/{i}" for i in range(world_size)]):
                    store.set(f"go/{name}", "")
                if store.check([f"go/{name}"]):
                    return name
        time.sleep(POLL_INTERVAL)
    raise TimeoutError(f"not all {world_size} processes connected within {seconds:g} s")
