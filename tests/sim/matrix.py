"""Every phase of a round x every fault: a small world is brought to the phase, hit, and must go on.

    python -m tests.sim.matrix EXCHANGE half_open --seed 7

runs one case and prints its story; `--seeds N` runs N seeds of one, or of all that match (`.` for any).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any
from zlib import crc32

from coordinator.rounds.attempt import Attempt, Phase
from protos.messages import MemberState
from tests.sim.chain import Violated
from tests.sim.faulty import FAULTS, Fault
from tests.sim.invariants import Watch, check_state
from tests.sim.member import MemberProcess
from tests.sim.options import SHORT, Options
from tests.sim.scene import Scene, leading
from tests.sim.watching import counted
from tests.sim.world import World, heads

DEADLINES = SHORT.model_copy(update={"stand_in_s": 6.0, "minority_wait_s": 25.0})
BEGIN_S = 60.0
PHASE_S = 40.0
AFTER_ROUNDS = 2
AFTER_S = 120.0
AGREE_S = 60.0


class NotSeen(AssertionError):
    """The phase did not come."""


def small(seed: int, **types: Any) -> World:
    """Four members of different speed, an observer, stand-ins, and clocks that all show something else."""
    rng = Random(seed)
    options = Options(
        seed=seed,
        n_members=4,
        stand_ins=True,
        h=3,
        n_chunks=3,
        chunk_values=2**16,
        step_s=tuple(rng.uniform(0.8, 1.2) for _ in range(4)),
        delay_s=(0.02, 0.1),
        deadlines=DEADLINES,
        replicas=rng.choice(["auto", 1, 2]),
        rule=rng.choice(["default", "mean"]),
    )
    world = World(options, **types)
    for process in (*world.leaders, *world.members.values()):
        process.clock_offset_s, process.clock_rate = rng.uniform(0.0, 5000.0), 1.0 + rng.uniform(-2e-4, 2e-4)
    return world


# -- phases ----------------------------------------------------------------------------------------------------------


def _attempt(world: World) -> Attempt | None:
    leader = leading(world)
    return leader.rounds._attempt if leader is not None else None


def _in_phase(phase: Phase) -> Callable[[World, MemberProcess], bool]:
    def seen(world: World, victim: MemberProcess) -> bool:
        leader = leading(world)
        return leader is not None and leader.rounds.phase is phase

    return seen


def _trains(world: World, victim: MemberProcess) -> bool:
    return victim.session.state() is MemberState.TRAINING and victim.session.view().step > 0


def _forms(world: World, victim: MemberProcess) -> bool:
    now = _attempt(world)
    return _in_phase(Phase.COMMITMENT)(world, victim) and now is not None and victim.name not in now.commitments


def _reduces(world: World, victim: MemberProcess) -> bool:
    now = _attempt(world)
    return now is not None and bool(now.results)


def _applies(world: World, victim: MemberProcess) -> bool:
    return victim.session.state() is MemberState.APPLYING


def _until(world: World, seen: Callable[[World, MemberProcess], bool], victim: MemberProcess) -> None:
    if not world.run_until(lambda: seen(world, victim), PHASE_S):
        raise NotSeen(f"{seen.__name__} was not seen")


def _plain(seen: Callable[[World, MemberProcess], bool]) -> Callable[[World, MemberProcess], MemberProcess]:
    def bring(world: World, victim: MemberProcess) -> MemberProcess:
        _until(world, seen, victim)
        return victim

    return bring


def _committed(world: World, victim: MemberProcess) -> MemberProcess:
    """The commit is made, and on its way to all but its leader."""
    round_ = world.round
    _until(world, lambda world, _: world.round > round_, victim)
    return victim


def _prepare(world: World, victim: MemberProcess) -> MemberProcess:
    """The coordinator is dead, and a stand-in asks for promises; the victim is another one."""
    world.crash(world.leader, 60.0)
    _until(world, _in_phase(Phase.PREPARE), victim)
    leader = leading(world)
    name = leader.name if leader is not None else ""
    others = [member for member in world.members.values() if not member.observer and member.name != name]
    return victim if victim in others else others[0]


def _catching_up(world: World, victim: MemberProcess) -> MemberProcess:
    """The victim has missed two rounds and looks for what it lacks."""
    victim.crash()
    wanted = world.n_committed + 2
    _until(world, lambda world, _: world.n_committed >= wanted, victim)
    victim.start()
    _until(world, lambda _, victim: bool(victim.lines) and victim.session.state() is MemberState.JOINING, victim)
    return victim


PHASES: dict[str, Callable[[World, MemberProcess], MemberProcess]] = {
    "TRAIN": _plain(_trains),
    "PREPARE": _prepare,
    "COMMITMENT": _plain(_forms),
    "EXCHANGE": _plain(_in_phase(Phase.EXCHANGE)),
    "REDUCE": _plain(_reduces),
    "VOTE": _plain(_in_phase(Phase.VOTE)),
    "COMMIT": _committed,
    "APPLY": _plain(_applies),
    "CATCHING_UP": _catching_up,
}


# -- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One phase and one fault. The same seed has the same history."""

    phase: str
    fault: str

    def __str__(self) -> str:
        return f"{self.phase}-{self.fault}"

    @property
    def seed(self) -> int:
        return crc32(str(self).encode())

    def command(self, seed: int) -> str:
        return f"python -m tests.sim.matrix {self.phase} {self.fault} --seed {seed}"


CASES = [Case(phase, fault) for phase in PHASES for fault in FAULTS]


def run(case: Case, seed: int | None = None, *, story: bool = False) -> World:
    """Run one case. What goes wrong says how to see it again."""
    seed = case.seed if seed is None else seed
    world = small(seed)
    world.story = [] if story else None
    try:
        _run(world, case)
    except Exception as error:
        error.add_note(f"again: {case.command(seed)}")
        error.add_note("\n".join((world.story or [])[-60:]))
        raise
    return world


def _run(world: World, case: Case) -> None:
    Watch(world)
    world.start()
    _must(world.run_until(lambda: world.n_committed >= 2, BEGIN_S), world, "the run does not begin")
    victim = PHASES[case.phase](world, world.member(world.rng.randrange(4)))
    leader = leading(world)
    if leader is None:
        raise NotSeen("nobody leads")
    scene = Scene(world, victim, leader)
    fault: Fault = FAULTS[case.fault]
    world.trace("fault", case)
    before = world.n_committed
    fault.hit(scene)
    hit_at = world.now
    if fault.goes_on_in_s:
        # In PREPARE the leader that is hit is the second one: the next turn comes after twice the silence, and later.
        within_s = fault.goes_on_in_s * (3 if case.phase == "PREPARE" else 1)
        went_on = world.run_until(lambda: world.n_committed >= before + fault.needs, within_s)
        _must(went_on, world, "the others do not go on")
    if hit_at + fault.for_s > world.now:
        world.run_for(hit_at + fault.for_s - world.now)
    _recovers(world, scene)


def _recovers(world: World, scene: Scene) -> None:
    """Training goes on, all hold the same, and who was hit counts again."""
    wanted = world.n_committed + AFTER_ROUNDS
    _must(world.run_until(lambda: world.n_committed >= wanted, AFTER_S), world, "training does not go on")
    n_counted = counted(world, scene.victim.name)
    again = world.run_until(lambda: counted(world, scene.victim.name) > n_counted, AFTER_S)
    _must(again, world, f"{scene.victim.name} does not count again")
    _must(world.run_until(lambda: _all_agree(world), AGREE_S), world, "they do not come together")
    for member in world.members.values():
        check_state(world, member)
        _must(member.alive, world, f"{member.name} is not back")


def _all_agree(world: World) -> bool:
    held = set(heads(world.members).values())
    return held == {world.leader.rounds.ledger.head} and world.leader.alive


def _must(holds: bool, world: World, what: str) -> None:
    if not holds:
        raise Violated(f"{what}\n{_waits(world)}")


def _waits(world: World) -> str:
    lines = [f"at {world.now:.2f}, round {world.round}, {world.n_committed} with contributions"]
    for leader in [*world.leaders, *world.stand_ins.values()]:
        if leader.alive:
            view = leader.rounds.view(leader.now())
            lines.append(f"{leader.name} leads round {view.round}, {view.phase}: {view.waiting_for}")
    for member in world.members.values():
        if member.alive:
            view_of = member.session.view()
            lines.append(f"{member.name} in round {view_of.round} is {view_of.state}: {view_of.waiting_for}")
        else:
            lines.append(f"{member.name} is not alive")
    return "\n".join(lines)


def _matching(phase: str, fault: str) -> Iterator[Case]:
    yield from (case for case in CASES if phase in (".", case.phase) and fault in (".", case.fault))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.matrix", description=__doc__)
    parser.add_argument("phase", choices=[".", *PHASES])
    parser.add_argument("fault", choices=[".", *FAULTS])
    parser.add_argument("--seed", type=int, help="the case's own by default")
    parser.add_argument("--seeds", type=int, default=0, help="run so many, from --seed on (1), and no story")
    asked = parser.parse_args()
    n_failed = 0
    for case in _matching(asked.phase, asked.fault):
        first = case.seed if asked.seed is None and not asked.seeds else (asked.seed or 1)
        for seed in range(first, first + max(asked.seeds, 1)):
            try:
                world = run(case, seed, story=True)
            except AssertionError as error:
                n_failed += 1
                notes = getattr(error, "__notes__", [])
                text = "\n".join([f"{type(error).__name__}: {error}", *(notes[:1] if asked.seeds else notes)])
                print(f"{case} {seed} FAILED\n{text}\n", flush=True)
            else:
                if not asked.seeds:
                    print("\n".join(world.story or []))
                    print(f"{case} {seed}: well, {world.n_committed} rounds in {world.now:.1f} s")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
