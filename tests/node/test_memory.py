"""Freed memory stays with the process: using it again costs no page faults."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

AGAIN = """
import ctypes, resource
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page is one fault, whoever cleared it
from node.memory import keep_freed

kept = keep_freed() if {keep} else True
for turn in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    rows = [bytes(2**20) for _ in range(32)]
    while rows:
        rows.pop()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 32 * 2**20 // resource.getpagesize()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is asked")
@pytest.mark.parametrize("keep", [True, False])
def test_memory_that_was_freed_is_used_again(keep: bool) -> None:
    said = subprocess.run([sys.executable, "-c", AGAIN.format(keep=keep)], capture_output=True, text=True, check=True)
    kept, n_faults = said.stdout.split()
    assert kept == "True"
    assert (int(n_faults) < PAGES // 8) == keep
