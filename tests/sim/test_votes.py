"""No schedule, however unlucky, commits a round twice: many random ones, and proof that such a fault would be found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.rounds.attempt import Attempt
from coordinator.rounds.events import Effect, Instant
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.machine import Rounds
from coordinator.rounds.voter import Voter
from protos.messages import Body, PeerId, Prepare, Promise, Proposal, Propose, Refusal, Vote
from protos.orders import OpenedOrder
from tests.sim.chain import Violated
from tests.sim.schedules import SCHEDULES
from tests.sim.world import World

SEEDS = Path(__file__).parent.parent / "golden" / "seeds.txt"


def kept_seeds() -> list[tuple[str, int]]:
    """Schedules that have failed once: a family and a seed a line."""
    lines = [line.split("#")[0].split() for line in SEEDS.read_text().splitlines()]
    return [(line[0], int(line[1])) for line in lines if line]


def run(family: str, seed: int) -> World:
    """Run a schedule; one that fails says its seed, and is kept."""
    schedule = SCHEDULES[family]
    world = schedule.make(seed)
    try:
        schedule.run(world)
    except Exception as error:
        if (family, seed) not in kept_seeds():
            with SEEDS.open("a") as file:
                file.write(f"{family} {seed}\n")
        error.add_note(f"in schedule {family} {seed}, kept in {SEEDS.name}")
        raise
    return world


def run_all(family: str, seeds: range) -> int:
    """Run schedules; how many of them committed a round."""
    return sum(1 for seed in seeds if run(family, seed).chain.commits)


def test_what_failed_once() -> None:
    for family, seed in kept_seeds():
        run(family, seed)


def test_some_contests() -> None:
    assert run_all("ballots", range(400)) > 150


def test_some_rounds() -> None:
    assert run_all("rounds", range(100)) > 60


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(10**6, 10**12))
def test_any_contest(seed: int) -> None:
    run("ballots", seed)


@pytest.mark.sim
@pytest.mark.long
@pytest.mark.timeout(300)
def test_many_contests() -> None:
    assert run_all("ballots", range(1_000, 10_500)) > 3_000


@pytest.mark.sim
@pytest.mark.timeout(300)
def test_many_rounds() -> None:
    assert run_all("rounds", range(1_000, 1_500)) > 300


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("family", "n"), [("ballots", 60_000), ("rounds", 5_000)])
def test_very_many_schedules(family: str, n: int) -> None:
    assert run_all(family, range(100_000, 100_000 + n)) > n // 4


def test_the_same_seed_has_the_same_history() -> None:
    hashes = [run("rounds", 3).trace_hash for _ in range(2)]
    assert hashes[0] == hashes[1]
    assert hashes[0] != run("rounds", 4).trace_hash


# -- the same schedules with one rule left out -----------------------------------------------------------------------


class PromisesNothing(Voter):
    """Heeds every number, whatever it has promised."""

    def _refused(self, asked: Prepare | Propose, ledger: Ledger) -> Refusal | None:
        reason = self._unheeded(asked, ledger)
        return Refusal(asked.epoch, asked.round, asked.attempt, reason) if reason else None


class TellsNothing(Voter):
    """Promises without saying what it has signed."""

    def prepared(self, prepare: Prepare, ledger: Ledger) -> Promise | Refusal:
        answer = super().prepared(prepare, ledger)
        if isinstance(answer, Promise):
            answer = self._record = replace(answer, voted_attempt=-1, proposal=None)
        return answer


class KeepsItsOwn(Rounds):
    """Proposes what it likes, not what voters have signed before."""

    def _prepare(self, now: Instant) -> list[Effect] | None:
        attempt = self._running()
        attempt.promises = {
            peer: replace(promise, voted_attempt=-1, proposal=None) for peer, promise in attempt.promises.items()
        }
        return super()._prepare(now)


class AddsUpVotes(Rounds):
    """Counts votes for a body whatever attempt they are of."""

    def __init__(self, *args: object, **named: object) -> None:
        self.earlier: dict[bytes, dict[PeerId, tuple[Vote, bytes]]] = {}
        super().__init__(*args, **named)  # type: ignore[arg-type]

    def _propose(self, proposal: Proposal, body: Body, orders: tuple[OpenedOrder, ...], now: Instant) -> list[Effect]:
        effects = super()._propose(proposal, body, orders, now)
        attempt = self._running()
        attempt.votes.update(self.earlier.get(attempt.body_hash, {}))
        return effects

    def _fail(self, reason: str, now: Instant) -> list[Effect]:
        attempt = self._running()
        self.earlier.setdefault(attempt.body_hash, {}).update(attempt.votes)
        return super()._fail(reason, now)


class SkipsPromises(Rounds):
    """Proposes under any number without asking."""

    def _open_attempt(self, empty: str, now: Instant) -> list[Effect]:
        effects = super()._open_attempt(empty, now)
        attempt = self._attempt
        return effects + self._form(now) if isinstance(attempt, Attempt) and attempt.number else effects


@pytest.mark.parametrize(
    ("types", "n_most"),
    [
        ({"voter_type": PromisesNothing}, 300),
        ({"voter_type": TellsNothing}, 600),
        ({"rounds_type": KeepsItsOwn}, 600),
        ({"rounds_type": AddsUpVotes}, 100),
        ({"rounds_type": SkipsPromises}, 300),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_broken_rule_is_found(types: dict[str, type], n_most: int) -> None:
    schedule = SCHEDULES["ballots"]
    for seed in range(n_most):
        world = schedule.make(seed, **types)
        try:
            schedule.run(world)
        except Violated:
            return
    pytest.fail(f"{n_most} schedules ran well without the rule")
