"""glibc's allocator, tuned for training.

By default glibc maps each large tensor anew and unmaps it when it is freed, so every output of a layer
pays for fresh, zeroed pages. If it keeps memory instead (no mmap, trim only beyond 8 GiB), a training
step on two cores takes about 15 % less time. The setting is read when a process starts, hence the one
re-exec below. It has no effect on results.
"""

from __future__ import annotations

import os
import platform
import sys

TUNABLES = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592"


def settle_allocator() -> None:
    """Start this process again with the setting. Does nothing where `GLIBC_TUNABLES` is set already (so
    that it happens once, and a user's own choice stands) or where there is no glibc."""
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or platform.libc_ver()[0] != "glibc":
        return
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, "GLIBC_TUNABLES": TUNABLES}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
