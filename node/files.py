"""Files that survive a crash: replaced whole, synced to disk, with an error that names path and need."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from node.errors import DiskFull, MachineError

_PUNCH_KEEP_SIZE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_PAGE_BYTES = 4096


def replace_file(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a small file so that after a crash either the old or the new content is there, whole.

    A private one can be read by its owner alone, from its first byte on.
    """
    part = path.with_name(path.name + ".part")
    if private:
        part.unlink(missing_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reserve(file: int, n_bytes: int) -> None:
    """Give a file its full size, with room on the disk where the file system can; raises OSError if there is none."""
    try:
        os.posix_fallocate(file, 0, n_bytes)
    except AttributeError:
        os.ftruncate(file, n_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(file, n_bytes)


def reserve_part(file: int, offset: int, n_bytes: int) -> None:
    """Room on the disk for a part of a mapped file, where the file system can; raises OSError if there is none.

    Writing through a mapping where the disk has no room left is no error but a SIGBUS.
    """
    try:
        os.posix_fallocate(file, offset, n_bytes)
    except AttributeError:
        return
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def read_exactly(file: int, out: memoryview, offset: int) -> None:
    """Fill a buffer from a place in a file. Raises OSError where the file ends before."""
    done = 0
    while done < len(out):
        n = os.preadv(file, [out[done:]], offset + done)
        if n == 0:
            raise OSError(errno.EIO, f"the file ends {len(out) - done} bytes early")
        done += n


def write_all(file: int, data: memoryview | bytes, offset: int) -> None:
    """Write a whole buffer to a place in a file."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done:], offset + done)


def punch(path: Path, offset: int, n_bytes: int) -> None:
    """Give the room of a part of a file back to the disk; it reads as zeros then. Raises OSError where that can't be.

    Python has no `fallocate` with a mode, so this is the C library's, which only Linux has.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    with path.open("r+b") as file:
        if fallocate(file.fileno(), _PUNCH_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(n_bytes)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def can_punch(path: Path) -> bool:
    """Whether `punch` works on this file. It is tried beyond the end: that takes nothing away, and no room to try."""
    try:
        punch(path, path.stat().st_size + _PAGE_BYTES, _PAGE_BYTES)
    except OSError:
        return False
    return True


def check_room(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises DiskFull if the folder's disk has less free."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise DiskFull(what, str(folder), needed_bytes, free)


def remove_folder(folder: Path) -> None:
    """Remove a folder and what is in it, if it is there."""
    if folder.exists():
        shutil.rmtree(folder)


@contextmanager
def writing(folder: Path, what: str, needed_bytes: int) -> Iterator[None]:
    """Turn what the disk says while something is written into an error with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(what, str(folder), needed_bytes, None) from error
        raise MachineError(
            f"{what} can't be written in {folder}: {error.strerror or error}",
            "check the folder's permissions and the disk, or choose another folder with --data",
        ) from error
