"""One peer of the benchmark's all-reduce, in a process of its own: a node's real data path, led over a pipe."""

from __future__ import annotations

import asyncio
import cProfile
import os
import resource
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import uvloop
from blake3 import blake3
from numpy.typing import NDArray

from aggregation import codec
from aggregation.digest import chunk_root, contribution_root, merkle_paths
from aggregation.exchange import Exchange, ExchangeEvent
from coordinator.rounds import policy
from node import memory
from node.exchanging import Exchanging
from node.fetching import Fetcher
from node.holding import NodeHolder
from node.peers.grpc import GrpcPeers
from node.peers.server import NodeServer
from node.results import ResultsArea, ResultsStore
from node.session.effects import BeginExchange, Verify
from node.stages import Stages
from node.training.shared import CodesArea, frame_sizes
from node.vectors import each_chunk
from node.whereabouts import Whereabouts
from protos.messages import Commitment, Missing, Range, Results, Signed
from protos.runspec import RunSpec
from protos.sealer import KeySealer, open_signed
from protos.signing import Identity
from tests.bench._allreduce_state import OuterState
from tests.bench._allreduce_words import (
    Agreed,
    Begin,
    Case,
    Close,
    Committed,
    Dealt,
    Done,
    Ended,
    Failed,
    Listening,
    Measure,
    Meet,
    Ready,
    Reported,
    Setup,
    Start,
)
from tests.bench._baselines import SAMPLED_EVERY, gaussian, relative_error

Floats = NDArray[np.float32]
W = TypeVar("W")

MEMORY_EVERY_S = 0.005
VECTORS = "vectors"
GROWTH = np.float32(1.001)
"""The values grow by it from turn to turn: results that were there already would not be fetched."""


def run(setup: Setup, pipe: Connection) -> None:
    """The process's main function."""
    if setup.group:
        Path(setup.group).write_text(str(os.getpid()))
    try:
        main = _Member(setup, pipe).live()
        if setup.loop == "uvloop":
            uvloop.run(main)
        else:
            asyncio.run(main)
    except EOFError:  # the leader is gone
        pass
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))
        raise


class _Member:
    def __init__(self, setup: Setup, pipe: Connection) -> None:
        self._setup, self._pipe = setup, pipe
        self._identity = Identity.from_private_bytes(setup.private_key)
        self._me = self._identity.peer
        self._sealer = KeySealer(self._identity, setup.run)
        self._n_threads = max(2, os.cpu_count() or 2)
        self._pool = ThreadPoolExecutor(self._n_threads, thread_name_prefix="bytes")
        self._stages = Stages()
        self._exchanging: Exchanging | None = None
        spec = setup.cases[0].spec
        self._grid = policy.grid(spec)
        self._folder = Path(setup.folder)
        sizes = frame_sizes(self._grid, spec.codec.name, spec.codec.block)
        self._results = ResultsStore(self._folder / "results", sizes, spec.codec.leaf_values, kept=2)
        self._codes_path = self._folder / "codes.0"
        CodesArea.create(self._codes_path, self._grid, spec.codec.name, spec.codec.block)
        self._codes = CodesArea(self._codes_path, self._grid, spec.codec.name, spec.codec.block, writable=True)
        self._row_bytes = sizes
        self._peers = GrpcPeers(setup.credentials, stages=self._stages)
        self._whereabouts = Whereabouts(setup.run, cast(Any, None))
        self._last_body = b""
        self._input_D, self._wanted = self._values_in_files() if setup.group else self._values()
        self._output_D = self._vector("output") if setup.group else np.zeros(self._grid.n_values, np.float32)
        self._state = OuterState(self._folder / VECTORS, self._grid, self._pool) if setup.outer else None

    def _values(self) -> tuple[Floats, Floats]:
        """This peer's input, and samples of the true mean."""
        setup, n_values = self._setup, self._grid.n_values
        mine = np.empty(0, np.float32)
        total = np.zeros(len(range(0, n_values, SAMPLED_EVERY)), np.float64)
        for rank in range(setup.n_peers):
            values_D = gaussian(setup.seed, rank, n_values)
            total += values_D[::SAMPLED_EVERY]
            if rank == setup.rank:
                mine = values_D
        return mine, (total / setup.n_peers).astype(np.float32)

    def _values_in_files(self) -> tuple[Floats, Floats]:
        """As `_values`, other numbers, and never more than a chunk of them in memory."""
        mine_D, wanted = self._vector("input"), list[Floats]()
        for chunk in range(self._grid.n_chunks):
            start, stop = self._grid.bounds(chunk)
            first = -start % SAMPLED_EVERY
            total = np.zeros(len(range(first, stop - start, SAMPLED_EVERY)), np.float64)
            for rank in range(self._setup.n_peers):
                rng = np.random.default_rng((self._setup.seed, rank, chunk))
                values_P = rng.standard_normal(stop - start, np.float32)
                total += values_P[first::SAMPLED_EVERY]
                if rank == self._setup.rank:
                    mine_D[start:stop] = values_P
            wanted.append((total / self._setup.n_peers).astype(np.float32))
        return mine_D, np.concatenate(wanted)

    def _vector(self, name: str) -> Floats:
        folder = self._folder / VECTORS
        folder.mkdir(exist_ok=True)
        return np.asarray(np.memmap(folder / name, np.float32, "w+", shape=(self._grid.n_values,)))

    async def live(self) -> None:
        nothing = cast(Any, None)
        holder = NodeHolder(nothing, self._results, nothing, nothing, lambda: self._exchanging, wait_s=1.0)
        server = NodeServer(
            self._setup.credentials,
            holder,
            allowed=lambda _: "",
            traffic=self._peers.traffic,
            stages=self._stages,
        )
        port = await server.start("127.0.0.1:0")
        self._pipe.send(Listening(self._me, f"127.0.0.1:{port}"))
        met = await self._hear(Meet)
        memory.settle()
        for peer, address in met.addresses.items():
            self._whereabouts.know(peer, (address,))
        while isinstance(word := await self._next(), Begin):
            self._input_D *= GROWTH
            self._wanted *= GROWTH
            self._pipe.send(Ready())
            start = await self._hear(Start)
            if self._setup.profile and self._setup.rank == 0:
                profile = cProfile.Profile()
                profile.enable()
                done = await self._turn(word, start.at)
                profile.disable()
                profile.dump_stats(self._folder.parent / "profile")
            else:
                done = await self._turn(word, start.at)
            self._pipe.send(done)
        await self._peers.close()
        await server.stop()
        self._results.close()
        self._pool.shutdown()

    # -- one all-reduce -------------------------------------------------------------------------------------------

    async def _turn(self, begin: Begin, start_at: float) -> Done:
        case = self._setup.cases[begin.case]
        before, private = self._stages.sums(), _PrivateMemory()
        watching = asyncio.create_task(private.watch() if begin.watched else asyncio.sleep(0))
        await asyncio.sleep(max(0.0, start_at - time.monotonic()))
        cpu_s, began = _cpu_s(), time.monotonic()
        marks: dict[str, float] = {}

        def mark(name: str) -> None:
            marks[name] = time.monotonic() - began

        commitment, paths = await self._contribution(case.spec, begin.plan_hash)
        mark("encoded")
        self._pipe.send(Committed(self._sealer.seal(commitment)))
        dealt = await self._hear(Dealt)
        mark("dealt")
        area = self._results.area(begin.plan_hash)
        results = await self._exchange(case, begin, dealt, paths, area)
        mark("combined")
        self._pipe.send(Reported(results))
        agreed = await self._hear(Agreed)
        mark("agreed")
        await self._fetch(case.spec, begin, dealt, agreed)
        mark("fetched")
        await self._decode(self._results.area(agreed.body_hash))
        mark("decoded")
        state_digest = await self._step(agreed)
        mark("stepped")
        ended_at, cpu_s = time.monotonic(), _cpu_s() - cpu_s
        self._pipe.send(Ended())
        await self._hear(Measure)
        watching.cancel()
        held_bytes = self._held_bytes()
        if self._exchanging is not None:
            await self._exchanging.close()
            self._exchanging = None
        self._last_body = agreed.body_hash
        return Done(
            ended_at, cpu_s, blake3(self._output_D.view(np.uint8).data).digest(),
            relative_error(self._output_D[::SAMPLED_EVERY], self._wanted), held_bytes, private.most_bytes, marks,
            self._stages.since(before), state_digest,
        )  # fmt: skip

    async def _contribution(self, spec: RunSpec, plan_hash: bytes) -> tuple[Commitment, tuple[tuple[bytes, ...], ...]]:
        """Encode, hash and measure, chunk by chunk while it is in the cache; the pool takes chunks side by side."""
        made = await self._each_chunk(partial(self._encode_chunk, spec))
        roots = [root for root, _ in made]
        commitment = Commitment(
            plan_hash, contribution_root(roots), tuple(norm for _, norm in made), 1, 16, (Range(self._setup.rank, 1),),
            0.1, 1.0,
        )  # fmt: skip
        return commitment, merkle_paths(roots)

    def _encode_chunk(self, spec: RunSpec, chunk: int) -> tuple[bytes, float]:
        start, stop = self._grid.bounds(chunk)
        frame = self._codes.frame(chunk)
        with self._stages.timed("encode", 4 * (stop - start)):
            codec.encode_into(spec.codec.name, self._input_D[start:stop], frame, block=spec.codec.block)
        with self._stages.timed("hash", frame.nbytes):
            norm_sq = codec.measure(frame, codec=spec.codec.name, block=spec.codec.block, n_values=stop - start)
            return chunk_root(frame, spec.codec.leaf_values), norm_sq

    async def _exchange(
        self, case: Case, begin: Begin, dealt: Dealt, paths: tuple[tuple[bytes, ...], ...], area: ResultsArea
    ) -> Results | None:
        weights = policy.weights(dealt.commitments, case.spec)
        deciding = Exchange(
            self._me, begin.plan_hash, 0, {str(peer): each.root for peer, each in dealt.commitments.items()},
            {str(peer): weight for peer, weight in weights.items()}, dealt.lines, self._row_bytes, case.replicas,
        )  # fmt: skip
        events: asyncio.Queue[ExchangeEvent | BaseException] = asyncio.Queue()
        told: asyncio.Future[Results | None] = asyncio.get_running_loop().create_future()
        if not any(self._me in line[: case.replicas] for line in dealt.lines):
            told.set_result(None)  # more members than chunks: nothing to combine here

        async def tell(message: Signed | Missing) -> None:
            if isinstance(message, Missing):
                raise RuntimeError(f"the leader is told that something is missing: {message}")
            told.set_result(
                cast(Results, open_signed(message.envelope, self._setup.run, signer=self._me, kind=Results).message)
            )

        self._exchanging = Exchanging(
            BeginExchange(begin.plan, begin.plan_hash, dealt.deal, dealt.envelope, dealt.commitments),
            self._me, case.spec, self._sealer, admit=deciding.admit, codes=self._codes, code_paths=paths, results=area,
            work=self._folder / "rows", pool=self._pool, peers=self._peers, where=self._whereabouts.addresses,
            happened=events.put_nowait, tell=tell, failed=events.put_nowait, seconds=time.monotonic,
            previous=self._results.area(self._last_body).frame if case.centred and self._last_body else None,
            stages=self._stages,
        )  # fmt: skip
        effects = deciding.begin()
        while True:
            for effect in effects:
                await self._exchanging.carry_out(effect)
            if told.done() and not deciding.unreceipted():
                return told.result()
            event = await events.get()
            if isinstance(event, BaseException):
                raise event
            effects = deciding.handle(event)

    async def _fetch(self, spec: RunSpec, begin: Begin, dealt: Dealt, agreed: Agreed) -> None:
        fetcher = Fetcher(
            self._me, spec, peers=self._peers, whereabouts=self._whereabouts, landmarks=cast(Any, None),
            store=cast(Any, SimpleNamespace(grid=self._grid)), results=self._results, pieces=cast(Any, None),
            pool=self._pool, say=lambda _: None, seconds=time.monotonic, open_commit=cast(Any, None),
        )  # fmt: skip
        holders = tuple(dealt.commitments)
        verify = Verify(
            self._setup.body, agreed.body_hash, agreed.hashes, dealt.lines, holders, plan_hash=begin.plan_hash
        )
        fault = await fetcher.results(verify)
        if fault:
            raise RuntimeError(f"the results can't be fetched: {fault}")

    async def _decode(self, area: ResultsArea) -> None:
        def decode(chunk: int) -> None:
            start, stop = self._grid.bounds(chunk)
            with self._stages.timed("decode", 4 * (stop - start)):
                codec.decode_into(area.frame(chunk), self._output_D[start:stop], checked=True)

        await self._each_chunk(decode)

    async def _step(self, agreed: Agreed) -> bytes:
        if self._state is None:
            return b""
        frame = self._results.area(agreed.body_hash).frame
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._state.step, agreed.body_hash, frame)

    # -- small things ---------------------------------------------------------------------------------------------

    async def _each_chunk(self, work: Callable[[int], W]) -> list[W]:
        """What the work gives for each chunk; threads take chunk after chunk, as a node's do."""
        loop, done = asyncio.get_running_loop(), dict[int, W]()

        def one(chunk: int) -> None:
            done[chunk] = work(chunk)

        chunks = range(self._grid.n_chunks)
        await loop.run_in_executor(self._pool, partial(each_chunk, chunks, one, self._pool, self._n_threads - 1))
        return [done[chunk] for chunk in chunks]

    def _held_bytes(self) -> int:
        """Room that encoded values take on disk now: rows, own codes and the results of this attempt."""
        return sum(
            512 * path.stat().st_blocks
            for path in self._folder.rglob("*")
            if path.is_file() and not {self._last_body.hex(), VECTORS} & set(path.parts)
        )

    async def _next(self) -> object:
        """The leader's next word."""
        loop = asyncio.get_running_loop()
        if not self._pipe.poll():
            ready = asyncio.Event()
            loop.add_reader(self._pipe.fileno(), ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(self._pipe.fileno())
                os.set_blocking(self._pipe.fileno(), True)  # uvloop took that away, and words may be long
        word: object = self._pipe.recv()
        return word

    async def _hear(self, kind: type[W]) -> W:
        word = await self._next()
        if isinstance(word, Close):
            raise EOFError
        if not isinstance(word, kind):
            raise RuntimeError(f"{type(word).__name__} where {kind.__name__} is due")
        return word


class _PrivateMemory:
    """How far this process's private memory rose above where it was."""

    def __init__(self) -> None:
        self._before = _private_bytes()
        self.most_bytes = 0

    async def watch(self) -> None:
        while True:
            self.most_bytes = max(self.most_bytes, _private_bytes() - self._before)
            await asyncio.sleep(MEMORY_EVERY_S)


def _private_bytes() -> int:
    """Resident anonymous memory; 0 where /proc doesn't tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("RssAnon")), "")
    return 1024 * int(line.split()[1]) if line else 0


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
