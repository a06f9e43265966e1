"""This node's contribution as it lies in the area of codes: its root, its chunks' roots and norms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aggregation import codec
from aggregation.digest import chunk_root, contribution_root
from coordinator.rounds import policy
from node.training.shared import CodesArea
from protos.runspec import RunSpec


@dataclass(frozen=True, slots=True)
class Contribution:
    """An encoded Δ. What is committed to is what lies on disk, not what the trainer says that it wrote."""

    area: CodesArea
    roots: tuple[bytes, ...]
    root: bytes
    norms: tuple[float, ...]  # ‖·‖² of each decoded chunk


def read_contribution(path: Path, spec: RunSpec) -> Contribution:
    """Hash and measure the area; raises CodecError for a frame that reducers would refuse."""
    grid = policy.grid(spec)
    area = CodesArea(path, grid, spec.codec.name, spec.codec.block)
    roots: list[bytes] = []
    norms: list[float] = []
    for chunk in range(grid.n_chunks):
        frame = area.frame(chunk)
        codec.check(frame, codec=spec.codec.name, block=spec.codec.block, n_values=grid.size(chunk))
        roots.append(chunk_root(frame, spec.codec.leaf_values))
        norms.append(codec.squared_norm(frame))
    return Contribution(area, tuple(roots), contribution_root(roots), tuple(norms))
