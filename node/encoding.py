"""This node's contribution as it lies in the area of codes: its root, its chunks' paths to it and norms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aggregation import codec
from aggregation.digest import chunk_root, contribution_root, merkle_paths
from coordinator.rounds import policy
from node.files import writing
from node.training.shared import CodesArea, frame_sizes
from protos.runspec import RunSpec


@dataclass(frozen=True, slots=True)
class Contribution:
    """An encoded Δ. What is committed to is what lies on disk, not what the trainer says that it wrote."""

    area: CodesArea
    paths: tuple[tuple[bytes, ...], ...]  # of each chunk's root to `root`
    root: bytes
    norms: tuple[float, ...]  # ‖·‖² of each decoded chunk


def make_area(path: Path, spec: RunSpec) -> None:
    """A fresh file for the codes, in place of any other. Raises DiskFull or MachineError."""
    grid = policy.grid(spec)
    sizes = frame_sizes(grid, spec.codec.name, spec.codec.block)
    with writing(path.parent, "this node's contribution", sum(sizes)):
        CodesArea.create(path, grid, spec.codec.name, spec.codec.block)


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
    return Contribution(area, merkle_paths(roots), contribution_root(roots), tuple(norms))
