"""Every deadline of a RunSpec is in force: what stalls takes as much longer as its deadline is longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aggregation import exchange as ex
from coordinator.rounds.attempt import Phase
from coordinator.rounds.voting import LEADER_SLACK
from node.session import effects as fx
from node.session import events as ev
from protos.messages import Heartbeat
from protos.runspec import DeadlineSpec
from tests.coordinator.rounds.cases import PEERS, SPEC
from tests.node.session import test_redeals as redeals
from tests.node.session.member_script import Script, events_of
from tests.sim.member import MemberProcess
from tests.sim.options import SHORT, Options
from tests.sim.watching import attempt, phase, story, trained_half
from tests.sim.world import World

LONG_S = 400.0
ALONE = SHORT.model_copy(update={"deadline_k": 0.0, "minority_wait_s": 1000.0, "stand_in_s": 1000.0})
"""Nothing else ends what is measured."""


def begun(deadlines: DeadlineSpec, **options: object) -> World:
    world = World(Options(deadlines=deadlines, **{"h": 3, "step_s": (0.4,), **options}))  # type: ignore[arg-type]
    world.start()
    assert world.run_until(lambda: world.n_committed >= 1, 60.0), story(world)
    return world


def until(world: World, done: Callable[[], bool]) -> float:
    """How long it takes."""
    began_at = world.now
    assert world.run_until(done, LONG_S), story(world)
    return world.now - began_at


def hangs(member: MemberProcess, what: str) -> None:
    """From now on the member, which is heard of all the while, never comes to an end with something."""
    setattr(member, what, lambda *_: None)


def in_phase(world: World, wanted: Phase) -> Callable[[], bool]:
    return lambda: phase(world) is wanted


def trainer_hangs(deadlines: DeadlineSpec) -> float:
    world = World(Options(deadlines=deadlines, never_trains=(1,), h=3, step_s=(0.3,)))
    world.start()
    until(world, in_phase(world, Phase.TRAIN))
    return until(world, lambda: phase(world) is not Phase.TRAIN)


def encoding_hangs(deadlines: DeadlineSpec) -> float:
    world = begun(deadlines)
    hangs(world.member(1), "_encode")
    until(world, in_phase(world, Phase.COMMITMENT))
    return until(world, in_phase(world, Phase.EXCHANGE))


def combining_hangs(deadlines: DeadlineSpec) -> float:
    world = begun(deadlines, replicas=1)
    until(world, in_phase(world, Phase.EXCHANGE))
    now = attempt(world)
    assert now is not None
    hangs(world.members[now.reducers[0]], "_combine")
    return until(world, in_phase(world, Phase.VOTE))


def checking_hangs(deadlines: DeadlineSpec) -> float:
    world = begun(deadlines)
    for number in (1, 2):
        hangs(world.member(number), "_verify")
    until(world, in_phase(world, Phase.VOTE))
    return until(world, lambda: phase(world) is not Phase.VOTE)


def silence(deadlines: DeadlineSpec) -> float:
    world = begun(deadlines)
    victim = world.member(1)
    until(world, lambda: trained_half(world, victim.name))
    victim.freeze(LONG_S)
    return until(world, in_phase(world, Phase.EXCHANGE))


def death(deadlines: DeadlineSpec) -> float:
    world = begun(deadlines)
    victim = world.member(1)
    until(world, lambda: trained_half(world, victim.name))
    victim.crash()
    return until(world, in_phase(world, Phase.EXCHANGE))


def beats(deadlines: DeadlineSpec) -> float:
    """Between two heartbeats."""
    script = Script(spec=SPEC.model_copy(update={"deadlines": deadlines}))
    script.line_up()
    return 60.0 / len(script.told(Heartbeat, script.wait(60.0)))


def rows_that_stop(deadlines: DeadlineSpec) -> float:
    """Until a member takes a sender's silence after a deal for a fault."""
    script = Script(redeals.LEDGER, spec=redeals.ONCE.model_copy(update={"deadlines": deadlines}))
    script.train()
    script.commit(redeals.EVIDENCE)
    script.handle(events_of(redeals.EVIDENCE)[1])
    began_at = script.at
    script.now_did = []
    while not script.effects(fx.InExchange):
        script.at += 0.5
        script.handle(ev.Exchanged(redeals.EVIDENCE.plan_hash, ex.Stalled((str(PEERS[1]),))))
    return script.at - began_at


def lost_quorum(deadlines: DeadlineSpec) -> float:
    world = begun(deadlines)
    for number in (1, 2):
        world.member(number).crash()
    return until(world, lambda: any(body.epoch for _, body, _ in world.chain.commits))


def stand_in(deadlines: DeadlineSpec) -> float:
    world = begun(deadlines, stand_ins=True)
    world.leader.crash()
    return until(world, lambda: any(each.alive for each in world.stand_ins.values()))


def absence(deadlines: DeadlineSpec) -> float:
    world = begun(deadlines, stand_ins=True, h=40)
    world.leader.crash()
    return until(world, lambda: world.member(0).stopped is not None)


def stragglers(deadlines: DeadlineSpec) -> float:
    """Of three members one is a little slower, another one much."""
    world = World(Options(deadlines=deadlines, h=30, step_s=(1.0, 1.05, 3.0)))
    world.start()
    until(world, in_phase(world, Phase.TRAIN))
    return until(world, lambda: phase(world) is not Phase.TRAIN)


MAD_S = 1.5
"""Of finish times of 30, 31.5 and 90 s, whose median is 31.5 s."""

STALLS: dict[str, tuple[Callable[[DeadlineSpec], float], tuple[float, float], float]] = {
    "train_limit_s": (trainer_hangs, (20.0, 40.0), 1.0),
    "commitment_s": (encoding_hangs, (8.0, 16.0), LEADER_SLACK),
    "exchange_s": (combining_hangs, (12.0, 24.0), LEADER_SLACK),
    "vote_s": (checking_hangs, (12.0, 24.0), LEADER_SLACK),
    "heartbeat_s": (beats, (1.0, 1.5), 1.0),
    "heartbeat_timeout_s": (silence, (5.0, 10.0), 1.0),
    "gone_grace_s": (death, (2.0, 4.0), 1.0),
    "no_progress_s": (rows_that_stop, (6.0, 12.0), 1.0),
    "minority_wait_s": (lost_quorum, (20.0, 40.0), 1.0),
    "stand_in_s": (stand_in, (6.0, 12.0), 1.0),
    "deadline_k": (stragglers, (2.0, 3.0), MAD_S),
    "max_absence_s": (absence, (50.0, 100.0), 1.0),
}
"""For each deadline what stalls, two values, and how many times their difference it takes longer with the second."""


def test_no_deadline_is_left_out() -> None:
    assert STALLS.keys() == DeadlineSpec.model_fields.keys()


@pytest.mark.parametrize("name", STALLS)
def test_what_stalls_takes_as_long_as_its_deadline_says(name: str) -> None:
    stall, values, times = STALLS[name]
    short_s, long_s = (stall(ALONE.model_copy(update={name: value})) for value in values)
    assert long_s - short_s == pytest.approx(times * (values[1] - values[0]), rel=0.1)
