"""When a trainer's checkpoint is due, what an earlier process left, and what came of writing one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from blake3 import blake3

from node.training.checkpoint import (
    EVERY_S,
    SHARE_MOST,
    Belonging,
    Checkpoint,
    Checkpoints,
    Disk,
    Position,
    Tensors,
    resumes,
)
from node.training.link import Remark, Report, Saved
from protos.messages import Range

VALUE_BYTES = 4
STATE_BYTES_PER_VALUE = 16
"""Room for a second copy of θ and momentum, in fp32, is left to the node's state, and as much again."""
QUICK_BYTES = 2**26
QUICK_S = 0.1
"""One that is no larger, and took no longer the last time, is written before others are told what it belongs to."""


class Keeper:
    """Writes a trainer's checkpoints, and holds the one that an earlier process left until it is known what it is for.

    Args:
        folder: where they lie.
        run: the run's id.
        layout: digest of the model's layout, hex.
        spec: the RunSpec's bytes.
        n_values: of the flat vector.
        n_moments: vectors that the inner optimiser keeps.
        report: takes what came of it.
        clock: seconds that only go forward.
        disk: the file system.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        layout: str,
        spec: bytes,
        n_values: int,
        n_moments: int,
        report: Callable[[Report], None],
        clock: Callable[[], float],
        disk: Disk | None = None,
    ) -> None:
        self.belongs = Belonging(run, layout, blake3(spec).hexdigest())
        self.n_unsaved = 0
        """Batches used since the last checkpoint."""
        self._report, self._clock = report, clock
        self._bytes_each = VALUE_BYTES * n_values * (1 + n_moments)
        self._reserve_bytes = STATE_BYTES_PER_VALUE * n_values
        self._files = Checkpoints(folder, reserve_bytes=self._reserve_bytes, disk=disk)
        self._found, self._remarks = self._files.newest(run, layout)
        self._saved_at = clock()
        self._save_s = 0.0

    def amend(self, spec: bytes) -> None:
        """Checkpoints from now on are of this RunSpec."""
        self.belongs = replace(self.belongs, spec=blake3(spec).hexdigest())

    @property
    def moments_round(self) -> int:
        """The round in which the moments that were found stood; 0 without any."""
        found = self._found
        return found.position.round if found is not None and found.position.cold_step else 0

    def say(self) -> None:
        """Report what was found amiss, and a disk that is too small, before anything is lost for want of it."""
        for remark in self._remarks:
            self._report(Remark(remark))
        self._remarks = []
        try:
            if self._files.has_room(self._bytes_each):
                return
            problem = self._problem(errno.ENOSPC)
        except OSError as error:
            problem = self._problem(error.errno)
        self._report(Saved(0, 0, 0.0, problem))

    # -- what an earlier process left -----------------------------------------------------------------------------

    def moments_for(self, round_: int) -> Checkpoint | None:
        """The checkpoint that was found, for its moments, at an anchor that is the state after this round.

        One of a later round than the one that begins is of a past that the run has taken back.
        """
        found = self._found
        if found is not None and found.position.round > round_ + 1:
            self.drop(f"it is of round {found.position.round}, and the run is at round {round_ + 1}")
        return self._found

    def progress_for(self, anchor: str, ranges: tuple[Range, ...], batch_scale: int) -> Checkpoint | None:
        """The same, where training on these ranges can go on from it. Asked once: afterwards it is forgotten."""
        found, self._found = self._found, None
        if found is None or not found.position.used:
            return None
        return None if resumes(found.position, self.belongs, anchor, ranges, batch_scale) else found

    def drop(self, why: str = "") -> None:
        """Forget what was found."""
        if self._found is not None and why:
            self._report(Remark(f"the checkpoint on disk is not used: {why}"))
        self._found = None

    # -- writing --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A training begins: the next checkpoint within it is due a while from now."""
        self._saved_at = self._clock()

    def is_due(self, now: float) -> bool:
        """Whether one should be written between two steps."""
        return self.n_unsaved > 0 and now - self._saved_at >= max(EVERY_S, self._save_s / SHARE_MOST)

    @property
    def is_quick(self) -> bool:
        """Whether writing one holds up nobody, as far as can be told."""
        return self._bytes_each <= QUICK_BYTES and self._save_s <= QUICK_S

    def save(self, position: Position, tensors: Tensors) -> None:
        """Write one, if there is anything new; what goes wrong with the disk is reported and stops nothing."""
        if not self.n_unsaved:
            return
        began_at = self._clock()
        problem = ""
        try:
            self._files.save(position, tensors)
            self.n_unsaved = 0
        except OSError as error:
            problem = self._problem(error.errno)
        self._saved_at = self._clock()
        self._save_s = self._saved_at - began_at
        step = sum(span.count for span in position.used) // max(position.batch_scale, 1)
        self._report(Saved(position.round, step, self._save_s, problem))

    def _problem(self, number: int | None) -> str:
        """What the disk said, in words that stay the same while it is the same."""
        said = os.strerror(number or errno.EIO)
        if number != errno.ENOSPC:
            return said
        return (
            f"{said}: one takes {self._bytes_each / 1e6:.1f} MB, beside {self._reserve_bytes / 1e6:.1f} for the state"
        )
