"""A member's stand-in: a leader's process that lives and dies with the member, and leads while the session says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.rounds.events import Effect, Ended, Instant, StepDown, Woke
from node.session import events as ev
from protos.messages import Commit, Goodbye, PeerId
from tests.sim.leader import LeaderProcess
from tests.sim.network import TO_MEMBER

if TYPE_CHECKING:
    from tests.sim.world import World


class StandIn(LeaderProcess):
    """Its numbers are on the member's disk; it has no vote of its own and keeps no commits."""

    def __init__(self, world: World, name: PeerId, genesis: Commit, head: bytes) -> None:
        super().__init__(world, name, genesis, head)
        self.n_terms = 0

    def begin(self) -> None:
        """Lead from what the member holds."""
        member = self.world.members[self.name]
        held, commit = member.disk.ledger, member.disk.commit
        if self.alive or held is None or commit is None:
            member.decide(ev.Led(self.alive))
            return
        self.journal.commits = [(commit, held.head)]
        self.n_terms += 1
        self.start()
        member.decide(ev.Led(True))

    def boot(self) -> None:
        self.lines = {}
        commit, head = self.journal.commits[-1]
        ledger = self.world.chain.ledgers[head]
        numbers = self.journal.numbers()
        self.rounds = self.world.rounds_type(
            self.name,
            self.world.specs[ledger.spec_revision],
            ledger,
            commit,
            self.sealer,
            now=self.now(),
            coordinator=self.world.coordinator,
            opened=numbers.get((ledger.epoch, ledger.round + 1), -1),
            numbers=numbers,
            voter=None,
            head_since=self.world.members[self.name].session.head_since,
            specs=self.world.members[self.name].session.specs,
            targets=self.world.members[self.name].session.targets,
            relay=self.world.options.relay,
        )
        self.begin_beating()
        self.decide(Woke())

    def now(self) -> Instant:
        return self.world.members[self.name].now()

    def _in_world(self, instant: float) -> float:
        return self.world.members[self.name]._in_world(instant)

    def writes(self) -> bool:
        return self.world.members[self.name].writes()

    def step_down(self, reason: str) -> None:
        if self.alive:
            self.decide(StepDown(reason))

    def stop(self) -> None:
        for line in self.lines.values():
            self.world.send(line, TO_MEMBER, Goodbye("shutdown", "no longer stands in"))
        self.crash()

    def applied(self, commit: Commit, head: bytes) -> None:
        """The session has moved on by another leader's commit."""
        ledger = self.world.chain.ledgers[head]
        if self.alive and (ledger.epoch, ledger.round) > (self.rounds.ledger.epoch, self.rounds.ledger.round):
            self.decide(self.told(commit))

    def _check_certificate(self, commit: Commit) -> None:
        """Its own votes are its session's, which is checked where it votes."""

    def _carry_out(self, effect: Effect) -> None:
        super()._carry_out(effect)
        if isinstance(effect, Ended):
            self.stop()
            member = self.world.members[self.name]
            if member.alive:
                member.later(0.0, member.decide, ev.Led(False))
