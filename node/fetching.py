"""What this node fetches from others for its session: results of a round, commits, the whole state, pieces of data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace

from aggregation import codec, rules
from aggregation.errors import CodecError
from coordinator.rounds.ledger import Ledger
from node.blocks import PieceStore
from node.centre import HeadResults
from node.donors import Ancestry, Donor, StateUnavailable, Wish, spread
from node.errors import DiskFull, NodeError
from node.gathering import Gatherer, Lacks
from node.landmarks import Landmarks
from node.pace import Pace
from node.ports import PeerFailed, Peers
from node.results import ResultsArea, ResultsStore
from node.session import effects as fx
from node.session import events as ev
from node.session.effects import Verify
from node.state import StateStore
from node.training.shared import frame_sizes
from node.transfer import Manners, StateMoves, fetch_state
from node.whereabouts import Whereabouts
from protos import limits, wire
from protos.hashes import commit_hash
from protos.messages import Body, Commit, Outcome, PeerId, Range
from protos.runspec import RunSpec

AGAIN_S = 0.2
DATA_AGAIN_FIRST_S = 0.5
DATA_AGAIN_MAX_S = 15.0
HEADS_KEPT = 4096
LIAR_S = 300.0
"""So long a peer that sent something else than it said is not asked for states or commits."""
MOVES_SHARE = 0.5
"""Donors drop a state at the second commit after it: with less than this at the first one, the rest won't come."""


class Fetcher:
    """Fetches for one member. Everything that comes is verified by hash before it is kept.

    Args:
        me: this member, who is never asked.
        say: takes what a contributor would want to read.
        open_commit: makes a CommitHeard of a commit: its votes with valid signatures, unweighed. Raises ValueError.
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
        open_commit: Callable[[Commit], ev.Event],
    ) -> None:
        self._me, self._spec = me, spec
        self._peers, self._landmarks, self._open_commit = peers, landmarks, open_commit
        self._store, self._results, self._pieces, self._pool = store, results, pieces, pool
        self._say, self._seconds = say, seconds
        self._heads = Ancestry(HEADS_KEPT)
        self._pace = Pace()
        self._liars: dict[PeerId, float] = {}  # until when
        self._moves = False
        sizes = frame_sizes(store.grid, codec.result_codec(spec.codec.name), spec.codec.block)
        self._round_bytes = sum(sizes)
        self._gatherer = Gatherer(
            me, spec, peers=peers, whereabouts=whereabouts, results=results, pool=pool, lied=self._lied,
            seconds=seconds,
        )  # fmt: skip

    def amend(self, spec: RunSpec) -> None:
        """Other settings are in force."""
        self._spec = spec

    # -- the state --------------------------------------------------------------------------------------------

    def told(self, commit: Commit, body: Body) -> None:
        """The leader has named this commit on its line: a state after it may be taken from anybody."""
        if body.round > self._heads.newest_round and body.outcome is Outcome.COMMITTED:
            self._pace.heard(self._seconds())
        self._heads.told(commit_hash(commit.body, commit.digest), body)

    async def state(self, asked: fx.FetchState) -> Ledger | str:
        """The ledger of the state that is now held, or why none could be fetched."""
        if asked.anew:
            self._heads = Ancestry(HEADS_KEPT)  # what led to the branch that was held leads nowhere now
        self.told(asked.commit, asked.body)
        traffic, began_s = self._peers.traffic, self._seconds()
        n_before = traffic.received
        try:
            donors = await self._donors(asked.body.voters)
            ledger = await self._fetch_state(donors, Wish(asked.newer_than, self._moves, least=asked.body.round))
        except DiskFull as error:
            dropped = await asyncio.to_thread(self._relieve)
            return f"{error}; what is kept for others was dropped" if dropped else str(error)
        except (StateUnavailable, NodeError) as error:
            return str(error)
        rate_bytes_s = (traffic.received - n_before) / max(self._seconds() - began_s, 1e-3)
        n_behind = self._heads.newest_round - ledger.round
        if outlook := self._pace.outlook(rate_bytes_s, round_bytes=self._round_bytes, n_behind=n_behind):
            self._say(outlook)
        await self.centre()
        return ledger

    async def _fetch_state(self, donors: Sequence[Donor], wish: Wish) -> Ledger:
        """The current state as a rule; the frozen snapshot once it has shown that the current one moves too fast."""
        began_round = self._heads.newest_round

        def moves(share: float) -> bool:
            n_since = self._heads.newest_round - began_round
            return not wish.frozen and (n_since > 1 or (n_since == 1 and share < MOVES_SHARE))

        manners = Manners(
            moves=moves, lied=self._lied, patience_s=self._spec.deadlines.no_progress_s / 4, progress=self._progress
        )
        try:
            return await fetch_state(self._peers, donors, self._store, self._verify_commit, wish, manners)
        except StateMoves:
            self._moves = True
            self._say("the state moves on faster than it comes here: taking a snapshot and the results since")
            wish = replace(wish, frozen=True)
            return await fetch_state(self._peers, donors, self._store, self._verify_commit, wish, manners)

    def _progress(self, n_done: int, n_chunks: int) -> None:
        self.share_fetched = n_done / n_chunks

    share_fetched = 0.0
    """How much of the state that is fetched now, or was last, is here."""

    async def _donors(self, members: Sequence[PeerId]) -> list[Donor]:
        """Whom to ask, in this node's own order; not those who have lied lately."""
        now_s = self._seconds()
        self._liars = {peer: until_s for peer, until_s in self._liars.items() if until_s > now_s}
        found = await self._landmarks.find_donors(members)
        return spread(self._me, [donor for donor in found if donor[0] not in self._liars])

    def _lied(self, peer: PeerId, why: str) -> None:
        if peer not in self._liars:
            self._say(f"{peer} is not asked any more for {LIAR_S:g} s: {why}")
        self._liars[peer] = self._seconds() + LIAR_S

    async def _verify_commit(self, peer: PeerId, addresses: Sequence[str], commit: Commit) -> Body:
        """The body of a commit that the leader has named, or from which the donor shows the way to such a one."""
        head = commit_hash(commit.body, commit.digest)
        body = wire.decode(Body, commit.body)
        if head not in self._heads and body.round < self._heads.newest_round:
            later = await self._peers.commits_after(peer, addresses, body.epoch, body.round, limits.COMMITS)
            await asyncio.to_thread(self._heads.learn, later)
        if head not in self._heads:
            raise ValueError("its head is none that the leader has named lately, and leads to none")
        return body

    # -- the chain --------------------------------------------------------------------------------------------

    async def commits(self, asked: fx.FetchCommits) -> ev.CommitsFetched | ev.CommitsFetchFailed:
        """The commits from a held state on, up to the newest one or as far as a donor goes with them."""
        self.told(asked.newest.commit, asked.newest.body)
        donors = await self._donors(asked.newest.body.voters)
        turn = asked.n_tries % len(donors) if donors else 0
        said: list[str] = []
        best: list[Commit] = []
        n_answers = 0
        for peer, addresses in (*donors[turn:], *donors[:turn]):
            try:
                found = await self._peers.commits_after(peer, addresses, asked.epoch, asked.round, limits.COMMITS)
                n_answers += 1
                row = await asyncio.to_thread(_linked, found, asked.head)
            except (PeerFailed, ValueError) as error:
                said.append(f"{peer[-6:]}: {error.why if isinstance(error, PeerFailed) else error}")
                continue
            while row and commit_hash(row[-1].body, row[-1].digest) not in self._heads:
                row.pop()  # of a branch that nobody follows, or newer than what the leader has told
            if not row:
                said.append(f"{peer[-6:]}: its commits lead to no head that the leader has named")
            best = max(best, row, key=len)
            ends = (asked.newest.commit_hash, asked.newest.body.previous)
            if best and commit_hash(best[-1].body, best[-1].digest) in ends:
                break
        if not best:
            why = "; ".join(said) or "nobody has the commits since"
            return ev.CommitsFetchFailed(why, gone=n_answers > 0 and n_answers == len(donors))
        try:
            opened = await asyncio.to_thread(lambda: [self._open_commit(commit) for commit in best])
        except ValueError as error:
            return ev.CommitsFetchFailed(f"a commit of theirs doesn't hold: {error}", gone=False)
        return ev.CommitsFetched(tuple(event for event in opened if isinstance(event, ev.CommitHeard)))

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
        missing = await asyncio.to_thread(self._gatherer.take_local, area, wanted)
        if not missing:
            return ""
        donors = tuple(peer for peer, _ in await self._donors(head.body.voters))
        return await self._gatherer.one_pass(area, replace(wanted, holders=donors), missing, Lacks(), exchange=False)

    # -- results ----------------------------------------------------------------------------------------------

    async def results(self, verify: Verify) -> str:
        """Have all results of a body in its area; why that failed, or an empty string.

        Each chunk is asked for at its reducer first, then at the next in line and at whoever may hold it. What nobody
        has any more is given up as soon as its reducer would be: only an attempt without it can replace it. Those of an
        earlier round are asked for at all who may hold them, and given up when everybody has said no, or nothing has
        come for a while.
        """
        if not verify.result_hashes:
            return ""
        while True:
            try:
                return await self._gather(verify)
            except DiskFull:
                if not await asyncio.to_thread(self._relieve):
                    raise

    async def _gather(self, verify: Verify) -> str:
        # What this node combined in the attempt becomes part of the body's results.
        area = await asyncio.to_thread(self._results.rekey, verify.plan_hash, verify.body_hash)
        deadlines = self._spec.deadlines
        lacks = Lacks()
        if verify.replay:
            donors = tuple(peer for peer, _ in await self._donors(verify.holders))
            verify = replace(verify, holders=tuple(dict.fromkeys((*donors, *verify.holders))))
        began_s = came_s = self._seconds()
        fault, n_missing, n_bytes = "", len(verify.result_hashes), self._peers.traffic.received
        while missing := await asyncio.to_thread(self._gatherer.take_local, area, verify):
            now_s = self._seconds()
            if len(missing) < n_missing:
                came_s, n_missing = now_s, len(missing)
            if fault and self._given_up(verify, missing, lacks, now_s - began_s, now_s - came_s):
                return f"{_named(verify, missing[0])} is not to be had: {fault}"
            if not verify.replay:  # who has not got it yet may have it the next time
                lacks = Lacks()
            fault = await self._gatherer.one_pass(area, verify, missing, lacks, exchange=True)
            if fault:
                await asyncio.sleep(min(AGAIN_S, deadlines.no_progress_s / 10))
        if verify.replay:
            self._pace.fetched(self._peers.traffic.received - n_bytes, self._seconds() - began_s)
            if verdict := self._pace.verdict():
                self._say(verdict)
        return ""

    def _given_up(self, verify: Verify, missing: list[int], lacks: Lacks, since_s: float, quiet_s: float) -> bool:
        deadlines = self._spec.deadlines
        if verify.replay:
            return self._gatherer.nobody_left(verify, missing, lacks) or quiet_s > deadlines.no_progress_s
        return since_s > deadlines.vote_s or quiet_s > deadlines.gone_grace_s

    def _relieve(self) -> bool:
        """Make room on a full disk by what is kept for others alone."""
        return self._results.relieve() or self._store.relieve()

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


def _linked(commits: Sequence[Commit], head: bytes) -> list[Commit]:
    """As many of the first commits as follow from a head, each from the one before. Raises ValueError if none does."""
    row: list[Commit] = []
    for commit in commits:
        if wire.decode(Body, commit.body).previous != head:
            break
        row.append(commit)
        head = commit_hash(commit.body, commit.digest)
    if not row:
        raise ValueError("it has no commits since")
    return row


def _no_frame(chunk: int) -> memoryview:
    raise KeyError(chunk)  # an empty round has no results
