"""Members that hold still without being gone: their owner has paused them, or their data do not come."""

from __future__ import annotations

import pytest

from node.session import effects as fx
from node.session import events as ev
from node.session.effects import Effect
from protos.messages import MemberEntry, MemberState
from tests.sim.member import MemberProcess
from tests.sim.watching import DEATH_S, ROUND_S, begun, commits, counted, counts_again, story, trained_half
from tests.sim.world import World

WORKS = (fx.FetchData, fx.StartTraining, fx.Encode, fx.BeginExchange)
"""What takes a contributor's machine or line for the run's training."""


def pause(world: World, member: MemberProcess, paused: bool) -> None:
    world.push(world.now, member, member.decide, (ev.PauseAsked("user", paused),))


def watched(member: MemberProcess, monkeypatch: pytest.MonkeyPatch) -> list[Effect]:
    """What its session has done from now on."""
    did: list[Effect] = []
    carry_out = member._carry_out

    def noted(effect: Effect) -> None:
        did.append(effect)
        carry_out(effect)

    monkeypatch.setattr(member, "_carry_out", noted)
    return did


def entry_of(world: World, member: MemberProcess) -> MemberEntry:
    return next(entry for entry in world.chain.commits[-1][1].members if entry.peer == member.name)


def test_a_pause_within_a_round_loses_no_step() -> None:
    """The others are slower, so the round is not over before it goes on."""
    world = begun(3, h=4, step_s=(0.5, 2.0, 2.0))
    held = world.member(0)
    assert world.run_until(lambda: trained_half(world, held.name), 30.0)
    made = held.batches()
    pause(world, held, True)
    world.run_for(3.0)
    assert held.session.state() is MemberState.PAUSED
    assert held.batches() == made
    pause(world, held, False)
    commits(world, 1, 2 * ROUND_S)
    assert (entry_of(world, held).steps, entry_of(world, held).counted) == (4, True)
    assert held.batches() - made <= 4 + 1  # what was left of the round, and little of the next one


@pytest.mark.parametrize("trains", [True, False], ids=["in training", "when it has trained"])
def test_nobody_waits_for_who_is_paused_and_it_neither_trains_nor_exchanges(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = begun(4)
    held = world.member(0)
    state = MemberState.TRAINING if trains else MemberState.READY
    assert world.run_until(lambda: held.session.state() is state and held.session.view().step > 0, 30.0)
    pause(world, held, True)
    commits(world, 1, ROUND_S)  # the round that runs may count what was ready
    did, made, n_counted, began_at = watched(held, monkeypatch), held.batches(), counted(world, held.name), world.now
    commits(world, 3, 3 * ROUND_S)
    assert world.now - began_at < 3 * (ROUND_S / 2)
    assert [effect for effect in did if isinstance(effect, WORKS)] == []
    assert (held.batches(), counted(world, held.name)) == (made, n_counted)
    dropped = [text for text in held.said if "went on without this node (paused by user)" in text]
    assert len(dropped) == trains, "what it had made of the round is told to be lost, once"
    assert held.disk.ledger is not None
    assert held.disk.ledger.round >= world.round - 1, "it follows, and needs no state when it goes on"
    assert "user" in held.session.view().paused_by
    pause(world, held, False)
    counts_again(world, held.name, 3 * ROUND_S)


def test_whose_data_do_not_come_says_which_and_holds_nobody_up() -> None:
    world = begun(4)
    held = world.member(0)
    held.data_until = world.now + 40.0
    commits(world, 1, ROUND_S)
    assert world.run_until(lambda: held.session.view().waiting_for.startswith("training data"), ROUND_S)
    seat = world.leader.rounds.ledger.seat_of(held.name)
    assert seat is not None
    first = seat.ranges[0].start
    assert held.session.view().waiting_for.startswith(f"training data: batches {first} to ")
    n_counted, n_before, began_at = counted(world, held.name), world.n_committed, world.now
    limit_s = held.data_until - world.now
    world.run_until(lambda: world.n_committed >= n_before + 3, limit_s)
    assert world.n_committed >= n_before + 3, story(world)
    assert world.now - began_at <= 3 * (ROUND_S / 2 + DEATH_S)
    assert counted(world, held.name) == n_counted
    world.run_for(held.data_until - world.now)
    counts_again(world, held.name, 3 * ROUND_S)
