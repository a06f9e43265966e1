"""A member's way to the newest commit: by results where they are kept, by a state where not, safe at every step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger, fold
from coordinator.rounds.voter import Voter
from node.session import effects as fx
from node.session import events as ev
from node.session.machine import Session
from protos import wire
from protos.hashes import body_hash, commit_hash
from protos.messages import Commit, MemberState, Outcome, PeerId, Vote, Welcome
from protos.signing import Identity
from tests.coordinator.made import spec
from tests.fakes.sealer import FakeSealer, Registry
from tests.node.chain import COORDINATOR, body_after, commit_zero

ME = Identity.from_private_bytes(bytes(31) + b"\7").peer
SPEC = spec()


def extend(ledger: Ledger, outcome: Outcome = Outcome.COMMITTED, seed: int = 0) -> tuple[ev.CommitHeard, Ledger]:
    """A commit that the coordinator, the only voter, has signed."""
    digest = ledger.digest if outcome is Outcome.EMPTY else bytes([ledger.round + 1, seed]) * 16
    body, folded = body_after(ledger, outcome, voters=(COORDINATOR,), leader=COORDINATOR, clip_factor=1.0 + seed)
    raw = wire.encode(body)
    hash_ = commit_hash(raw, digest)
    vote = Vote(body.epoch, body.round, 0, COORDINATOR, body_hash(raw), digest)
    commit = Commit(raw, digest, 0, (b"vote",), ())
    return ev.CommitHeard(commit, body, hash_, ((COORDINATOR, vote),), COORDINATOR), folded.at(hash_, digest)


def chain(n: int, start: Ledger, outcomes: dict[int, Outcome] | None = None) -> list[tuple[ev.CommitHeard, Ledger]]:
    made: list[tuple[ev.CommitHeard, Ledger]] = []
    for number in range(n):
        made.append(extend(start, (outcomes or {}).get(number, Outcome.COMMITTED)))
        start = made[-1][1]
    return made


@dataclass
class Away:
    """A member that holds the state after round 3 and comes to its line when the run is some rounds on."""

    n_rounds: int
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    effects: list[fx.Effect] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        _, first = commit_zero(bytes(32))
        past = chain(3, first)
        self.held = past[-1][1]
        self.rows = chain(self.n_rounds, self.held, self.outcomes)
        self.session = Session(
            ME, SPEC, FakeSealer(Registry(), ME), coordinator=COORDINATOR, voter=Voter(ME, None), ledger=self.held,
            now=Instant(0.0),
        )  # fmt: skip

    def line_up(self) -> None:
        heard, ledger = self.rows[-1]
        welcome = Welcome(COORDINATOR, heard.commit, ledger.to_bytes(), (), 0.0, 1.0)
        self.tell(ev.LineUp(welcome, heard.body, ledger, heard.signed))

    def tell(self, event: ev.Event) -> None:
        self.effects = self.session.handle(event, Instant(self.now))

    def one(self, kind: type[Any]) -> Any:
        (found,) = [effect for effect in self.effects if isinstance(effect, kind)]
        return found

    def none(self, *kinds: type[Any]) -> bool:
        return not any(isinstance(effect, kinds) for effect in self.effects)

    def step(self) -> int:
        """Carry out the verification and the step that it asks for; the round that is applied."""
        verify = self.one(fx.Verify)
        digest = next(heard.commit.digest for heard, _ in self.rows if body_hash(heard.commit.body) == verify.body_hash)
        self.tell(ev.Verified(verify.body_hash, digest))
        apply = self.one(fx.Apply)
        self.tell(ev.Applied(apply.commit_hash))
        return int(apply.body.round)

    def said(self) -> str:
        return "\n".join(effect.text for effect in self.effects if isinstance(effect, fx.Say))


def test_rounds_that_were_missed_are_followed_one_after_the_other() -> None:
    away = Away(5)
    away.line_up()
    asked = away.one(fx.FetchCommits)
    assert (asked.round, asked.head, asked.newest.commit_hash) == (3, away.held.head, away.rows[-1][0].commit_hash)
    assert away.none(fx.FetchState)
    assert away.session.state() is MemberState.JOINING
    assert "rounds 4 to 8" in away.session.view().waiting_for
    away.tell(ev.CommitsFetched(tuple(heard for heard, _ in away.rows)))
    assert "following rounds 4 to 8" in away.said()
    for round_ in range(4, 9):
        assert away.one(fx.Verify).replay
        assert away.step() == round_
        assert away.none(fx.FetchState, fx.FetchCommits)
    assert away.session.ledger == away.rows[-1][1]
    assert away.session.state() is not MemberState.JOINING


def test_commits_that_come_meanwhile_are_not_asked_for_again() -> None:
    """The race at the head: the newest round is not missed, and none is fetched twice."""
    away = Away(5)
    away.line_up()
    away.tell(ev.CommitsFetched(tuple(heard for heard, _ in away.rows[:4])))
    away.rows += chain(2, away.rows[-1][1])
    away.step()
    for heard, _ in away.rows[5:]:
        away.effects.clear()
        verify = away.session.handle(heard, Instant(0.0))
        assert not any(isinstance(effect, fx.FetchState | fx.FetchCommits) for effect in verify)
    away.effects = [_verify_of(away)]
    rounds = []
    while not away.none(fx.Verify):
        rounds.append(away.step())
        assert away.none(fx.FetchState)
        if not away.none(fx.FetchCommits):  # round 8 was not among those that came
            away.tell(ev.CommitsFetched((away.rows[4][0],)))
    assert rounds == [5, 6, 7, 8, 9, 10]
    assert away.session.ledger == away.rows[-1][1]


def _verify_of(away: Away) -> fx.Verify:
    heard = away.session._commit
    assert heard is not None
    return fx.Verify(heard.body, body_hash(heard.commit.body), (), (), ())


def test_a_crash_in_the_middle_goes_on_from_there() -> None:
    away = Away(5)
    away.line_up()
    away.tell(ev.CommitsFetched(tuple(heard for heard, _ in away.rows)))
    away.step()
    away.step()
    again = Away(5)
    again.session = Session(
        ME, SPEC, FakeSealer(Registry(), ME), coordinator=COORDINATOR, voter=Voter(ME, None),
        ledger=away.session.ledger, now=Instant(0.0),
    )  # fmt: skip
    again.line_up()
    asked = again.one(fx.FetchCommits)
    assert (asked.round, asked.head) == (5, away.session.ledger.head)  # type: ignore[union-attr]


def test_who_missed_more_than_is_kept_fetches_a_state() -> None:
    away = Away(SPEC.keep.results + 1)
    away.line_up()
    away.tell(ev.CommitsFetched(tuple(heard for heard, _ in away.rows)))
    fetch = away.one(fx.FetchState)
    assert (fetch.newer_than, fetch.anew) == (3, False)
    assert fetch.commit == away.rows[-1][0].commit
    assert "fetching the state" in away.said()


def test_who_was_away_for_ages_does_not_even_ask_for_commits() -> None:
    away = Away(100)
    away.line_up()
    assert away.none(fx.FetchCommits)
    assert away.one(fx.FetchState).newer_than == 3


def test_empty_rounds_cost_nothing_but_their_commits() -> None:
    away = Away(30, {number: Outcome.EMPTY for number in range(30) if number % 10})
    away.line_up()
    away.tell(ev.CommitsFetched(tuple(heard for heard, _ in away.rows)))
    while not away.none(fx.Verify):
        away.step()
        assert away.none(fx.FetchState)
    assert away.session.ledger == away.rows[-1][1]


def test_a_state_that_is_some_rounds_old_is_gone_on_with_by_results() -> None:
    away = Away(100)
    away.line_up()
    away.tell(ev.StateFetched(away.rows[91][1]))
    asked = away.one(fx.FetchCommits)
    assert asked.head == away.rows[91][1].head
    away.tell(ev.CommitsFetched(tuple(heard for heard, _ in away.rows[92:])))
    for round_ in range(96, 104):
        assert away.step() == round_
    assert away.session.ledger == away.rows[-1][1]


def test_results_that_nobody_has_any_more_need_a_state_beyond_them() -> None:
    away = Away(5)
    away.line_up()
    away.tell(ev.CommitsFetched(tuple(heard for heard, _ in away.rows)))
    away.step()
    away.tell(ev.VerifyFailed(away.one(fx.Verify).body_hash, "nobody has them"))
    fetch = away.one(fx.FetchState)
    assert fetch.newer_than == 4  # the state after round 5 will do, an older one would lead here again
    assert fetch.commit == away.rows[-1][0].commit


def test_another_digest_than_the_commits_needs_a_state_and_never_applies() -> None:
    away = Away(3)
    away.line_up()
    away.tell(ev.CommitsFetched(tuple(heard for heard, _ in away.rows)))
    away.tell(ev.Verified(away.one(fx.Verify).body_hash, b"?" * 32))
    assert away.none(fx.Apply)
    assert away.one(fx.FetchState).newer_than == 3
    assert "is not the commit's" in away.said()
    assert away.session.ledger == away.held


def test_commits_without_a_quorum_are_asked_for_elsewhere_and_then_given_up() -> None:
    away = Away(3)
    away.line_up()
    bare = tuple(replace(heard, signed=()) for heard, _ in away.rows)
    tries = [away.one(fx.FetchCommits).n_tries]
    while away.none(fx.FetchState):
        away.tell(ev.CommitsFetched(bare))
        assert "refused a commit of round 4" in away.said()
        assert away.none(fx.Verify, fx.Apply)
        if not away.none(fx.FetchCommits):
            tries.append(away.one(fx.FetchCommits).n_tries)
    assert tries == [0, 1, 2]
    assert away.session.ledger == away.held


def test_commits_of_another_branch_are_not_followed() -> None:
    away = Away(3)
    away.line_up()
    other, _ = extend(away.rows[0][1], seed=1)
    away.tell(ev.CommitsFetched((other,)))
    assert away.none(fx.Verify)
    assert away.one(fx.FetchState).newer_than == 3


def test_who_can_be_reached_by_nobody_asks_again_and_fetches_no_state() -> None:
    away = Away(3)
    away.line_up()
    away.tell(ev.CommitsFetchFailed("connection refused", gone=False))
    assert away.none(fx.FetchState, fx.FetchCommits)
    assert "connection refused" in away.session.view().waiting_for
    wake = away.session.next_wake(Instant(0.0))
    away.now = 2.0
    away.tell(ev.Woke())
    assert wake <= 2.0
    assert away.one(fx.FetchCommits).head == away.held.head
    away.tell(ev.CommitsFetchFailed("they have none", gone=True))
    assert away.one(fx.FetchState).newer_than == 3


def test_nobody_is_seated_before_it_holds_the_state() -> None:
    """Its heartbeat names the state that it holds, and nothing is loaded or trained on the way."""
    away = Away(4)
    away.line_up()
    away.tell(ev.CommitsFetched(tuple(heard for heard, _ in away.rows)))
    for _ in range(3):
        away.step()
        assert away.none(fx.LoadAnchor, fx.StartTraining, fx.FetchData)


def test_an_old_answer_changes_nothing() -> None:
    away = Away(2)
    away.line_up()
    rows = tuple(heard for heard, _ in away.rows)
    away.tell(ev.CommitsFetched(rows))
    away.step()
    before = away.session.ledger
    away.tell(ev.CommitsFetched(rows))
    away.tell(ev.CommitsFetchFailed("late", gone=True))
    assert away.session.ledger == before
    assert away.none(fx.FetchState)


def test_books_of_the_chain_are_those_of_the_fold() -> None:
    """So that what is tested here are commits as they are."""
    away = Away(3)
    ledger = away.held
    for heard, after in away.rows:
        assert fold(ledger, heard.body).hash() == after.hash()
        ledger = after
    assert PeerId(ME) not in ledger.voters
