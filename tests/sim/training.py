"""The trainer of a simulated member: it makes a step every so often, and encodes what came of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aggregation.digest import tagged_hash
from coordinator.rounds import leases, policy
from node.session import effects as fx
from node.session import events as ev
from node.session.machine import Session
from protos.messages import PeerId, Range
from tests.sim.chain import Violated
from tests.sim.disk import MemberDisk
from tests.sim.process import Process

if TYPE_CHECKING:
    from tests.sim.world import World


@dataclass(slots=True)
class Trainer:
    """Its Δ is lost with the process."""

    up: bool = False
    round: int = 0
    anchor: bytes = b""
    ranges: tuple[Range, ...] = ()
    scale: int = 1
    began_at: float | None = None
    n_before: int = 0  # steps since the anchor, when it began
    generation: int = 0
    codes: bytes = b""  # root of the encoded Δ
    stint: int = 0  # counts when it began or was held up


class Training(Process):
    """A process with a session, a disk and a trainer."""

    session: Session

    def __init__(self, world: World, name: PeerId, number: int, *, observer: bool) -> None:
        super().__init__(world, name)
        options = world.options
        self.observer, self.number = observer, number
        self.reachable = observer or number not in options.unreachable
        self.step_s = options.step_s[number % len(options.step_s)]
        self.trains = not observer and number not in options.never_trains
        self.diverges = not observer and number in options.diverges
        self.disk = MemberDisk()
        self.trainer = Trainer()
        self.next_step_s = self.step_s
        """From the next round on."""
        self.batches_made = 0  # before it began the last time

    def decide(self, event: ev.Event) -> None:
        raise NotImplementedError

    def load_anchor(self, round_: int) -> None:
        trainer = self.trainer
        self.batches_made += self._steps_since() * self.trainer.scale
        self.step_s = self.next_step_s
        trainer.generation += 1
        trainer.began_at, trainer.ranges, trainer.n_before = None, (), 0
        trainer.round = round_
        trainer.anchor = self.disk.ledger.digest if self.disk.ledger else b""

    def _trainer_up(self) -> None:
        self.trainer.up = True
        self.decide(ev.TrainerUp(0, self.world.spec.work.batch_tokens / self.step_s))

    def kill_trainer(self) -> None:
        """It comes back by itself after a while."""
        if self.trainer.up:
            self.trainer = Trainer(generation=self.trainer.generation + 1, codes=self.trainer.codes)
            self.decide(ev.TrainerDown("killed"))
            self.later(self.world.options.restart_s, self._trainer_up)

    def _start_training(self, effect: fx.StartTraining) -> None:
        trainer = self.trainer
        held = self.disk.ledger
        if held is None or trainer.anchor != held.digest or effect.round != held.round + 1:
            raise Violated(f"{self.name} trains from another anchor than its state")
        n_before = self._steps_made()
        if not leases.begins_with(effect.ranges, leases.prefix(trainer.ranges, n_before * trainer.scale)):
            raise Violated(f"{self.name} trains on without the lease of what it has trained")
        self.batches_made += self._steps_since() * self.trainer.scale
        trainer.n_before, trainer.round, trainer.codes = n_before, effect.round, b""
        trainer.began_at, trainer.ranges, trainer.scale = self.world.now, effect.ranges, effect.batch_scale
        self._make_steps()

    def pause_training(self, paused: bool) -> None:
        """Its steps so far stay; a trainer that has encoded, or has nothing to train, just waits."""
        trainer = self.trainer
        if paused and trainer.began_at is not None:
            self.batches_made += self._steps_since() * trainer.scale
            trainer.began_at, trainer.n_before = None, self._steps_made()
            trainer.stint += 1
        elif not paused and trainer.ranges and not trainer.codes:
            trainer.began_at = self.world.now
            self._make_steps()

    def _make_steps(self) -> None:
        trainer = self.trainer
        trainer.stint += 1
        n_before, n_steps = trainer.n_before, leases.count(trainer.ranges) // trainer.scale
        identity = (trainer.generation, trainer.stint, trainer.round)
        self._progress(n_before, n_steps, *identity)
        for step in sorted({n_before + 1, n_steps}):
            if step > n_before:
                self.later(self._step_s() * (step - n_before), self._progress, step, n_steps, *identity)

    def _step_s(self) -> float:
        return self.step_s * self.trainer.scale

    def batches(self) -> int:
        """That it has trained in all its life, counted or not."""
        return self.batches_made + (self._steps_since() * self.trainer.scale if self.alive else 0)

    def _steps_since(self) -> int:
        """Since it began the last time."""
        return self._steps_made() - self.trainer.n_before

    def _steps_made(self) -> int:
        """Since the anchor."""
        trainer = self.trainer
        n_most = leases.count(trainer.ranges) // trainer.scale
        since = 0 if trainer.began_at is None else int((self.world.now - trainer.began_at) / self._step_s() + 1e-9)
        return min(n_most, trainer.n_before + since)

    def _progress(self, step: int, n_steps: int, generation: int, stint: int, round_: int) -> None:
        trainer = self.trainer
        if (generation, stint, round_) == (trainer.generation, trainer.stint, trainer.round):
            batch_tokens = self.world.spec.work.batch_tokens
            left_s = self._step_s() * (n_steps - step)
            tokens_per_s = batch_tokens / self.step_s
            self.decide(ev.Progressed(round_, step, step * trainer.scale * batch_tokens, 1.0, tokens_per_s, left_s))

    def _encode(self, round_: int, generation: int) -> None:
        trainer, spec = self.trainer, self.world.spec
        steps = self._steps_made()
        if generation != trainer.generation or (trainer.began_at is None and not steps):
            self.decide(ev.EncodeFailed(round_, "the trainer stopped"))
            return
        if self.diverges:
            self.decide(ev.EncodeFailed(round_, "Δ is not finite"))
            return
        if self.disk_is_full():
            self.decide(ev.EncodeFailed(round_, "the disk is full"))
            return
        self.batches_made += self._steps_since() * self.trainer.scale
        trainer.began_at, trainer.n_before = None, steps
        identity = (self.name, str(round_), str(steps), str(self.incarnation), str(generation))
        trainer.codes = tagged_hash("delta", trainer.anchor, *(part.encode() for part in identity))
        norm_sq = (1.0 + 0.1 * (self.number % 7)) * max(steps, 1)
        self.decide(
            ev.Encoded(
                round_,
                steps,
                steps * trainer.scale * spec.work.batch_tokens,
                leases.prefix(trainer.ranges, steps * trainer.scale),
                steps * spec.inner.lr,
                1.0,
                trainer.codes,
                (norm_sq,) * policy.grid(spec).n_chunks,
            )
        )
