"""Without shared memory, a pool of processes raises an error."""

import errno
from multiprocessing.synchronize import SemLock

import pytest

from limner.cli import main


@pytest.mark.parametrize(
    "fault", [(errno.EROFS, "Read-only file system"), (errno.ENOENT, "No such file"), (0, "Error")]
)
def test_a_system_without_shared_memory_raises(monkeypatch, tmp_path, capsys, fault):
    def fails(*_, **__):
        raise OSError(*fault)

    monkeypatch.setattr(SemLock, "__init__", fails)
    assert main(["reproduce", "bandwidth", "--quick", "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("limner: no shared memory for several processes (")
    assert fault[1] in error and "mount a writable /dev/shm" in error
