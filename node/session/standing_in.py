"""Who leads while the coordinator is away: whose turn it is after how much silence, and when a stand-in steps down.

Each member decides by its own clock. Several stand-ins at once are safe, since a number is promised to one leader
only; the order in which their turns come, from the head that all know, makes one of them prevail. Who commits nothing
in its turn goes to the end, whatever it says: then nobody refuses the next one for its sake.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aggregation.digest import tagged_hash
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from node.session import effects as fx
from node.session.effects import Effect
from node.session.turns import Turns
from protos.messages import PeerId
from protos.runspec import DeadlineSpec

DOUBLINGS_MOST = 3
"""By so many promised numbers of a round the turns are put off: a stand-in that fails again and again is not raced."""


def order(ledger: Ledger, coordinator: PeerId) -> tuple[PeerId, ...]:
    """The voters in the order of their turns: hash(head, peer); those who reduced lately, so can be reached, first."""
    voters = [peer for peer in ledger.voters if peer != coordinator]
    voters.sort(key=lambda peer: (peer not in ledger.bandwidths, tagged_hash("stand-in", ledger.head, peer.encode())))
    return tuple(voters)


class Succession:
    """One member's view of who leads. Its driver tells of every word that a leader says.

    Args:
        me: this member.
        coordinator: who leads whenever it can be heard.
        deadlines: `stand_in_s` of silence go before the first turn; the k-th comes after (k + 1) times as long.
        now: the present, from which silence counts at first.
    """

    def __init__(self, me: PeerId, coordinator: PeerId, deadlines: DeadlineSpec, now: Instant) -> None:
        self._me, self._coordinator, self._stand_in_s = me, coordinator, deadlines.stand_in_s
        self._turns_held = Turns(deadlines, now)
        self._spent: dict[PeerId, None] = {}  # whose turn went by without a commit, in the order in which it did
        self._heard: dict[PeerId, Instant] = {}
        self._up: dict[PeerId, None] = {}
        self._last_word_at = now  # of any leader that counts, but this member itself
        self.absent_since = now
        """When the coordinator was heard last, or else the beginning."""
        self._order: tuple[bytes, tuple[PeerId, ...]] = (b"", ())
        self._followed: tuple[PeerId, ...] = ()
        self._asked = self.leads = False
        self._stepping_down = False
        self._rests_until = now

    def amend(self, deadlines: DeadlineSpec) -> None:
        """Other deadlines are in force."""
        self._stand_in_s = deadlines.stand_in_s
        self._turns_held.amend(deadlines)

    # -- what comes in ----------------------------------------------------------------------------------------

    def heard(self, leader: PeerId, now: Instant) -> None:
        self._heard[leader] = now
        if leader != self._me and leader not in self._spent:
            self._last_word_at = now
        if leader == self._coordinator:
            self.absent_since = now

    def attempted(self, leader: PeerId, now: Instant) -> None:
        """A leader has said a word of an attempt of its own."""
        if leader != self._coordinator:
            self._turns_held.attempted(leader, now)

    def line_up(self, leader: PeerId, now: Instant) -> None:
        self._up[leader] = None
        self.heard(leader, now)

    def line_down(self, leader: PeerId) -> None:
        self._up.pop(leader, None)

    def said_goodbye(self, leader: PeerId) -> None:
        """It leads no more, and says so: nobody waits for its return."""
        self.line_down(leader)
        if leader != self._coordinator:
            self._heard.pop(leader, None)

    def led(self, leads: bool, now: Instant) -> None:
        """This member leads now, or no longer: then it lets as much time pass as goes before anybody's turn."""
        self.leads = self._asked = leads
        self._stepping_down = False
        if not leads:
            self.said_goodbye(self._me)
            self._rests_until = Instant(now + self._stand_in_s)

    @property
    def head_since(self) -> Instant:
        """When the head that is held came to this member, or to this process where its promises tell no more."""
        return self._turns_held.head_since

    # -- what is known ----------------------------------------------------------------------------------------

    @property
    def any_line(self) -> bool:
        return bool(self._up)

    def leader(self, now: Instant) -> PeerId | None:
        """Whom this member follows: the coordinator where it can, else the stand-in that it heard last."""
        heard = [peer for peer in self._up if self._is_heard(peer, now)]
        if self._coordinator in heard:
            return self._coordinator
        latest = max(heard, key=lambda peer: (peer not in self._spent, self._heard[peer], peer), default=None)
        return latest if latest is not None else next(iter(self._up), None)

    def is_superseded(self, leader: PeerId, now: Instant) -> bool:
        """Whether a stand-in may begin nothing here any more: the coordinator can be heard.

        A line to it stays up as long as it likes, so what it says there may be no more than a lie would be worth.
        """
        return leader not in ("", self._coordinator) and self._is_heard(self._coordinator, now)

    def hears_coordinator(self, now: Instant) -> bool:
        """Whether there is a line to the coordinator on which it is heard."""
        return self._coordinator in self._up and self._is_heard(self._coordinator, now)

    def why_not(self, leader: PeerId, ledger: Ledger, now: Instant) -> str:
        """Why a number is not to be promised to a leader: one whose turn came before is still heard. Or nothing."""
        if leader == self._coordinator:
            return ""
        if self._is_heard(self._coordinator, now):
            return "still hears the coordinator"
        ranks = {peer: rank for rank, peer in enumerate(self._ranks(ledger))}
        last = len(ranks)
        for other in self._heard:
            before = other not in self._spent and ranks.get(other, last) < ranks.get(leader, last)
            if before and self._is_heard(other, now):
                return f"still hears {other[-6:]}, which stands in for the coordinator"
        return ""

    # -- moving on --------------------------------------------------------------------------------------------

    def advance(
        self, ledger: Ledger | None, can_lead: bool, number: int, now: Instant, *, ready: bool = False
    ) -> list[Effect]:
        """Whom to have lines to, and whether to lead or to stop leading.

        Args:
            ledger: the books that are held.
            can_lead: whether this member may stand in.
            number: the highest number that this voter has promised in the round, -1: none.
            ready: whether this member has trained in the round and made all its steps.
        """
        effects = self._end_turns(ledger, number, ready, now)
        turns = list(self._turns(ledger, number))
        here = self._is_heard(self._coordinator, now)
        if self.leads and not self._stepping_down and (reason := self._why_step_down(ledger, now)):
            self._stepping_down = True
            effects.append(fx.StepDown(reason))
        due = [] if here else [peer for peer, at in turns if now >= at]
        self._come_again(due, ledger, now)
        may_ask = can_lead and not self._asked and now >= self._rests_until
        if self._me in due and may_ask and not self._why_step_down(ledger, now):
            self._asked = True
            effects.append(fx.Lead())
        lately = [peer for peer in self._heard if self._is_heard(peer, now)]
        followed = dict.fromkeys(sorted({*due, *self._up, *lately} - {self._coordinator, self._me}))
        if self.leads:
            followed[self._me] = None
        if tuple(followed) != self._followed:
            self._followed = tuple(followed)
            effects.append(fx.Follow(self._followed))
        return effects

    def next_at(self, ledger: Ledger | None, number: int, now: Instant) -> Instant | None:
        """When a turn comes, if nobody is heard until then."""
        if self._is_heard(self._coordinator, now):
            return Instant(max(self._last_word_at, self._heard[self._coordinator]) + self._patience_s(number))
        due = [self._rests_until, *(at for _, at in self._turns(ledger, number))]
        holder = self._holder(ledger, now)
        if ledger is not None and holder is not None:
            due += [at for at in (self._turns_held.ends_at(holder, ledger),) if at is not None]
        return min((at for at in due if at > now), default=None)

    def _end_turns(self, ledger: Ledger | None, number: int, ready: bool, now: Instant) -> list[Effect]:
        """Put whose turn went by without a commit at the end; silence counts from then on, whatever it says."""
        effects: list[Effect] = []
        if ledger is None:
            return effects
        self._turns_held.watch(self._holder(ledger, now), ledger, ready, now)
        self._turns_held.bound_to(number, now)
        while (holder := self._holder(ledger, now)) is not None:
            ends_at = self._turns_held.ends_at(holder, ledger)
            if ends_at is None or now < ends_at:
                break
            self._turns_held.over(holder)
            self._spent.pop(holder, None)
            self._spent[holder] = None
            self._last_word_at = Instant(now + self._stand_in_s - self._patience_s(number))
            self._turns_held.watch(self._holder(ledger, now), ledger, ready, now)
            whose = "this node stands in" if holder == self._me else f"{holder[-6:]} stands in"
            effects.append(fx.Say(f"{whose} for the coordinator and commits nothing: others have their turn now"))
        return effects

    def _come_again(self, due: Iterable[PeerId], ledger: Ledger | None, now: Instant) -> None:
        """Those whose turn comes once more, since nobody leads who comes before them. Their words count again."""
        if self._spent and self._holder(ledger, now) is None:
            for peer in due:
                if peer in self._spent:
                    del self._spent[peer]
                    if self._is_heard(peer, now):
                        self._last_word_at = now

    def _holder(self, ledger: Ledger | None, now: Instant) -> PeerId | None:
        """Whose turn it is: of the stand-ins that are heard, and whose word counts, the first; none beside the
        coordinator."""
        if ledger is None or self._is_heard(self._coordinator, now):
            return None
        heard = [peer for peer in self._heard if peer not in self._spent and self._is_heard(peer, now)]
        ranks = {peer: rank for rank, peer in enumerate(self._ranks(ledger))}
        return min(heard, key=lambda peer: (ranks.get(peer, len(ranks)), peer), default=None)

    def _turns(self, ledger: Ledger | None, number: int) -> Iterator[tuple[PeerId, Instant]]:
        if ledger is None:
            return
        patience_s = self._patience_s(number)
        for rank, peer in enumerate(self._ranks(ledger)):
            yield peer, Instant(self._last_word_at + (rank + 1) * patience_s)

    def _why_step_down(self, ledger: Ledger | None, now: Instant) -> str:
        if self.hears_coordinator(now):
            return "the coordinator is back"
        if ledger is None:
            return "the state is lost"
        ranks = self._ranks(ledger)
        before = ranks[: ranks.index(self._me)] if self._me in ranks else ranks
        before = tuple(peer for peer in before if peer not in self._spent)
        better = next((peer for peer in before if peer in self._up and self._is_heard(peer, now)), None)
        return f"{better[-6:]}, whose turn came before, leads as well" if better else ""

    def _ranks(self, ledger: Ledger) -> tuple[PeerId, ...]:
        if self._order[0] != ledger.head:
            self._order = (ledger.head, order(ledger, self._coordinator))
        ranks = self._order[1]
        if not self._spent:
            return ranks
        return (*(peer for peer in ranks if peer not in self._spent), *(peer for peer in self._spent if peer in ranks))

    def _patience_s(self, number: int) -> float:
        return self._stand_in_s * 2.0 ** min(max(number, 0), DOUBLINGS_MOST)

    def _is_heard(self, leader: PeerId, now: Instant) -> bool:
        at = self._heard.get(leader)
        return at is not None and now < at + self._stand_in_s
