"""Members of a simulated world that lie: voters that make up what they have voted for, stand-ins that lead nowhere."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from coordinator.rounds import policy
from coordinator.rounds.events import Effect, Tell
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.proposing import build_body
from coordinator.rounds.voter import ATTEMPTS_MAX, Voter
from protos.messages import (
    Body,
    Deal,
    Leave,
    Outcome,
    PeerId,
    Plan,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Refusal,
    Signed,
    Vote,
)
from tests.sim.network import TO_MEMBER
from tests.sim.standing_in import StandIn
from tests.sim.world import World

Lie = Callable[[World, Prepare, Ledger, Proposal | None], Proposal | None]
"""What a voter says that it has signed, from the last proposal that it was asked to vote on."""


def _empty(world: World, prepare: Prepare, ledger: Ledger) -> Body:
    return build_body(
        ledger,
        world.specs[ledger.spec_revision],
        world.coordinator,
        attempt=0,
        leader=world.coordinator,
        evidence=None,
        reason="made up",
        seated=[seat.peer for seat in ledger.seats],
        left=(),
    )


def _of(world: World, body: Body) -> Proposal:
    return Proposal(world.registry.encode(body), b"", b"", (), ())


def groundless(world: World, prepare: Prepare, ledger: Ledger, seen: Proposal | None) -> Proposal:
    """An empty round: there is no more to show for an honest one."""
    return _of(world, _empty(world, prepare, ledger))


def misreckoned(world: World, prepare: Prepare, ledger: Ledger, seen: Proposal | None) -> Proposal:
    return _of(world, replace(_empty(world, prepare, ledger), outer_lr=9.0))


def unproven(world: World, prepare: Prepare, ledger: Ledger, seen: Proposal | None) -> Proposal:
    """A round that counts somebody, without what its exchange has left."""
    return _of(world, replace(_empty(world, prepare, ledger), outcome=Outcome.COMMITTED, reason=""))


def of_nobody(world: World, prepare: Prepare, ledger: Ledger, seen: Proposal | None) -> Proposal:
    """With a plan that nobody has signed."""
    return replace(unproven(world, prepare, ledger, seen), plan=b"scrawl", deal=b"scrawl")


def of_to_come(world: World, prepare: Prepare, ledger: Ledger, seen: Proposal | None) -> Proposal:
    """Made first in an attempt that is still to come."""
    return _of(world, replace(_empty(world, prepare, ledger), attempt=prepare.attempt + 7, leader=prepare.leader))


def stripped(world: World, prepare: Prepare, ledger: Ledger, seen: Proposal | None) -> Proposal | None:
    """A true proposal of the round without its results."""
    return replace(seen, results=()) if seen is not None else misreckoned(world, prepare, ledger, seen)


LIES: dict[str, Lie] = {
    lie.__name__: lie for lie in (misreckoned, unproven, of_nobody, of_to_come, stripped, groundless)
}
PLAIN = tuple(name for name in LIES if name != groundless.__name__)
"""Those that are seen through by their bytes."""


class LyingVoter(Voter):
    """Promises numbers like any other, with a lie about what it has signed just before. It votes only if told so."""

    world: World
    lie: Lie
    liars: frozenset[PeerId] = frozenset()
    votes = False
    seen: Proposal | None = None

    def prepared(self, prepare: Prepare, ledger: Ledger) -> Promise | Refusal:
        answer = super().prepared(prepare, ledger)
        if self.me not in self.liars or not isinstance(answer, Promise):
            return answer
        seen = self.seen
        if seen is not None and self.world.registry.decode(Body, seen.body).previous != ledger.head:
            seen = None
        made_up = type(self).lie(self.world, prepare, ledger, seen)
        return replace(answer, voted_attempt=prepare.attempt - 1, proposal=made_up)

    def would_vote(self, propose: Propose, ledger: Ledger) -> Refusal | None:
        if self.me not in self.liars:
            return super().would_vote(propose, ledger)
        if propose.proposal.plan:
            self.seen = propose.proposal
        if self.votes:
            return super().would_vote(propose, ledger)
        return Refusal(propose.epoch, propose.round, propose.attempt, "will not")

    def voted(
        self, propose: Propose, body_hash: bytes, digest: bytes, ledger: Ledger
    ) -> tuple[Vote, Promise] | Refusal:
        return self.would_vote(propose, ledger) or super().voted(propose, body_hash, digest, ledger)

    def leave(self, ledger: Ledger) -> Leave | None:
        return None if self.me in self.liars else super().leave(ledger)


def lying_voters(world: World, liars: Collection[PeerId], lie: Lie, *, votes: bool = False) -> None:
    """In a world that has not begun, these voters will lie."""
    world.liars = frozenset(liars)
    named = {"world": world, "lie": staticmethod(lie), "liars": world.liars, "votes": votes}
    world.voter_type = type("Lying", (LyingVoter,), named)


class HoldsUp(StandIn):
    """Is heard for as long as it leads, and says what it says to the first of its lines only, or to nobody."""

    swallowed: tuple[type, ...] = ()
    n_hear: int = 0

    def step_down(self, reason: str) -> None:
        """It stays."""

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Tell) and isinstance(effect.message, Signed):
            _, opened = self.world.registry.open(effect.message.envelope)
            if isinstance(opened, self.swallowed):
                effect = replace(effect, peers=effect.peers[: self.n_hear])
        super()._carry_out(effect)


class Silent(HoldsUp):
    """Begins no attempt that anybody hears of."""

    swallowed = (Prepare, Plan, Deal, Propose)


class Freezing(HoldsUp):
    """Its attempts stop before their exchange."""

    swallowed = (Deal, Propose)


class Whispering(HoldsUp):
    """One hears all that it says, and the others that it is there."""

    swallowed = (Prepare, Plan, Deal, Propose)
    n_hear = 1


class Exhausting(HoldsUp):
    """Silent, but for the highest number there is, which it would bind every voter to."""

    swallowed = (Prepare, Plan, Deal, Propose)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Tell) and isinstance(effect.message, Signed):
            _, opened = self.world.registry.open(effect.message.envelope)
            if isinstance(opened, Prepare):
                highest = Signed(self.sealer.seal(replace(opened, attempt=ATTEMPTS_MAX)))
                for peer in effect.peers:
                    if (line := self.lines.get(peer)) is not None:
                        self.world.send(line, TO_MEMBER, highest)
        super()._carry_out(effect)


class Binding(HoldsUp):
    """Silent, but for numbers as high as voters follow a stand-in to, over and over."""

    swallowed = (Prepare, Plan, Deal, Propose)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Tell) and isinstance(effect.message, Signed):
            _, opened = self.world.registry.open(effect.message.envelope)
            if isinstance(opened, Prepare):
                since = self.world.members[self.name].session.head_since
                highest = 2 * policy.numbers_most(self.now() - since) - 100
                bound = Signed(self.sealer.seal(replace(opened, attempt=highest)))
                for peer in effect.peers:
                    if (line := self.lines.get(peer)) is not None:
                        self.world.send(line, TO_MEMBER, bound)
        super()._carry_out(effect)


KINDS: tuple[type[HoldsUp], ...] = (Silent, Freezing, Whispering, Exhausting, Binding)
HOLDING_UP: dict[str, type[HoldsUp]] = {kind.__name__: kind for kind in KINDS}


def hold_up(world: World, peer: PeerId, kind: type[HoldsUp]) -> HoldsUp:
    """Replace a member's stand-in, which must not lead yet."""
    genesis, head = world.leader.journal.commits[0]
    made = kind(world, peer, genesis, head)
    world.stand_ins[peer] = made
    return made
