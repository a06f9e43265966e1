"""Fetching a round's results by their hashes, from whoever holds them, and keeping what is whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from aggregation import codec
from aggregation.digest import chunk_root, tagged_hash
from aggregation.errors import CodecError
from coordinator.rounds import policy
from node.ports import PeerFailed, Peers
from node.results import ResultsArea, ResultsStore
from node.session.effects import Verify
from node.whereabouts import Whereabouts
from protos.messages import PeerId
from protos.runspec import RunSpec

AVOIDED_S = 60.0
"""So long who could not be reached, or gave nothing, is asked after all others."""


class Lacks:
    """Which results peers have said that they don't hold: they are not asked for them again."""

    def __init__(self) -> None:
        self._of: dict[PeerId, dict[bytes, None]] = {}

    def note(self, peer: PeerId, hashes: Sequence[bytes]) -> None:
        self._of.setdefault(peer, {}).update(dict.fromkeys(hashes))

    def __contains__(self, asked: tuple[PeerId, bytes]) -> bool:
        peer, hash_ = asked
        return hash_ in self._of.get(peer, {})


class Gatherer:
    """Gathers results for one member.

    Args:
        me: this member, who is never asked.
        pool: where results are checked and kept.
        lied: told of who sent something else than it said, and what.
        seconds: a clock.
    """

    def __init__(
        self,
        me: PeerId,
        spec: RunSpec,
        *,
        peers: Peers,
        whereabouts: Whereabouts,
        results: ResultsStore,
        pool: Executor,
        lied: Callable[[PeerId, str], None],
        seconds: Callable[[], float],
    ) -> None:
        self._me, self._spec, self._seconds = me, spec, seconds
        self._patience_s = spec.deadlines.no_progress_s
        self._failed: dict[PeerId, float] = {}  # when
        self._peers, self._whereabouts, self._results, self._pool, self._lied = peers, whereabouts, results, pool, lied
        self._codec = codec.result_codec(spec.codec.name)
        self._turn = int.from_bytes(tagged_hash("turn", me.encode())[:4])

    async def one_pass(
        self, area: ResultsArea, verify: Verify, missing: Sequence[int], lacks: Lacks, *, exchange: bool
    ) -> str:
        """Ask one source after the other for what is missing; the last failure, or an empty string if all is here.

        Holders are asked in an order of their own for each chunk, so that they share the work, and a chunk whose source
        has failed goes on to its next one whatever the other chunks wait for. Beside a source that has not given all in
        `no_progress_s` the next one is asked too, once: the line may be slow, or the source hold everybody up.
        """
        line = self._line(verify)
        sources = {chunk: iter(line(chunk)) for chunk in missing}
        faults: list[str] = []

        def still(chunks: Sequence[int]) -> list[int]:
            lacking = dict.fromkeys(area.missing(verify.result_hashes))
            return [chunk for chunk in chunks if chunk in lacking]

        async def ask(chunks: Sequence[int], *, beside: bool = False) -> None:
            asked: dict[PeerId, list[int]] = {}
            for chunk in chunks:
                hash_ = verify.result_hashes[chunk]
                peer = next((peer for peer in sources[chunk] if (peer, hash_) not in lacks), None)
                if peer is not None:
                    asked.setdefault(peer, []).append(chunk)
            await asyncio.gather(*(ask_one(peer, its, beside) for peer, its in sorted(asked.items())))

        async def ask_one(peer: PeerId, chunks: list[int], beside: bool) -> None:
            asking = asyncio.create_task(self._from(peer, area, verify, chunks, lacks, exchange))
            running: list[asyncio.Task[Any]] = [asking]
            try:
                await asyncio.wait(running, timeout=None if beside else self._patience_s)
                if not asking.done():
                    running.append(asyncio.create_task(ask(still(chunks), beside=True)))
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    if not asking.done() and not still(chunks):
                        self._failed[peer] = self._seconds()
                        return
                if fault := await asking:
                    faults.append(fault)
                    for other in running[1:]:
                        await other
                    await ask(still(chunks), beside=beside)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

        await ask(missing)
        if not area.missing(verify.result_hashes):
            return ""
        return faults[-1] if faults else "nobody who could hold the results is known"

    def nobody_left(self, verify: Verify, missing: Sequence[int], lacks: Lacks) -> bool:
        """Whether all who might have had something of this have said that they don't."""
        line = self._line(verify)
        return any(all((peer, verify.result_hashes[chunk]) in lacks for peer in line(chunk)) for chunk in missing)

    def _line(self, verify: Verify) -> Callable[[int], Sequence[PeerId]]:
        """Per chunk whom to ask, in order: its reducers, then who may hold it, from another one on for each chunk.

        Who is known to be somewhere goes before those that the DHT would have to be asked for, and both before who
        failed lately: each round of a long absence is asked for anew, and would pay for them again.
        """
        now_s = self._seconds()
        self._failed = {peer: at_s for peer, at_s in self._failed.items() if now_s - at_s < AVOIDED_S}
        holders = tuple(peer for peer in dict.fromkeys(verify.holders) if peer != self._me)
        turned = [(*holders[turn:], *holders[:turn]) for turn in range(len(holders))] or [()]

        def last(peer: PeerId) -> tuple[bool, bool]:
            return peer in self._failed, self._whereabouts.of(peer) is None

        def line(chunk: int) -> Sequence[PeerId]:
            reducers = verify.reducers[chunk] if chunk < len(verify.reducers) else ()
            others = turned[(self._turn + chunk) % len(turned)]
            return sorted((peer for peer in dict.fromkeys((*reducers, *others)) if peer != self._me), key=last)

        return line

    async def _from(
        self, peer: PeerId, area: ResultsArea, verify: Verify, chunks: list[int], lacks: Lacks, exchange: bool
    ) -> str:
        wanted: dict[bytes, list[int]] = {}
        for chunk in chunks:
            wanted.setdefault(verify.result_hashes[chunk], []).append(chunk)
        max_bytes = codec.frame_bytes(self._codec, self._spec.codec.chunk_values, self._spec.codec.block)

        loop = asyncio.get_running_loop()

        async def sink(hash_: bytes, data: bytes) -> None:
            if not await loop.run_in_executor(self._pool, self._keep, area, hash_, data, wanted.get(hash_, [])):
                why = "it sent a result that is not canonical or doesn't have its hash"
                lacks.note(peer, list(wanted))
                self._lied(peer, why)
                raise PeerFailed(peer, why)

        try:
            addresses = await self._whereabouts.addresses(peer)
            missing = await self._peers.fetch(
                peer, addresses, "result", list(wanted), max_bytes, sink, exchange=exchange
            )
        except PeerFailed as error:
            self._failed[peer] = self._seconds()
            return f"{peer[-6:]}: {error.why}"
        self._failed.pop(peer, None)
        lacks.note(peer, missing)
        return f"{peer[-6:]}: {len(missing)} results are not there" if missing else ""

    def _keep(self, area: ResultsArea, hash_: bytes, data: bytes, chunks: list[int]) -> bool:
        grid, spec = policy.grid(self._spec), self._spec.codec
        try:
            for chunk in chunks:
                codec.check(
                    data,
                    codec=self._codec,
                    block=spec.block,
                    n_values=grid.size(chunk),
                    scale_cap=codec.RESULT_SCALE_CAP,
                )
                if chunk_root(data, spec.leaf_values) != hash_:
                    return False
                area.put(chunk, data, hash_)
        except (CodecError, ValueError):
            return False
        return bool(chunks)

    def take_local(self, area: ResultsArea, verify: Verify) -> list[int]:
        """Copy what this node combined itself; what is still missing after that."""
        for chunk in area.missing(verify.result_hashes):
            frame = self._results.find(verify.result_hashes[chunk])
            if frame is not None:
                area.put(chunk, frame, verify.result_hashes[chunk])
        return area.missing(verify.result_hashes)
