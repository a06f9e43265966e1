"""A child process ends with its parent: asked of the kernel where it can be, watched for elsewhere."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
ORPHANED = signal.SIGUSR2
"""Says that the parent is gone, to a process that ends with it; who does nothing about it is ended by it. It comes once
for each thread that the parent had, so it must not be a signal whose second time means more than the first."""
_WATCH_S = 1.0


def end_with(parent_pid: int) -> None:
    """Have this process sent `ORPHANED` when its parent ends, and end at once if that has happened already.

    On Linux the signal comes when the parent's *thread* that started us ends, so parents start children from their main
    thread. Elsewhere a thread looks once a second.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, ORPHANED, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent_pid,), name="parent watch", daemon=True).start()
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), ORPHANED)


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), ORPHANED)


def is_alive(pid: int) -> bool:
    """Whether a process with this id exists, a zombie not counted."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    if sys.platform == "linux":
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
                return stat.read().rpartition(")")[2].split()[0] != "Z"
        except (OSError, IndexError):
            return False
    return True
