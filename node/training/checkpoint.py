"""A trainer's checkpoints: where it stood between two steps, on disk so that its next process goes on from there.

A checkpoint is one safetensors file: parameters, the optimiser's moments, and as metadata what they belong to. It is
written beside the others, synced, and appears by one rename under a name that carries its own hash: a file by such a
name is whole, or it is damaged and passed over. Never more than `KEPT` lie there, the one being written included.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from protos.messages import Range

Floats = NDArray[np.float32]
Tensors = Mapping[str, Floats]

KEPT = 2
EVERY_S = 60.0
"""So often within a round, and more rarely where writing takes long."""
SHARE_MOST = 0.05
"""Of the time, at most so much goes into writing them within a round."""
VERSION = 2
_VERSION_WITHOUT_SKIPS = 1
"""Of files that don't say how many batches had been skipped in a row; they are read, and it counts from 0."""
VALUE_BYTES_MOST = 12
"""What a checkpoint takes for each parameter at most: it and AdamW's two moments, in fp32."""

_HEAD = struct.Struct("<Q")
_HEAD_BYTES_MAX = 2**24
_HASH_CHARS = 32
_WRITE_BYTES = 2**24
_RANGES_MAX = 2**16
_NAME = re.compile(r"(\d{10})-([0-9a-f]{32})\.safetensors")
_PART_SUFFIX = ".part"
_INT_MAX = 2**63 - 1


class CheckpointError(ValueError):
    """A file that is no checkpoint of ours, or one that doesn't fit: says why."""


@dataclass(frozen=True, slots=True)
class Belonging:
    """What a checkpoint is of. Another run's or layout's is foreign; under another RunSpec only moments are of use."""

    run: str
    layout: str  # digest, hex
    spec: str  # hash of the RunSpec's bytes, hex


@dataclass(frozen=True, slots=True)
class Position:
    """Where a trainer stood: between two steps, `used` since the anchor."""

    belongs: Belonging
    anchor: str  # digest of the state that the round started from, hex
    round: int
    used: tuple[Range, ...]
    steps: int
    skipped: int
    sum_lr: float
    sum_loss: float
    cold_step: int
    batch_scale: int = 1  # batches of a step
    skipped_in_a_row: int = 0  # the newest of `skipped`


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Position and tensors; these are views of a mapped file, by the names that `InnerLoop` gives them."""

    position: Position
    tensors: Tensors


class Disk(Protocol):
    """What checkpoints ask of a file system beyond names."""

    def free_bytes(self, folder: Path) -> int:
        """Room left in a folder that need not be there yet. Raises OSError."""

    def write(self, path: Path, parts: Iterable[memoryview]) -> None:
        """Make a file of these bytes, on disk when this returns. Raises OSError."""


class RealDisk:
    """The `Disk` that there is."""

    def free_bytes(self, folder: Path) -> int:
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        return shutil.disk_usage(there).free

    def write(self, path: Path, parts: Iterable[memoryview]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for part in parts:
                while part:
                    part = part[os.write(descriptor, part[:_WRITE_BYTES]) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Checkpoints:
    """One trainer's checkpoints in a folder of their own. Blocks for the disk.

    Args:
        folder: made when it is needed.
        reserve_bytes: so much room is left to the node's state, which matters more.
        disk: the file system.
    """

    def __init__(self, folder: Path, *, reserve_bytes: int = 0, disk: Disk | None = None) -> None:
        self._folder, self._reserve_bytes, self._disk = folder, reserve_bytes, disk or RealDisk()

    def newest(self, run: str, layout: str) -> tuple[Checkpoint | None, list[str]]:
        """The newest one of this run and layout, and what is to be said about others that are newer.

        What an interrupted write left is removed, and so is what is damaged or foreign: nobody will need it.
        """
        remarks: list[str] = []
        try:
            for left in self._folder.glob(f"*{_PART_SUFFIX}"):
                _clear(left)
            for path in reversed(self._paths()):
                try:
                    found = _read(path)
                    if (found.position.belongs.run, found.position.belongs.layout) != (run, layout):
                        raise CheckpointError("it is of another run or model")
                except CheckpointError as error:
                    remarks.append(f"the checkpoint {path.name} is not used: {error}")
                    path.unlink(missing_ok=True)
                    continue
                except OSError as error:  # of the disk: the one before may lie where it is well
                    remarks.append(f"the checkpoint {path.name} can't be read: {error.strerror or error}")
                    continue
                return found, remarks
        except OSError as error:
            remarks.append(f"the checkpoints in {self._folder} can't be read: {error.strerror or error}")
        return None, remarks

    def has_room(self, n_bytes: int) -> bool:
        """Whether one of so many bytes could be written now. Raises OSError."""
        due_to_go = self._paths()[: 1 - KEPT]
        freed_bytes = sum(path.stat().st_size for path in due_to_go)
        return self._disk.free_bytes(self._folder) + freed_bytes >= n_bytes + self._reserve_bytes

    def save(self, position: Position, tensors: Tensors) -> None:
        """Write one. Raises OSError where the disk won't have it; the newest one before it is still there then."""
        self._folder.mkdir(parents=True, exist_ok=True)
        paths = self._paths()
        for old in paths[: max(0, len(paths) - KEPT + 1)]:
            old.unlink(missing_ok=True)
        head = _head(position, tensors)
        n_bytes = len(head) + sum(values.nbytes for values in tensors.values())
        if self._disk.free_bytes(self._folder) < n_bytes + self._reserve_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        number = int(paths[-1].name.partition("-")[0]) + 1 if paths else 1
        part = self._folder / f"{number:010d}{_PART_SUFFIX}"
        _clear(part)
        hasher = blake3()
        try:
            self._disk.write(part, _hashed([memoryview(head), *map(_raw, tensors.values())], hasher))
            part.replace(self._folder / f"{number:010d}-{hasher.hexdigest()[:_HASH_CHARS]}.safetensors")
        except OSError:
            with suppress(OSError):
                part.unlink()
            raise
        _sync(self._folder)

    def _paths(self) -> list[Path]:
        """Oldest first."""
        return sorted(
            path for path in self._folder.glob("*.safetensors") if _NAME.fullmatch(path.name) and not path.is_dir()
        )


def resumes(position: Position, belongs: Belonging, anchor: str, ranges: tuple[Range, ...], batch_scale: int) -> str:
    """Why training on these ranges can't go on from this position; empty if it can.

    It can where the anchor is the same and what was used are the first batches of the ranges: after empty rounds the
    anchor is an older round's, and the ranges have grown at their end.
    """
    if position.belongs != belongs:
        return "the RunSpec has been amended since"
    if position.anchor != anchor:
        return "it is from another anchor"
    if position.batch_scale != batch_scale:
        return "a step has other batches now"
    n_used = sum(span.count for span in position.used)
    if joined(_first(ranges, n_used)) != joined(position.used):
        return "the seat has other batches now"
    return ""


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same batches in the same order, in as few ranges as that takes."""
    found: list[Range] = []
    for span in ranges:
        if found and found[-1].start + found[-1].count == span.start:
            found[-1] = Range(found[-1].start, found[-1].count + span.count)
        elif span.count:
            found.append(span)
    return tuple(found)


def _first(ranges: tuple[Range, ...], n_batches: int) -> Iterator[Range]:
    for span in ranges:
        here = min(span.count, n_batches)
        n_batches -= here
        yield Range(span.start, here)


# -- bytes -------------------------------------------------------------------------------------------------------


def _head(position: Position, tensors: Tensors) -> bytes:
    """Length and header of a safetensors file with these tensors."""
    belongs = position.belongs
    document: dict[str, Any] = {
        "__metadata__": {
            "version": str(VERSION),
            "run": belongs.run,
            "layout": belongs.layout,
            "spec": belongs.spec,
            "anchor": position.anchor,
            "round": str(position.round),
            "used": json.dumps([[span.start, span.count] for span in position.used]),
            "steps": str(position.steps),
            "skipped": str(position.skipped),
            "sum_lr": position.sum_lr.hex(),
            "sum_loss": position.sum_loss.hex(),
            "cold_step": str(position.cold_step),
            "batch_scale": str(position.batch_scale),
            "skipped_in_a_row": str(position.skipped_in_a_row),
        }
    }
    offset = 0
    for name, values in tensors.items():
        end = offset + values.nbytes
        document[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [offset, end]}
        offset = end
    body = json.dumps(document, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)  # so that the tensors are aligned
    return _HEAD.pack(len(body)) + body


def _raw(values: Floats) -> memoryview:
    """Its bytes, little-endian: no copy where the machine is."""
    return np.ascontiguousarray(values, "<f4").reshape(-1).data.cast("B")


def _hashed(parts: Iterable[memoryview], hasher: blake3) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), _WRITE_BYTES):
            piece = part[start : start + _WRITE_BYTES]
            hasher.update(piece)
            yield piece


def _clear(path: Path) -> None:
    """Remove what is in the way, whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> Checkpoint:
    """Raises CheckpointError for what is torn, damaged or none of ours; OSError where it can't be read at all."""
    named = _NAME.fullmatch(path.name)
    if named is None:
        raise CheckpointError("its name is none of ours")
    if path.stat().st_size < _HEAD.size:
        raise CheckpointError("it is torn")
    if blake3().update_mmap(path).hexdigest()[:_HASH_CHARS] != named[2]:
        raise CheckpointError("it is torn or damaged: it has not the hash that it is named by")
    raw = np.memmap(path, np.uint8, "r")
    (n_head,) = _HEAD.unpack(raw[: _HEAD.size].tobytes())
    if n_head > min(_HEAD_BYTES_MAX, raw.size - _HEAD.size):
        raise CheckpointError("its header is longer than it may be")
    try:
        document = json.loads(raw[_HEAD.size : _HEAD.size + n_head].tobytes())
        meta = document.pop("__metadata__")
        position = _position(meta)
        data = np.asarray(raw[_HEAD.size + n_head :])
        tensors = {str(name): _view(data, entry) for name, entry in document.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"it can't be understood ({type(error).__name__}: {error})") from error
    return Checkpoint(position, tensors)


def _view(data: NDArray[np.uint8], entry: dict[str, Any]) -> Floats:
    start, end = entry["data_offsets"]
    shape = tuple(_count(size) for size in entry["shape"])
    if entry["dtype"] != "F32" or not 0 <= start <= end <= data.size or end - start != 4 * math.prod(shape):
        raise CheckpointError("a tensor doesn't lie where it should")
    return np.frombuffer(data[start:end], "<f4").reshape(shape)


def _position(meta: Mapping[str, str]) -> Position:
    version = meta["version"]
    if version not in (str(VERSION), str(_VERSION_WITHOUT_SKIPS)):
        raise CheckpointError(f"it is of version {version}")
    pairs = json.loads(meta["used"])
    if len(pairs) > _RANGES_MAX:
        raise CheckpointError("it has too many ranges")
    sums = float.fromhex(meta["sum_lr"]), float.fromhex(meta["sum_loss"])
    if not all(map(math.isfinite, sums)):
        raise CheckpointError("a sum is not finite")
    return Position(
        Belonging(meta["run"], meta["layout"], meta["spec"]),
        meta["anchor"],
        _count(int(meta["round"])),
        tuple(Range(_count(start), _count(count)) for start, count in pairs),
        _count(int(meta["steps"])),
        _count(int(meta["skipped"])),
        *sums,
        _count(int(meta["cold_step"])),
        _count(int(meta["batch_scale"])),
        _count(int(meta["skipped_in_a_row"])) if version == str(VERSION) else 0,
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _INT_MAX:
        raise CheckpointError("a count is a whole number, not negative")
    return value
