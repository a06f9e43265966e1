"""Error feedback on disk: what a coarse codec left over goes along with the next contribution, and never twice.

    work/residual.bin     what is left over of all that was encoded and counted so far
    work/residual.next    what would be left over if the contribution that it belongs to counts

The trainer reads the first and writes the second while it encodes. Once a commit counts that very contribution the
second takes the place of the first, by a rename; if a commit of its round does not, it is dropped. A residual also
says how many tokens of this peer had counted when it began to hold. That figure is in the books after any commit, so
whatever happened in between (a crash, a fetched state, another branch of the chain), a residual that has gone out
with a contribution that counted, and was not replaced by what that one left over, shows as out of date. It is dropped
then: what it held is lost, and not counted twice.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from aggregation import codec
from node.files import sync_folder, writing
from node.state import Held
from node.training.shared import RESIDUAL_HEAD_BYTES, create
from protos import hashes, wire
from protos.messages import Body, PeerId
from protos.runspec import RunSpec

CURRENT, NEXT = "residual.bin", "residual.next"
_HEAD = struct.Struct("<8s32sQQ32s")
_MAGIC = b"barnres1"
_NO_ROOT = bytes(32)


@dataclass(frozen=True, slots=True)
class Feedback:
    """What the trainer is given: paths, the first one empty where nothing is left over."""

    residual: str
    next: str


@dataclass(frozen=True, slots=True)
class _Head:
    """What stands before the values: a residual of what kind, of which round, since which credit."""

    kind: bytes  # hash of the run, this peer, layout and codec
    round: int  # whose contribution left it over
    credit: int  # tokens of this peer that had counted when it began to hold
    root: bytes  # of that contribution; zeros while it is not whole


class Residuals:
    """One node's residuals. Methods block for the disk, and are called one at a time.

    Args:
        folder: where the two files are; it exists.
        run: with this peer's id and the spec's layout and codec, what a residual belongs to: any other is dropped.
    """

    def __init__(self, folder: Path, run: PeerId, me: PeerId, spec: RunSpec) -> None:
        self._current, self._next = folder / CURRENT, folder / NEXT
        self._me = me
        self._n_bytes = RESIDUAL_HEAD_BYTES + 4 * spec.model.n_values
        self._active = codec.feedback_decay(spec.codec.name) is not None
        parts = (run, me, spec.model.layout_digest, spec.codec.name, str(spec.codec.block))
        self._kind = hashes.tagged_hash("residual", *(part.encode() for part in parts))

    def settle(self, held: Held | None) -> None:
        """Bring the files in line with the held state: at the start, and whenever it is another one.

        May be cut off anywhere, and repeated. Raises MachineError.
        """
        with writing(self._current.parent, "what encoding left over", self._n_bytes):
            pending, current = self._read(self._next), self._read(self._current)
            if pending is None:
                self._next.unlink(missing_ok=True)
            if current is None:
                self._current.unlink(missing_ok=True)
            if held is None:
                return
            credit = held.ledger.credit.get(self._me, 0)
            if pending is not None and pending.round <= held.ledger.round:
                if pending.root != _NO_ROOT and pending.root == _counted_root(held, self._me, pending.round):
                    self._advance(credit)
                    return
                self._next.unlink()
            if current is not None and current.credit != credit:
                self._current.unlink()

    def begin(self, held: Held) -> Feedback | None:
        """A fresh next residual, for a contribution to the round after the held state; None without error feedback.

        Call `settle` with the same state before; where that failed, what is left over may be out of date, and is then
        not given to the trainer. Raises DiskFull or MachineError.
        """
        if not self._active:
            return None
        credit = held.ledger.credit.get(self._me, 0)
        head = _Head(self._kind, held.ledger.round + 1, 0, _NO_ROOT)
        with writing(self._next.parent, "what encoding leaves over", self._n_bytes):
            create(self._next, self._n_bytes)
            _write_head(self._next, head)
            current = self._read(self._current)
        return Feedback(str(self._current) if current is not None and current.credit == credit else "", str(self._next))

    def seal(self, round_: int, root: bytes) -> None:
        """The contribution with this root is encoded: what it would leave over is whole, and put on disk.

        Nothing happens if another contribution's, or none, is there by now. Raises MachineError.
        """
        with writing(self._next.parent, "what encoding leaves over", self._n_bytes):
            head = self._read(self._next)
            if head is not None and head.round == round_ and head.root == _NO_ROOT:
                _sync(self._next)  # the values before the word that they are whole
                _write_head(self._next, _Head(self._kind, round_, head.credit, root))
                _sync(self._next)

    def _advance(self, credit: int) -> None:
        head = self._read(self._next)
        if head is not None:
            _write_head(self._next, _Head(head.kind, head.round, credit, head.root))
            _sync(self._next)
            self._next.replace(self._current)
            sync_folder(self._current.parent)

    def _read(self, path: Path) -> _Head | None:
        """The head of a residual of ours, or None."""
        try:
            if not self._active or path.stat().st_size != self._n_bytes:
                return None
            with path.open("rb") as file:
                magic, kind, round_, credit, root = _HEAD.unpack(file.read(_HEAD.size))
        except FileNotFoundError:
            return None
        return _Head(kind, round_, credit, root) if (magic, kind) == (_MAGIC, self._kind) else None


def _counted_root(held: Held, me: PeerId, round_: int) -> bytes | None:
    """The root of this peer's contribution to a round, if it is the held state's and counted it."""
    body = wire.decode(Body, held.commit.body)
    if body.round != round_:
        return None  # others came after it, and it is not known what that one counted
    return next((entry.commitment_root for entry in body.members if entry.peer == me and entry.counted), None)


def _write_head(path: Path, head: _Head) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(file, _HEAD.pack(_MAGIC, head.kind, head.round, head.credit, head.root), 0)
    finally:
        os.close(file)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
