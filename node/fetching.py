"""What this node fetches from others for its session: results of a round, the whole state, pieces of data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace

from aggregation import codec, rules
from aggregation.digest import chunk_root
from aggregation.errors import CodecError
from coordinator.rounds import policy
from coordinator.rounds.ledger import Ledger
from node.blocks import PieceStore
from node.centre import HeadResults
from node.donors import StateUnavailable, fetch_state
from node.errors import NodeError
from node.landmarks import Landmarks
from node.ports import PeerFailed, Peers
from node.results import ResultsArea, ResultsStore
from node.session.events import Verify
from node.state import StateStore
from node.whereabouts import Whereabouts
from protos.hashes import commit_hash
from protos.messages import Body, Commit, PeerId, Range
from protos.runspec import RunSpec

AGAIN_S = 0.2
DATA_AGAIN_FIRST_S = 0.5
DATA_AGAIN_MAX_S = 15.0
HEADS_KEPT = 16


class Fetcher:
    """Fetches for one member. Everything that comes is verified by hash before it is kept.

    Args:
        me: this member, who is never asked.
        say: takes what a contributor would want to read.
    """

    def __init__(
        self,
        me: PeerId,
        spec: RunSpec,
        *,
        peers: Peers,
        whereabouts: Whereabouts,
        landmarks: Landmarks,
        store: StateStore,
        results: ResultsStore,
        pieces: PieceStore,
        pool: Executor,
        say: Callable[[str], None],
        seconds: Callable[[], float],
    ) -> None:
        self._me, self._spec = me, spec
        self._peers, self._whereabouts, self._landmarks = peers, whereabouts, landmarks
        self._store, self._results, self._pieces, self._pool = store, results, pieces, pool
        self._say, self._seconds = say, seconds
        self._heads: dict[bytes, Body] = {}
        self._result_codec = codec.result_codec(spec.codec.name)

    # -- the state --------------------------------------------------------------------------------------------

    def told(self, commit: Commit, body: Body) -> None:
        """The leader has named this commit on its line: a state after it may be taken from anybody."""
        self._heads[commit_hash(commit.body, commit.digest)] = body
        while len(self._heads) > HEADS_KEPT:
            del self._heads[next(iter(self._heads))]

    async def state(self, commit: Commit, body: Body) -> Ledger | str:
        """The ledger of the state that is now held, or why none could be fetched."""
        self.told(commit, body)
        try:
            donors = await self._landmarks.find_donors(body.voters)
            ledger = await fetch_state(self._peers, donors, self._store, self._verify_commit)
        except (StateUnavailable, NodeError) as error:
            return str(error)
        await self.centre()
        return ledger

    def _verify_commit(self, commit: Commit) -> Body:
        body = self._heads.get(commit_hash(commit.body, commit.digest))
        if body is None:
            raise ValueError("its head is none that the leader has named lately")
        return body

    async def centre(self) -> None:
        """Have the results that the next round's rule starts from, of the held state's commit, where it takes any.

        Each donor is asked once, all within `vote_s`. Without them this node is a member like any other, but combines
        nothing this round.
        """
        head = await asyncio.to_thread(HeadResults.of, self._store.current)
        if head is None or not rules.is_centred(self._spec.rule.name):
            return
        try:
            async with asyncio.timeout(self._spec.deadlines.vote_s):  # a donor may let them trickle
                fault = await self._have(head)
        except TimeoutError:
            fault = f"that took more than {self._spec.deadlines.vote_s:g} s"
        except NodeError as error:  # no room on the disk, say
            fault = str(error)
        if fault:
            self._say(f"the results of round {head.body.round} could not be fetched: {fault}; going on without them")

    async def _have(self, head: HeadResults) -> str:
        if not head.hashes:
            return "its commit came without their hashes"
        wanted = Verify(head.body, head.body_hash, head.hashes, (), ())
        area = await asyncio.to_thread(self._results.area, head.body_hash)
        await asyncio.to_thread(_forget_broken, area, len(head.hashes))
        missing = await asyncio.to_thread(self._take_local, area, wanted)
        if not missing:
            return ""
        donors = [peer for peer, _ in await self._landmarks.find_donors(head.body.voters)]
        lines = tuple((*donors[turn:], *donors[:turn]) for turn in range(len(donors)))
        shared = tuple(lines[chunk % len(lines)] for chunk in range(len(head.hashes))) if lines else ()
        return await self._one_pass(area, replace(wanted, reducers=shared), missing, exchange=False)

    # -- results ----------------------------------------------------------------------------------------------

    async def results(self, verify: Verify) -> str:
        """Have all results of a body in its area; why that failed, or an empty string.

        Each chunk is asked for at its reducer first, then at the next in line and at whoever may hold it. What nobody
        has any more is given up as soon as its reducer would be: only an attempt without it can replace it.
        """
        if not verify.result_hashes:
            return ""
        # What this node combined in the attempt becomes part of the body's results.
        area = await asyncio.to_thread(self._results.rekey, verify.plan_hash, verify.body_hash)
        deadlines = self._spec.deadlines
        began_s = came_s = self._seconds()
        fault, n_missing = "", len(verify.result_hashes)
        while missing := await asyncio.to_thread(self._take_local, area, verify):
            now_s = self._seconds()
            if len(missing) < n_missing:
                came_s, n_missing = now_s, len(missing)
            if fault and now_s > min(began_s + deadlines.vote_s, came_s + deadlines.gone_grace_s):
                return f"{_named(verify, missing[0])} is not to be had: {fault}"
            fault = await self._one_pass(area, verify, missing)
            if fault:
                await asyncio.sleep(AGAIN_S)
        return ""

    async def _one_pass(self, area: ResultsArea, verify: Verify, missing: list[int], *, exchange: bool = True) -> str:
        """Ask each source in turn for what is still missing; the last failure, or an empty string if all is here."""
        left = dict.fromkeys(missing)
        faults: list[str] = []
        n_sources = max(len(self._sources(verify, chunk)) for chunk in missing)
        for turn in range(n_sources):
            asked: dict[PeerId, list[int]] = {}
            for chunk in left:
                sources = self._sources(verify, chunk)
                if turn < len(sources):
                    asked.setdefault(sources[turn], []).append(chunk)
            outcomes = await asyncio.gather(
                *(self._from(peer, area, verify, chunks, exchange) for peer, chunks in sorted(asked.items()))
            )
            faults += [outcome for outcome in outcomes if outcome]
            left = dict.fromkeys(area.missing(verify.result_hashes))
            if not left:
                return ""
        return faults[-1] if faults else "nobody who could hold the results is known"

    def _sources(self, verify: Verify, chunk: int) -> list[PeerId]:
        line = verify.reducers[chunk] if chunk < len(verify.reducers) else ()
        return [peer for peer in dict.fromkeys((*line, *verify.holders)) if peer != self._me]

    async def _from(self, peer: PeerId, area: ResultsArea, verify: Verify, chunks: list[int], exchange: bool) -> str:
        wanted: dict[bytes, list[int]] = {}
        for chunk in chunks:
            wanted.setdefault(verify.result_hashes[chunk], []).append(chunk)
        max_bytes = codec.frame_bytes(self._result_codec, self._spec.codec.chunk_values, self._spec.codec.block)

        async def sink(hash_: bytes, data: bytes) -> None:
            if not await asyncio.to_thread(self._keep, area, hash_, data, wanted.get(hash_, [])):
                raise PeerFailed(peer, "it sent a result that is not canonical or doesn't have its hash")

        try:
            addresses = await self._whereabouts.addresses(peer)
            missing = await self._peers.fetch(
                peer, addresses, "result", list(wanted), max_bytes, sink, exchange=exchange
            )
        except PeerFailed as error:
            return f"{peer[-6:]}: {error.why}"
        return f"{peer[-6:]}: {len(missing)} results are not there" if missing else ""

    def _keep(self, area: ResultsArea, hash_: bytes, data: bytes, chunks: list[int]) -> bool:
        grid, spec = policy.grid(self._spec), self._spec.codec
        try:
            for chunk in chunks:
                codec.check(
                    data,
                    codec=self._result_codec,
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

    def _take_local(self, area: ResultsArea, verify: Verify) -> list[int]:
        """Copy what this node combined itself; what is still missing after that."""
        for chunk in area.missing(verify.result_hashes):
            frame = self._results.find(verify.result_hashes[chunk])
            if frame is not None:
                area.put(chunk, frame, verify.result_hashes[chunk])
        return area.missing(verify.result_hashes)

    def frames(self, verify: Verify) -> Callable[[int], memoryview]:
        """Gives each chunk's result, once `results` has them all.

        The norm that its reducers signed is compared there with the frame's own: the limit of a result's length and the
        clip factor were reckoned with it. CodecError for another one, KeyError where nothing is (any more).
        """
        if not verify.result_hashes:
            return _no_frame
        area = self._results.area(verify.body_hash)

        def frame(chunk: int) -> memoryview:
            found = area.frame(chunk)
            if verify.norms and codec.squared_norm(found) != verify.norms[chunk]:
                raise CodecError(f"{_named(verify, chunk)} has another norm than was signed")
            return found

        return frame

    # -- data -------------------------------------------------------------------------------------------------

    async def data(self, ranges: Sequence[Range]) -> None:
        """Have the pieces of these batches on disk; tries again for as long as it takes, and says what it waits for."""
        pause_s = DATA_AGAIN_FIRST_S
        while True:
            try:
                await self._pieces.ensure(ranges)
                return
            except (PeerFailed, NodeError) as error:
                self._say(f"waiting for training data: {error}; trying again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, DATA_AGAIN_MAX_S)


def _named(verify: Verify, chunk: int) -> str:
    """A result and, whole, who signed it: whoever leads leaves it out of the next attempt."""
    line = verify.reducers[chunk] if chunk < len(verify.reducers) else ()
    return f"the result of chunk {chunk}" + (f" by {line[0]}" if line else "")


def _forget_broken(area: ResultsArea, n_chunks: int) -> None:
    """Find out what of an earlier process's results isn't whole, after a power cut say, so that it is missing."""
    for chunk in range(n_chunks):
        with suppress(KeyError):
            area.frame(chunk)


def _no_frame(chunk: int) -> memoryview:
    raise KeyError(chunk)  # an empty round has no results
