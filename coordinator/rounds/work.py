"""How much each seat has to do: steps and batches a step, a pure function of measured speed and the RunSpec.

With `work.round_s` a round should take so long for everybody: who would finish early takes an integer multiple of the
batch at the same H and learning rate, who would finish late makes fewer steps, never on a smaller batch. Without it
every seat has H steps of one batch, so that a run can be repeated exactly, and only the deadline cuts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from coordinator.rounds import leases
from protos.messages import PeerId, Seat
from protos.runspec import RunSpec

LEASE_ROUNDS_MOST = 4
"""A lease that grows over empty rounds holds at most so many times H steps; then its member waits."""
LATE = 1.05
"""Who would be later than round_s by no more than this still makes all of H: the deadline grants as much."""
NO_SEAT = "no seat: "
"""What the reason begins with by which a leader tells a member that it has no seat in a round, and why."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a seat asks for: inner steps since the anchor, and batches that one of them takes."""

    steps: int
    batch_scale: int = 1


Works = Mapping[PeerId, Work]


def asked(seat: Seat | None) -> int:
    """Steps that a seat's lease holds; without a seat none."""
    return leases.count(seat.ranges) // max(seat.batch_scale, 1) if seat is not None else 0


def of(seat: Seat) -> Work:
    """What a seat asks for. Raises ValueError where its lease is no whole number of steps."""
    n_batches = leases.count(seat.ranges)
    if seat.batch_scale < 1 or n_batches % seat.batch_scale:
        raise ValueError(f"{n_batches} batches are no steps of {seat.batch_scale}")
    return Work(n_batches // seat.batch_scale, seat.batch_scale)


def whole(peers: Collection[PeerId], spec: RunSpec) -> dict[PeerId, Work]:
    """H steps of one batch for each."""
    return {peer: Work(spec.work.h) for peer in peers}


def steps_min(spec: RunSpec) -> int:
    """Steps below which a contribution does not count."""
    return min(spec.work.steps_min, spec.work.h)


def work_for(tokens_per_s: float, spec: RunSpec) -> Work | None:
    """What a member of this speed (0: not known) is to do in a round, or None if it can't make `steps_min`."""
    work = spec.work
    if work.round_s <= 0 or tokens_per_s <= 0:
        return Work(work.h)
    possible = work.round_s * tokens_per_s / work.batch_tokens  # steps of one batch
    if possible >= work.h * work.batch_scale_max:  # it may be infinite: anybody can say any figure
        return Work(work.h, work.batch_scale_max)
    if possible >= work.h:
        return Work(work.h, int(possible // work.h))
    if possible * LATE >= work.h:
        return Work(work.h)
    return Work(int(possible)) if possible >= steps_min(spec) else None


def too_slow(tokens_per_s: float, spec: RunSpec) -> str:
    """What a member that can't make `steps_min` should read: its figure and the need. Empty where it can."""
    if work_for(tokens_per_s, spec) is not None:
        return ""
    need = steps_min(spec) * spec.work.batch_tokens / spec.work.round_s
    return (
        f"this machine trains {tokens_per_s:.3g} tokens/s, and this run needs {need:.3g}:"
        f" {steps_min(spec)} steps of {spec.work.batch_tokens} tokens in {spec.work.round_s:g} s"
    )


def going_on(seat: Seat, asks: Work, done: int, spec: RunSpec) -> Work:
    """What to ask where a round ends empty and its member goes on: as much again beyond the steps that it has done."""
    had = of(seat)
    done = min(done, had.steps)
    return Work(max(had.steps, min(done + asks.steps, LEASE_ROUNDS_MOST * spec.work.h)), had.batch_scale)


def check(asks: Work, before: Seat | None, spec: RunSpec) -> None:
    """Raise ValueError if a leader may not ask for this.

    `before`: the seat of an empty round, whose lease goes on and may grow.
    """
    work = spec.work
    if before is not None:
        had = of(before)
        if asks.batch_scale != had.batch_scale:
            raise ValueError("a lease that goes on has another batch scale")
        if not had.steps <= asks.steps <= max(had.steps, LEASE_ROUNDS_MOST * work.h):
            raise ValueError(f"a lease of {had.steps} steps goes on with {asks.steps}")
        return
    if not 1 <= asks.batch_scale <= work.batch_scale_max:
        raise ValueError(f"a batch scale of {asks.batch_scale}")
    if not steps_min(spec) <= asks.steps <= work.h or (asks.batch_scale > 1 and asks.steps != work.h):
        raise ValueError(f"a seat of {asks.steps} steps of {asks.batch_scale} batches")
