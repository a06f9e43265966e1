"""A node that another process started ends with it: asked of the kernel where it can be, watched for elsewhere.

The coordinator, which imports nothing of a node, has its own.
"""

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
WATCH_S = 1.0


def end_with(parent_pid: int) -> None:
    """Have `ORPHANED` sent to this process when its parent ends, or end at once if it is gone already.

    On Linux the signal comes when the *thread* that started us ends: parents start children from their main thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, ORPHANED, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent_pid,), name="parent watch", daemon=True).start()
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), ORPHANED)


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(WATCH_S)
    os.kill(os.getpid(), ORPHANED)
