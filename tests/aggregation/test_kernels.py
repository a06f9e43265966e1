"""Machine code on disk: of two processes that compile at the same time neither runs what the other has compiled."""

from __future__ import annotations

import importlib
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import pytest
from llvmlite import binding
from numba.core.caching import IndexDataCacheFile

from aggregation import kernels
from aggregation.rules import sorting

Source = Callable[[int], Callable[[int], Any]]

SOURCE = """
from aggregation.kernels import I64, kernel

def adder(n):
    @kernel(I64, I64, variant=f"_{n}")
    def add(x):
        return x + ADDED * n
    return add
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    """A module with a kernel: written anew, as an update of the package would, and imported as a new process would."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(added: int) -> Callable[[int], Any]:
        (tmp_path / "adders.py").write_text(SOURCE.replace("ADDED", str(added)))
        linecache.clearcache()
        kernels._stamp.cache_clear()
        importlib.invalidate_caches()
        sys.modules.pop("adders", None)
        adder: Callable[[int], Any] = importlib.import_module("adders").adder
        return adder

    yield written
    sys.modules.pop("adders", None)


def between(monkeypatch: pytest.MonkeyPatch, method: str, other: Callable[[], object]) -> None:
    """What another process does just before this one's next call of that method."""
    plain = getattr(IndexDataCacheFile, method)

    def interrupted(self: IndexDataCacheFile, *arguments: Any) -> None:
        monkeypatch.setattr(IndexDataCacheFile, method, plain)
        other()
        plain(self, *arguments)

    monkeypatch.setattr(IndexDataCacheFile, method, interrupted)


def test_two_variants_compiled_at_a_time_are_not_taken_for_each_other(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba picks a file, writes the index and then the file: two that pick at one time pick the same."""
    adder = source(1)
    late: list[Callable[[], None]] = []
    save_data = IndexDataCacheFile._save_data

    def other() -> None:
        monkeypatch.setattr(IndexDataCacheFile, "_save_data", lambda *given: late.append(lambda: save_data(*given)))
        assert adder(2)(0) == 2
        monkeypatch.setattr(IndexDataCacheFile, "_save_data", save_data)

    between(monkeypatch, "_save_index", other)
    assert adder(1)(0) == 1
    late.pop()()
    assert (adder(1)(0), adder(2)(0)) == (1, 2)


def test_code_of_an_older_source_is_not_taken_for_the_new_one(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index says that it is fresh before the old file behind it is replaced."""
    assert source(1)(1)(0) == 1
    adder = source(10)
    seen: list[int] = []
    between(monkeypatch, "_save_data", lambda: seen.extend([adder(1)(0)]))
    assert adder(1)(0) == 10
    assert seen == [10]


def test_code_is_compiled_once(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    adder = source(1)
    saved: list[object] = []
    save_data = IndexDataCacheFile._save_data

    def counted(*given: Any) -> None:
        saved.append(given)
        save_data(*given)

    monkeypatch.setattr(IndexDataCacheFile, "_save_data", counted)
    assert [adder(n)(1) for n in (1, 2, 1, 2)] == [2, 3, 2, 3]
    assert len(saved) == 2


def other_processor(monkeypatch: pytest.MonkeyPatch, name: str, features: str) -> None:
    class Features:
        def flatten(self) -> str:
            return features

    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: name)
    monkeypatch.setattr(binding, "get_host_cpu_features", Features)
    kernels._stamp.cache_clear()


def test_hosts_of_other_processors_that_share_a_home_share_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that compiles at the other's moment loads instructions that it lacks."""
    stamps = {kernels._stamp(kernels.__file__)}
    for name, features in (("znver1", "+avx2"), ("skylake", "+avx2"), ("skylake", "+avx2,-sgx")):
        other_processor(monkeypatch, name, features)
        stamps |= {kernels._stamp(kernels.__file__)}
    monkeypatch.setattr(numba.config, "CPU_NAME", "x86-64")
    kernels._stamp.cache_clear()
    stamps |= {kernels._stamp(kernels.__file__)}
    assert len(stamps) == 5
    monkeypatch.undo()
    kernels._stamp.cache_clear()


def test_a_processor_of_which_no_features_are_known_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> None:
        raise RuntimeError("no host CPU features")

    monkeypatch.setattr(binding, "get_host_cpu_features", unknown)
    assert binding.get_host_cpu_name() in kernels._processor()


def test_each_network_has_files_of_its_own() -> None:
    sorts: list[Any] = [sorting._compiled(*network) for network in ((2, 0, 1), (3, 0, 2), (3, 1, 1))]
    assert len({sort.py_func.__qualname__ for sort in sorts}) == 3
