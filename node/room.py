"""Whether this machine's disk has room for a run: said at the start with the need, not after hours of work."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from aggregation import codec
from coordinator.rounds import policy
from node.errors import DiskFull
from node.training.shared import frame_sizes
from node.vectors import VALUE_BYTES
from protos.runspec import RunSpec


def least_bytes(spec: RunSpec) -> int:
    """What a committed round takes on disk, training data apart: the state that is held and the one that it leads to,
    this node's own contribution, and the results of the round and of the one before."""
    grid = policy.grid(spec)
    state = 2 * VALUE_BYTES * grid.n_values
    codes, results = (
        sum(frame_sizes(grid, name, spec.codec.block))
        for name in (spec.codec.name, codec.result_codec(spec.codec.name))
    )
    return 2 * state + codes + 2 * results


def check_room_for(spec: RunSpec, folder: Path) -> None:
    """Raise DiskFull where the disk would have too little room if the folder were empty.

    What lies in it may be the very files that are needed, or gives way to them.
    """
    room = shutil.disk_usage(folder).free + used_bytes(folder)
    if room < (needed := least_bytes(spec)):
        raise DiskFull("this run, beside its training data,", str(folder), needed, room)


def used_bytes(folder: Path) -> int:
    """What the files in a folder take on the disk; one with several names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(path, name))
            except OSError:  # gone meanwhile
                continue
            sizes[found.st_dev, found.st_ino] = 512 * found.st_blocks
    return sum(sizes.values())
