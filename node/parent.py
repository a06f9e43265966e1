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
WATCH_S = 1.0


def end_with(parent_pid: int) -> None:
    """Have SIGTERM sent to this process when its parent ends, or end at once if it is gone already.

    On Linux the signal comes when the *thread* that started us ends: parents start children from their main thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent_pid,), name="parent watch", daemon=True).start()
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGTERM)


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(WATCH_S)
    os.kill(os.getpid(), signal.SIGTERM)
