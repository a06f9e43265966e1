"""A thread that takes denormals for zero computes nothing that others must agree on: it says so."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from aggregation import codec, outer, rules
from aggregation.denormals import check_denormals
from aggregation.errors import DenormalsError

FLUSH_TO_ZERO, DENORMALS_ARE_ZERO = 1 << 15, 1 << 6
ROW = np.arange(1, 51, dtype=np.float32)
FRAME = codec.encode("int8", ROW, block=16)
AGREED: dict[str, Callable[[], object]] = {
    "aggregate": lambda: rules.aggregate("mean", [[1.0]]),
    "combine": lambda: rules.combine("mean", [FRAME], weights_N=[1], f=0, codec="int8", block=16),
    "squared_norm": lambda: codec.squared_norm(FRAME),
    "measure": lambda: codec.measure(FRAME, codec="int8", block=16, n_values=50),
    "nesterov": lambda: outer.nesterov(ROW.copy(), ROW.copy(), ROW, lr=0.7, momentum=0.9),
    "nesterov_from_frame": lambda: outer.nesterov_from_frame(ROW.copy(), ROW.copy(), FRAME, lr=0.7, momentum=0.9),
}


@contextmanager
def mode_of_sse(bits: int) -> Iterator[None]:
    """These bits set in this thread's control register, by the C library."""
    libc = ctypes.CDLL(None)
    before = ctypes.create_string_buffer(32)  # glibc's fenv_t of x86-64, the register in its last four bytes
    libc.fegetenv(before)
    flushing = ctypes.create_string_buffer(before.raw, 32)
    register = ctypes.c_uint32.from_buffer(flushing, 28)
    register.value |= bits
    libc.fesetenv(flushing)
    try:
        yield
    finally:
        libc.fesetenv(before)


def in_a_thread(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


@pytest.mark.parametrize("agreed", AGREED.values(), ids=AGREED)
def test_where_torch_has_set_flushing_nothing_is_agreed_on(agreed: Callable[[], object]) -> None:
    def call() -> None:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor can't flush")
        try:
            with pytest.raises(DenormalsError, match="set_flush_denormal"):
                agreed()
        finally:
            torch.set_flush_denormal(False)
        agreed()

    agreed()
    in_a_thread(call)


@pytest.mark.skipif(
    (platform.machine(), platform.libc_ver()[0]) != ("x86_64", "glibc"), reason="the register is reached through glibc"
)
@pytest.mark.parametrize("bits", [FLUSH_TO_ZERO, DENORMALS_ARE_ZERO, FLUSH_TO_ZERO | DENORMALS_ARE_ZERO])
def test_each_of_the_two_modes_is_found(bits: int) -> None:
    def call() -> None:
        with mode_of_sse(bits), pytest.raises(DenormalsError):
            check_denormals()
        check_denormals()

    in_a_thread(call)


def test_the_check_is_not_in_vain() -> None:
    """In such a mode an outer step would end elsewhere."""
    anchors = [np.zeros(4, np.float32) for _ in range(2)]
    tiny = np.full(4, 2.0**-126, np.float32)

    def step(anchor: np.ndarray) -> None:
        kernel = outer._nesterov
        kernel(anchor, np.zeros(4, np.float32), tiny, np.float32(1), np.float32(0.5), np.float32(0))

    def flushing() -> None:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor can't flush")
        try:
            step(anchors[1])
        finally:
            torch.set_flush_denormal(False)

    in_a_thread(lambda: step(anchors[0]))
    in_a_thread(flushing)
    assert anchors[0].tobytes() != anchors[1].tobytes()
