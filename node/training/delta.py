"""Writes what a trainer has learnt since its anchor into the area of codes, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from aggregation import codec
from aggregation.chunks import ChunkGrid
from aggregation.codec import feedback
from aggregation.errors import CodecError
from node.training.inner import InnerLoop
from node.training.link import Encode
from node.training.shared import Bytes, CodesArea, Floats, map_residual
from protos.runspec import CodecSpec


class DeltaWriter:
    """Encodes anchor minus parameters; it never stands in memory as a whole.

    With error feedback, what earlier rounds left over goes along, and what this one leaves over is written down.
    Raises AreaError for files of another size.
    """

    def __init__(self, inner: InnerLoop, spec: CodecSpec, command: Encode, n_values: int) -> None:
        self._inner, self._spec = inner, spec
        self._grid = ChunkGrid(n_values, spec.chunk_values)
        self._area = CodesArea(Path(command.codes_path), self._grid, spec.name, spec.block, writable=True)
        self._leftovers = _Leftovers(command, self._grid) if command.next_path else None

    def write(self, written: Callable[[int], None]) -> str:
        """`written` is told after each chunk how many there are now. Returns why there is nothing to contribute, if so.

        Steps that went too far for the codec, though their parameters are finite, are given up: the parameters go back
        to the anchor, and what is still to be written is zeros. Chunks that `written` knows of may have been read and
        stay as they are, which is of no consequence: without a step nothing of it counts.
        """
        self._inner.restore_if_broken()
        grid, problem = self._grid, ""
        delta_P = np.empty(min(grid.chunk_values, grid.n_values), np.float32)
        for chunk in range(grid.n_chunks):
            start, stop = grid.bounds(chunk)
            part_P, frame = delta_P[: stop - start], self._area.frame(chunk)
            try:
                self._encode(start, stop, part_P, frame)
            except CodecError as error:
                problem = str(error)
                self._inner.restore()
                self._encode(start, stop, part_P, frame)
            written(chunk + 1)
        return problem

    def _encode(self, start: int, stop: int, part_P: Floats, frame: Bytes) -> None:
        name, block = self._spec.name, self._spec.block
        self._inner.delta_into(part_P, start)
        if self._leftovers is None:
            codec.encode_into(name, part_P, frame, block=block)
            return
        residual_P, next_P = self._leftovers.parts(start, stop)
        try:
            feedback.encode(name, part_P, residual_P, frame, next_P, block=block)
        except CodecError:
            # A file that rotted costs what it held; else it would stop every encoding from now on.
            feedback.encode(name, part_P, np.zeros_like(residual_P), frame, next_P, block=block)


class _Leftovers:
    """What encoding leaves over, in two mapped files: of earlier rounds, to read, and of this one, to write."""

    def __init__(self, command: Encode, grid: ChunkGrid) -> None:
        self._residual_D = map_residual(Path(command.residual_path), grid.n_values) if command.residual_path else None
        self._next_D = map_residual(Path(command.next_path), grid.n_values, writable=True)
        self._zeros_P = np.zeros(grid.size(0) if self._residual_D is None else 0, np.float32)

    def parts(self, start: int, stop: int) -> tuple[Floats, Floats]:
        """(P,) and (P,): the values [start, stop) of both."""
        residual_D = self._residual_D
        if residual_D is None:
            return self._zeros_P[: stop - start], self._next_D[start:stop]
        return residual_D[start:stop], self._next_D[start:stop]
