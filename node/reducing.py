"""A reducer's work on bytes, in threads: rows are kept, hashed and checked, and a chunk's rows become its result."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aggregation import codec, rules
from aggregation.digest import chunk_root, contribution_root_from_path
from aggregation.errors import CodecError, RuleError
from aggregation.exchange import Combined
from coordinator.rounds import policy
from node.results import ResultsArea
from node.rows import LeafHashes, RowFile, leaf_ends
from node.stages import Stages
from protos.messages import ChunkHead, Commitment, PeerId
from protos.runspec import RunSpec

MESSAGE_EXTRA_BYTES = 1024
"""What a message may hold beside a row for the row to stay in it."""

Previous = Callable[[int], memoryview | None]


@dataclass(slots=True)
class Row:
    """A row on its way in: its place, who waits for its check, and what of it is not yet kept and hashed.

    The place is an offset in the work file, or in memory: where an own row lies all along, the message that a row came
    in, or a mapping that its parts are copied into; None until the first of them is here.
    """

    head: ChunkHead
    place: int | memoryview | mmap.mmap | None
    hashes: LeafHashes
    rest: tuple[int, memoryview] | None = None  # the last part and its offset, taken with the check
    fault: str = ""  # why it can't be kept
    outcome: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Reducing:
    """The rows of one attempt's chunks.

    Args:
        included: the commitments that rows are checked against.
        rule: what combines them.
        results: where results are kept.
        work: the file for rows that are not to lie in memory; made at the first one.
        previous, previous_scale: see `Exchanging`.
    """

    def __init__(
        self,
        spec: RunSpec,
        included: Mapping[PeerId, Commitment],
        rule: policy.Applied,
        *,
        results: ResultsArea,
        work: Path,
        previous: Previous | None,
        previous_scale: float,
        stages: Stages,
    ) -> None:
        self.rule, self.previous, self.previous_scale, self.stages = rule, previous, previous_scale, stages
        self._codec, self._grid, self._included, self._results = spec.codec, policy.grid(spec), included, results
        slot_bytes = codec.frame_bytes(self._codec.name, self._grid.size(0), self._codec.block)
        self.file = RowFile(work, len(included) * self._grid.n_chunks, slot_bytes)
        self._leaf_ends: dict[int, tuple[int, ...]] = {}

    def row(self, head: ChunkHead, place: int | memoryview | None) -> Row:
        """A row of which nothing has come yet, for the work file or for memory, or an own one, which is all there."""
        n_values = self._grid.size(head.chunk)
        ends = self._leaf_ends.get(n_values)
        if ends is None:
            ends = leaf_ends(self._codec.name, self._codec.block, n_values, self._codec.leaf_values)
            self._leaf_ends[n_values] = ends
        rest = (0, place) if isinstance(place, memoryview) else None
        return Row(head, place, LeafHashes(ends, self._codec.leaf_values), rest)

    def take(self, row: Row, offset: int, data: memoryview) -> None:
        """Keep and hash some bytes of a row; a row that comes in one part to stay in memory stays where it is.

        Raises OSError, and ValueError once the attempt is over.
        """
        if row.place is None and len(data) == row.head.n_bytes and _fills_its_message(data):
            row.place = data
            self.stages.add("receive", len(data))
        elif not isinstance(row.place, memoryview):
            with self.stages.timed("receive", len(data), copied_bytes=len(data)):
                self._copy(row, offset, data)
        with self.stages.timed("check", 0):
            row.hashes.update(data)

    def _copy(self, row: Row, offset: int, data: memoryview) -> None:
        if isinstance(row.place, int):
            self.file.write(row.place + offset, data)
            return
        if not isinstance(row.place, mmap.mmap):
            row.place = mmap.mmap(-1, row.head.n_bytes)
        row.place[offset : offset + len(data)] = data

    def fault_of(self, sender: PeerId, row: Row) -> str:
        """What is wrong with a row, or an empty string. Its last part is in memory, which mostly is all of it.

        Raises OSError.
        """
        if row.fault:
            return row.fault
        chunk, commitment = row.head.chunk, self._included[sender]
        try:
            frame = self._last_part_taken(row)
            with self.stages.timed("check", row.head.n_bytes):
                norm_sq = codec.measure(
                    frame, codec=self._codec.name, block=self._codec.block, n_values=self._grid.size(chunk)
                )
                root = contribution_root_from_path(row.hashes.root(), chunk, self._grid.n_chunks, row.head.path)
                if root != commitment.root:
                    return f"chunk {chunk} is not what its commitment names"
                if norm_sq != commitment.norms[chunk]:
                    return f"chunk {chunk} has another norm than committed"
        except (CodecError, ValueError) as error:
            return f"chunk {chunk}: {error}"
        return ""

    def combine(
        self, chunk: int, rows: Sequence[Row], weights: Sequence[float], rule: policy.Applied | None = None
    ) -> Combined:
        """Combine checked rows and keep the result, by the deal's rule or, of fewer senders, by theirs.

        Raises RuleError, CodecError, OSError, NodeError, ValueError.
        """
        began, rule = time.perf_counter(), rule or self.rule
        frames = [self._frame(row) for row in rows]
        frame, norm_sq = rules.combine(
            rule.rule,
            frames,
            weights_N=weights,
            f=rule.f,
            codec=self._codec.name,
            block=self._codec.block,
            previous=self._centre(chunk, rule),
            previous_scale=self.previous_scale,
            checked=True,
        )
        root = chunk_root(frame, self._codec.leaf_values)
        self._results.put(chunk, frame, root)
        n_bytes = sum(len(each) for each in frames)
        self.stages.add("combine", n_bytes, time.perf_counter() - began, copied_bytes=len(frame))
        return Combined(chunk, root, norm_sq)

    def _last_part_taken(self, row: Row) -> memoryview:
        """The whole frame; from memory, where all of it came at once."""
        rest, row.rest = row.rest, None
        if rest is not None:
            self.take(row, *rest)
        return rest[1] if rest is not None and rest[0] == 0 else self._frame(row)

    def _frame(self, row: Row) -> memoryview:
        """Where a row's bytes lie once they are taken in."""
        if isinstance(row.place, int):
            return self.file.view(row.place, row.head.n_bytes)
        if row.place is None:
            raise ValueError("nothing of the row has come")
        return memoryview(row.place)

    def _centre(self, chunk: int, rule: policy.Applied) -> memoryview | None:
        """What a centred rule starts from. Raises RuleError where there is a centre and its frame isn't here."""
        if self.previous is None or not rules.is_centred(rule.rule):
            return None
        frame = self.previous(chunk)
        if frame is None:
            raise RuleError(f"the last result of chunk {chunk} is not here, and {rule.rule} starts from it")
        return frame


def _fills_its_message(data: memoryview) -> bool:
    """Whether little else is kept in memory with these bytes: a message may be padded with fields that nobody knows."""
    return isinstance(data.obj, bytes) and len(data.obj) <= len(data) + MESSAGE_EXTRA_BYTES
