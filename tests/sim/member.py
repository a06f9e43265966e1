"""A member's process, or the observer's: `Session` with the parts of a driver, a trainer, and a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from node.session import effects as fx
from node.session import events as ev
from protos import limits
from protos.hashes import body_hash
from protos.messages import Body, Commit, Hello, Leave, PeerId, Promise, Record, Signed, Vote, Welcome
from tests.sim.chain import Violated, check_record
from tests.sim.disk import digest_after
from tests.sim.network import TO_LEADER, Line
from tests.sim.opening import opened
from tests.sim.rows import SEND_AGAIN_S, Rows, always
from tests.sim.training import Trainer

if TYPE_CHECKING:
    from tests.sim.leader import LeaderProcess
    from tests.sim.standing_in import StandIn
    from tests.sim.world import World

RECONNECT_S = 0.5
WELCOME_S = 4.0
FETCH_TRIES = 4
VALUE_BYTES = 8
"""Of θ and momentum, which a state is made of."""


class MemberProcess(Rows):
    def __init__(self, world: World, name: PeerId, number: int, *, observer: bool) -> None:
        super().__init__(world, name, number, observer=observer)
        self.lines: dict[PeerId, Line] = {}
        self.followed: tuple[PeerId, ...] = ()
        self.stopped: fx.Stop | None = None
        self._downloads: dict[bytes, list[fx.Verify]] = {}  # results on their way, and what waits for them
        self.said: list[str] = []
        self.data_until = 0.0
        """Till then its data do not come."""
        self._record = Record(name, 1, ("here:1",) if self.reachable else (), (), 0, 0, b"")
        self._restored: dict[bytes, None] = {}  # hashes of bodies whose state to go back to stands beside the held one

    # -- life -------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        self.lines, self.trainer, self.stopped, self.followed = {}, Trainer(), None, ()
        self.lay_down_rows()
        self._downloads = {}
        self.session = self.world.session_type(
            self.name,
            self.world.spec,
            self.sealer,
            coordinator=self.world.coordinator,
            voter=self.world.voter_type(self.name, self.disk.record, signed=self.disk.signed),
            ledger=self.disk.ledger,
            now=self.now(),
            observer=self.observer,
            stands_in=self.reachable,
            specs={revision: self.world.specs[revision] for revision in self.disk.revisions},
        )
        self.decide(ev.Woke())
        if self.trains:
            self.later(self.world.options.work_s, self._trainer_up)
        for leader in self.world.leaders_of(self):
            self.later(self.world.network.delay_s(), self._connect, leader)

    def died(self) -> None:
        self.batches_made += self._steps_since() * self.trainer.scale
        for line in list(self.lines.values()):
            self.world.tell_line_broke(line, "the member is gone")
        self.lines = {}
        if self.stand_in is not None:
            self.stand_in.crash()

    def wake(self) -> None:
        self.decide(ev.Woke())

    def decide(self, event: ev.Event) -> None:
        now = self.now()
        effects = self.session.handle(event, now)
        self.carry_out_all(effects, self._carry_out)
        if self.alive:
            self.plan_wake(self.session.next_wake(now), after_woke=isinstance(event, ev.Woke))

    # -- the line ---------------------------------------------------------------------------------------------

    def _connect(self, leader: LeaderProcess) -> None:
        if leader.name in self.lines or leader not in self.world.leaders_of(self):
            return
        if not leader.alive or not self.world.network.dials(self.name, leader.name):
            self.later(RECONNECT_S, self._connect, leader)
            return
        line = self.lines[leader.name] = Line(self, leader)
        held = self.disk.ledger
        hello = Hello(
            protocol=limits.PROTOCOL,
            record=self.world.registry.encode(self._record),
            epoch=held.epoch if held else 0,
            round=held.round if held else 0,
            head=held.head if held else b"",
            digest=held.digest if held else b"",
            holds_state=held is not None,
            observer=self.observer,
            name="",
            abstain_round=0,
            tokens=held.tokens if held else 0,
        )
        self.world.push(
            self.world.now + self.world.network.delay_s(), leader, leader.accept, (line, hello, self._record)
        )
        self.later(WELCOME_S, self._still_waiting, line)

    def _still_waiting(self, line: Line) -> None:
        if line.member_up and not line.welcomed:
            self.world.tell_line_broke(line, "no welcome")

    def switch(self) -> None:
        """Leave all lines and look for the leaders that are this member's now."""
        for line in list(self.lines.values()):
            self.world.tell_line_broke(line, "the member changes its leader")
            self.line_broke(line, "another leader")
        for leader in self.world.leaders_of(self):
            self.later(0.0, self._connect, leader)

    @property
    def stand_in(self) -> StandIn | None:
        return self.world.stand_ins.get(self.name)

    def _follow(self, leaders: tuple[PeerId, ...]) -> None:
        if not self.world.options.stand_ins:
            return
        new = [peer for peer in leaders if peer not in self.followed]
        self.followed = leaders
        for name, line in list(self.lines.items()):
            if name != self.world.coordinator and name not in leaders:
                self.world.tell_line_broke(line, "no longer followed")
        for peer in new:
            self.later(self.world.network.delay_s(), self._connect, self.world.stand_ins[peer])

    def freeze(self, for_s: float) -> None:
        super().freeze(for_s)
        if self.stand_in is not None:
            self.stand_in.freeze(for_s)

    def line_broke(self, line: Line, reason: str) -> None:
        if not line.member_up or self.lines.get(line.leader.name) is not line:
            return
        line.member_up = False
        del self.lines[line.leader.name]
        if line.welcomed or not any(other.welcomed for other in self.lines.values()):
            self.decide(ev.LineDown(reason, line.leader.name))
        if self.alive:
            self.later(RECONNECT_S * (0.5 + self.world.rng.random()), self._connect, line.leader)

    def hear(self, line: Line, message: object) -> None:
        if not line.member_up or self.lines.get(line.leader.name) is not line:
            return
        if isinstance(message, Welcome):
            line.welcomed = True
        elif not line.welcomed:
            return
        if self.world.options.stand_ins:
            self.decide(ev.LeaderHeard(line.leader.name))
        if not self.alive or not line.member_up:
            return
        if (event := opened(self.world, message, line.leader.name)) is not None:
            self.decide(event)
            if isinstance(event, ev.Redealt) and self._exchange is not None and self.world.options.instant_rows:
                self.later(self.world.options.work_s, self.take_all_rows, self._exchange)

    # -- effects ----------------------------------------------------------------------------------------------

    def _carry_out(self, effect: fx.Effect) -> None:
        options = self.world.options
        match effect:
            case fx.TellLeader(message, leader):
                self._tell(message, leader)
            case fx.Follow(leaders):
                self._follow(leaders)
            case fx.Lead():
                if (stand_in := self.stand_in) is not None:
                    self.later(0.0, stand_in.begin)
            case fx.StepDown(reason):
                if (stand_in := self.stand_in) is not None:
                    self.later(0.0, stand_in.step_down, reason)
            case fx.KeepHead():
                pass
            case fx.Persist(entry):
                if self.writes():
                    self.disk.keep(entry)
            case fx.FetchState(commit, body):
                self.later(self._fetch_s(), self._fetch_state, commit, body)
            case fx.FetchCommits():
                self.later(options.work_s, self._fetch_commits, effect)
            case fx.FetchData(round_, _):
                self.later(max(options.work_s, self.data_until - self.world.now), self.decide, ev.DataReady(round_))
            case fx.LoadAnchor(round_):
                self.load_anchor(round_)
            case fx.StartTraining():
                self._start_training(effect)
            case fx.PauseTraining(paused):
                self.pause_training(paused)
            case fx.Encode(round_):
                self.later(options.work_s, self._encode, round_, self.trainer.generation)
            case fx.BeginExchange():
                self._exchange = effect
                if options.instant_rows:
                    self.later(options.work_s, self.take_all_rows, effect)
            case fx.InExchange(plan, inner):
                if self._exchange is not None and self._exchange.plan_hash == plan:
                    self._in_exchange(self._exchange, inner)
            case fx.EndExchange(plan):
                if self._exchange is not None and self._exchange.plan_hash == plan:
                    self._exchange = None
            case fx.Verify():
                self.later(options.fetch_s, self._verify, effect, FETCH_TRIES)
            case fx.Apply():
                self._apply(effect)
            case fx.Restore(head, round_, hash_):
                self.later(options.fetch_s, self._restore, head, round_, hash_)
            case fx.FetchSpec(revision):
                self.later(options.fetch_s, self.decide, ev.SpecKnown(self.world.specs[revision]))
            case fx.KeepSpec(_, revision):
                self.disk.revisions[revision] = None
            case fx.Amended():
                pass
            case fx.Stop():
                self.stopped = effect
                self.world.trace("stopped", self.name, effect.reason)
                self.crash()
            case fx.Say(text):
                self.said.append(text)
                self.world.trace("said", self.name, text)

    def _tell(self, message: object, to: str = "") -> None:
        if isinstance(message, Signed):
            signer, sealed = self.world.registry.open(message.envelope)
            if signer != self.name:
                raise Violated(f"{self.name} tells what {signer} signed")
            if isinstance(sealed, Promise | Leave | Vote):
                check_record(self.disk.record, sealed, self.name, self.disk.signed)
            if isinstance(sealed, Vote):
                self.world.chain.vote(self.name, sealed)
        for line in self.lines.values():
            if line.welcomed and to in ("", line.leader.name):
                self.world.send(line, TO_LEADER, message)

    # -- the state --------------------------------------------------------------------------------------------

    def _fetch_s(self) -> float:
        """How long a state takes to come."""
        pipe = self.world.network.down.get(self.name)
        n_bytes = VALUE_BYTES * self.world.spec.model.n_values
        return self.world.options.fetch_s + (n_bytes / pipe.bytes_per_s if pipe is not None else 0.0)

    def _fetch_state(self, commit: Commit, body: Body) -> None:
        if self.disk_is_full():
            self.decide(ev.StateFetchFailed("the disk is full"))
            return
        for donor in self.world.donors(self):
            held = donor.disk.ledger
            if held is not None and held.round >= body.round:
                self.disk.ledger, self.disk.commit = held, donor.disk.commit
                self.world.trace("fetched", self.name, held.round)
                self.decide(ev.StateFetched(held))
                return
        self.decide(ev.StateFetchFailed("no donor"))

    def _fetch_commits(self, asked: fx.FetchCommits) -> None:
        """From whoever holds a state that follows from mine."""
        by_hash = {hash_: commit for commit, _, hash_ in self.world.chain.commits}
        donors = [donor.disk.ledger for donor in self.world.donors(self) if donor.disk.ledger is not None]
        for held in donors:
            row: list[ev.CommitHeard] = []
            head = held.head
            while head != asked.head and head in by_hash:
                event = opened(self.world, by_hash[head], asked.newest.leader)
                if not isinstance(event, ev.CommitHeard) or event.body.round <= asked.round:
                    break
                row.append(event)
                head = event.body.previous
            if head == asked.head and row:
                self.decide(ev.CommitsFetched(tuple(reversed(row))))
                return
        self.decide(ev.CommitsFetchFailed("nobody has them", gone=bool(donors)))

    def _verify(self, effect: fx.Verify, tries: int) -> None:
        held, results = self.disk.ledger, self.disk.results
        missing = [(chunk, hash_) for chunk, hash_ in enumerate(effect.result_hashes) if hash_ not in results]
        if missing:
            holders = [self.world.members[peer] for peer in effect.holders]
            holders += self.world.donors(self) if effect.replay else []
            for chunk, hash_ in missing:
                line = effect.reducers[chunk][:2] if effect.reducers else ()
                for donor in (*(self.world.members[peer] for peer in line), *holders):
                    if hash_ in donor.disk.results and donor is not self and self.world.can_reach(self, donor):
                        self._download(donor, chunk, hash_, effect)
                        break
            if any(effect in waiting for waiting in self._downloads.values()):
                return  # it goes on when they have come
            if any(hash_ not in results for _, hash_ in missing):
                if tries > 1:
                    self.later(SEND_AGAIN_S, self._verify, effect, tries - 1)
                else:
                    lines = effect.reducers or ((),)
                    lacking = [chunk for chunk, hash_ in missing if hash_ not in results]
                    named = ", ".join(lines[lacking[0] % len(lines)][:2])
                    self.decide(ev.VerifyFailed(effect.body_hash, f"nobody has chunk {lacking[0]}: {named}"))
                return
        if self.disk_is_full():
            self.decide(ev.VerifyFailed(effect.body_hash, "the disk is full"))
            return
        if held is None or effect.body.anchor_digest != held.digest:
            self.decide(ev.VerifyFailed(effect.body_hash, "the state has moved on"))
            return
        self.decide(ev.Verified(effect.body_hash, digest_after(effect.body_hash, effect.body, held.digest)))

    def _download(self, donor: MemberProcess, chunk: int, hash_: bytes, effect: fx.Verify) -> None:
        """Have a result of a donor's, as fast as the accesses of both are."""
        network, n_bytes = self.world.network, self.world.row_bytes[chunk]
        if not network.limits(donor.name, self.name):
            self.disk.results[hash_] = None
            return
        waiting = self._downloads.setdefault(hash_, [])
        waiting.append(effect)
        if len(waiting) > 1:
            return
        if (up := network.up.get(donor.name)) is not None:
            up.carry(n_bytes, always, self, self._served, hash_, n_bytes)
        else:
            self._served(hash_, n_bytes)

    def _served(self, hash_: bytes, n_bytes: int) -> None:
        if (down := self.world.network.down.get(self.name)) is not None:
            down.carry(n_bytes, always, self, self._downloaded, hash_)
        else:
            self._downloaded(hash_)

    def _downloaded(self, hash_: bytes) -> None:
        self.disk.results[hash_] = None
        for effect in self._downloads.pop(hash_, []):
            if self.alive and not any(effect in waiting for waiting in self._downloads.values()):
                self._verify(effect, 1)

    def _restore(self, head: bytes, round_: int, hash_: bytes) -> None:
        """Who can be reached keeps snapshots."""
        if not self.reachable:
            self.decide(ev.RestoreFailed(hash_, f"the state after round {round_} is not kept here"))
            return
        self._restored[hash_] = None
        self.decide(ev.Restored(hash_, self.world.chain.ledgers[head]))

    def _apply(self, effect: fx.Apply) -> None:
        held = self.disk.ledger
        if body_hash(effect.commit.body) in self._restored:
            pass
        elif held is None or effect.body.anchor_digest != held.digest or effect.body.round <= held.round:
            raise Violated(f"{self.name} applies a commit that doesn't extend its state")
        elif digest_after(body_hash(effect.commit.body), effect.body, held.digest) != effect.commit.digest:
            raise Violated(f"{self.name} applies a commit that leads elsewhere")
        if self.world.chain.commit(effect.commit, effect.body) != effect.ledger.head:
            raise Violated(f"{self.name} applies a commit under another name")
        if not self.writes():
            return
        self.disk.ledger, self.disk.commit = effect.ledger, effect.commit
        self.later(self.world.options.work_s, self.decide, ev.Applied(effect.commit_hash))
        if self.stand_in is not None:
            self.later(0.0, self.stand_in.applied, effect.commit, effect.commit_hash)
