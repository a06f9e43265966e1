"""A contribution read while it is written: the same as one read at the end, and refused where reducers would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregation import codec
from aggregation.digest import chunk_root, contribution_root, contribution_root_from_path
from aggregation.errors import CodecError
from coordinator.rounds import policy
from node import encoding
from node.encoding import Reading, make_area, read_contribution
from node.training.shared import CodesArea
from protos.runspec import RunSpec
from tests.coordinator.made import spec

SPEC: RunSpec = spec("codec.chunk_values=2048", "codec.leaf_values=1024", "codec.block=64")
GRID = policy.grid(SPEC)


class LaterPool:
    """Work is done when the test says so."""

    def __init__(self) -> None:
        self.work: list[tuple[Future[Any], Callable[..., Any]]] = []

    def submit(self, work: Callable[..., Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.work.append((future, work))
        return future

    def go_on(self) -> None:
        while self.work:
            future, work = self.work.pop(0)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_area(tmp_path / "codes.0", SPEC)
    return tmp_path / "codes.0"


def write(path: Path, *chunks: int) -> None:
    area = CodesArea(path, GRID, SPEC.codec.name, SPEC.codec.block, writable=True)
    for chunk in chunks or range(GRID.n_chunks):
        values_P = np.random.default_rng(chunk).standard_normal(GRID.size(chunk)).astype(np.float32)
        codec.encode_into(SPEC.codec.name, values_P, area.frame(chunk), block=SPEC.codec.block)


def test_the_commitment_is_to_what_lies_there(path: Path) -> None:
    write(path)
    found = read_contribution(path, SPEC)
    frames = [found.area.frame(chunk).tobytes() for chunk in range(GRID.n_chunks)]
    roots = [chunk_root(frame, SPEC.codec.leaf_values) for frame in frames]
    assert len(frames) > 2
    assert found.root == contribution_root(roots)
    assert found.norms == tuple(codec.squared_norm(frame) for frame in frames)
    for chunk, (root, merkle_path) in enumerate(zip(roots, found.paths, strict=True)):
        assert contribution_root_from_path(root, chunk, GRID.n_chunks, merkle_path) == found.root


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("parallel_bytes", [0, 2**30])
def test_read_in_pieces_it_is_the_same(
    path: Path, n_threads: int, parallel_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "PARALLEL_BYTES", parallel_bytes)

    async def main() -> None:
        with ThreadPoolExecutor(n_threads) as pool:
            reading = Reading(path, SPEC, pool)
            for chunk in range(GRID.n_chunks):
                write(path, chunk)
                reading.written(chunk + 1)
            async with asyncio.timeout(60):
                found = await reading.contribution()
        wanted = read_contribution(path, SPEC)
        assert (found.root, found.norms, found.paths) == (wanted.root, wanted.norms, wanted.paths)

    asyncio.run(main())


def test_no_chunk_is_read_before_it_is_written(path: Path) -> None:
    async def main() -> None:
        pool = LaterPool()
        reading = Reading(path, SPEC, pool)  # type: ignore[arg-type]
        write(path, 0)
        reading.written(1)
        assert len(pool.work) == 1
        pool.go_on()  # the chunks behind it are zeros, which are no frame
        reading.written(0)
        assert not pool.work
        write(path)
        whole = asyncio.create_task(reading.contribution())
        await asyncio.sleep(0)
        assert len(pool.work) == min(encoding.READERS, GRID.n_chunks - 1)
        pool.go_on()
        assert (await whole).root == read_contribution(path, SPEC).root

    asyncio.run(main())


def test_a_frame_that_reducers_would_refuse_is_a_fault(path: Path) -> None:
    write(path)
    frame = CodesArea(path, GRID, SPEC.codec.name, SPEC.codec.block, writable=True).frame(1)
    frame[codec.HEADER_BYTES : codec.HEADER_BYTES + 4] = 255

    async def main() -> None:
        with ThreadPoolExecutor(2) as pool:
            async with asyncio.timeout(60):
                await Reading(path, SPEC, pool).contribution()

    with pytest.raises(CodecError):
        read_contribution(path, SPEC)
    with pytest.raises(CodecError):
        asyncio.run(main())
