"""What a process does with its memory for the long run, once it is started: less work for the same bytes."""

from __future__ import annotations

import ctypes
import gc

FREED_KEPT_BYTES = 64 * 2**20
"""Freed memory that the process keeps: about what is on its way through it at once."""
HEAP_STEP_BYTES = 4 * 2**20
MAPPED_FROM_BYTES = 32 * 2**20
"""The most that glibc takes from its heap."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def settle() -> None:
    """What is there now stays: the collector need not walk through it again. And keep what messages leave behind."""
    gc.collect()
    gc.freeze()
    keep_freed()


def keep_freed() -> bool:
    """Have glibc keep memory that was freed; whether it does, for there are other C libraries.

    It would give back every row's memory and have the kernel clear as much again for the next one, page by page.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    options = (
        (_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES),
        (_M_TRIM_THRESHOLD, FREED_KEPT_BYTES),
        (_M_TOP_PAD, HEAP_STEP_BYTES),
    )
    return all([mallopt(option, value) == 1 for option, value in options])
