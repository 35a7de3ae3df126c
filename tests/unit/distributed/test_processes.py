"""What a process of a run says when it cannot go on, and of what it keeps silent."""

import socket
import warnings

import pytest
from torch import distributed

from limner.distributed.processes import joined
from limner.errors import UserError

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no process groups")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9", "another process .* has ended"),
        ("NCCL error: remote process exited or there was a network error", "another process of the run has ended"),
        ("[gloo/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation", "no answer of another one"),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", "no answer of another one"),
    ],
)
def test_what_has_become_of_another_process_is_said(error: str, says: str) -> None:
    with pytest.raises(UserError, match=says), joined():
        raise RuntimeError(error)


@pytest.mark.parametrize("error", ["gloo: invalid scalar type", "No backend type associated with CPU for NCCL"])
def test_an_error_of_its_own_keeps_its_name(error: str) -> None:
    with pytest.raises(RuntimeError, match=error), joined():
        raise RuntimeError(error)


def test_the_first_process_warns() -> None:
    with pytest.warns(UserWarning, match="of all"), joined():
        warnings.warn("of all", stacklevel=1)
