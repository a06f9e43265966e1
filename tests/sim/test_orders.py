"""Orders in a world of members that come and go: obeyed by all, under any leader, and after any restart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.rounds import leases
from protos.messages import MemberState, Outcome
from protos.orders import Kind
from tests.coordinator.rounds.ordered import amended, ordered
from tests.sim.chain import Violated
from tests.sim.member import MemberProcess
from tests.sim.options import Options
from tests.sim.watching import ROUND_S, begun, commits, counted
from tests.sim.world import RUN, World


def obeyed(world: World, number: int, limit_s: float = 2 * ROUND_S) -> None:
    def is_obeyed() -> bool:
        return world.leader.rounds.ledger.n_orders >= number

    assert world.run_until(is_obeyed, limit_s), world.leader.rounds.view(world.leader.now()).waiting_for


def everybody(world: World, state: MemberState) -> bool:
    here = [member for member in world.members.values() if member.alive and not member.observer]
    return all(member.session.state() is state for member in here)


def committed_since(world: World, n: int) -> list[Outcome]:
    return [body.outcome for _, body, _ in world.chain.commits[n:]]


def test_a_paused_run_stays_paused_over_restarts_and_goes_on_where_it_was() -> None:
    world = begun(4)
    world.leader.order(ordered(1, Kind.PAUSE, run=RUN))
    obeyed(world, 1)
    assert world.run_until(lambda: everybody(world, MemberState.PAUSED), ROUND_S)
    n = len(world.chain.commits)
    for process in (world.leader, world.member(0)):
        world.crash(process, 2.0)
        world.run_for(ROUND_S)
    assert Outcome.COMMITTED not in committed_since(world, n)
    assert world.leader.rounds.ledger.paused
    world.leader.order(ordered(2, Kind.RESUME, run=RUN))
    commits(world, 2, 4 * ROUND_S)
    assert not world.leader.rounds.ledger.paused


def test_an_amendment_is_in_force_for_all_also_for_who_was_away() -> None:
    world = begun(4)
    world.crash(world.member(3), 3 * ROUND_S)
    spec = amended(world.spec, work={"h": 2})
    world.leader.order(ordered(1, Kind.AMEND, run=RUN, spec=spec))
    obeyed(world, 1)
    assert world.run_until(lambda: world.leader.rounds.ledger.spec_revision == 2, 2 * ROUND_S)
    commits(world, 2, 3 * ROUND_S)
    assert world.chain.commits[-1][1].h == 2
    assert all(leases.count(seat.ranges) == 2 for seat in world.leader.rounds.ledger.seats)
    late = world.member(3)
    before = counted(world, late.name)
    assert world.run_until(lambda: counted(world, late.name) > before, 8 * ROUND_S)
    assert late.session.spec.revision == 2


def test_who_is_evicted_is_out_for_good() -> None:
    world = begun(4)
    victim = world.member(1)
    world.leader.order(ordered(1, Kind.EVICT, run=RUN, peer=victim.name, reason="it lies"))
    obeyed(world, 1)
    assert world.run_until(lambda: victim.stopped is not None, ROUND_S)
    assert victim.stopped is not None
    assert (victim.stopped.code, victim.stopped.reason) == (5, "this peer has been evicted from the run: it lies")
    before = counted(world, victim.name)
    commits(world, 2, 3 * ROUND_S)
    assert counted(world, victim.name) == before
    assert victim.name not in world.leader.rounds.ledger.voters


def test_the_end_is_told_to_everybody() -> None:
    world = begun(4)
    last = world.leader.rounds.ledger.round + 2
    world.leader.order(ordered(1, Kind.END, run=RUN, round_=last, reason="enough"))

    def stopped() -> list[MemberProcess]:
        return [member for member in world.members.values() if member.stopped is not None]

    assert world.run_until(lambda: len(stopped()) == 4, 5 * ROUND_S)
    assert {(m.stopped.code, m.stopped.reason) for m in stopped() if m.stopped is not None} == {
        (0, "the operator has ended the run: enough")
    }
    assert world.leader.rounds.ledger.round == last


@pytest.mark.parametrize("unreachable", [(), (3,)])
def test_the_run_goes_back_and_all_hold_the_old_state_again(unreachable: tuple[int, ...]) -> None:
    world = World(Options(n_members=4, h=3, unreachable=unreachable)).start()
    assert world.run_until(lambda: world.n_committed >= 4, 60.0)
    _, body, head = [each for each in world.chain.commits if each[1].outcome is Outcome.COMMITTED][1]
    target = world.chain.ledgers[head]
    tokens = world.leader.rounds.ledger.tokens
    world.leader.order(ordered(1, Kind.ROLLBACK, run=RUN, round_=body.round, head=head))
    obeyed(world, 1)
    ledger = world.leader.rounds.ledger
    assert ledger.rollbacks == 1

    def all_went_back() -> bool:
        held = [member.disk.ledger for member in world.members.values()]
        return all(books is not None and books.rollbacks == 1 for books in held)

    assert world.run_until(all_went_back, 60.0)
    assert target.tokens < tokens
    commits(world, 3, 6 * ROUND_S)
    after = world.leader.rounds.ledger
    assert after.tokens == world.chain.n_used * world.spec.work.batch_tokens
    assert after.round > ledger.round


def test_an_order_survives_a_leader_that_is_killed_at_any_instant() -> None:
    for delay_s in (0.0, 0.05, 0.3, 1.0):
        world = begun(3)
        world.leader.order(ordered(1, Kind.PAUSE, run=RUN))
        world.run_for(delay_s)
        world.crash(world.leader, 1.0)
        obeyed(world, 1, 4 * ROUND_S)
        assert sum(len(body.orders) for _, body, _ in world.chain.commits) == 1


def test_a_forged_order_is_seen() -> None:
    world = begun(3)
    with pytest.raises((KeyError, Violated)):
        world.chain.orders_of(replace(world.chain.commits[-1][1], orders=(b"forged",)))
