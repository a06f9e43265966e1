"""The contributor's key and data folder: made once, never overwritten, validated with words, used by one process.

The key is an Ed25519 private key in PEM; its peer id is the node's name in the run.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

from node.errors import ConfigError, LocalStateError, MachineError, NodeError
from protos.signing import Identity, SignatureError

KEY_FILE = "identity.pem"
LOCK_FILE = "lock"
_KEY_BYTES_MAX = 4096
_FORMAT = "an unencrypted Ed25519 private key in PEM (PKCS8)"


def make_folder(folder: Path) -> None:
    """Make a data folder, for its owner alone, and see that it can be written to. Raises MachineError."""
    remedy = "choose a folder that this user can write to with --data"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except FileExistsError as error:
        raise MachineError(f"the data folder {folder} is a file", remedy) from error
    except OSError as error:
        raise MachineError(
            f"the data folder {folder} can't be written to: {error.strerror or error}", remedy
        ) from error


def load_or_make(folder: Path, warn: Callable[[str], None] = lambda _: None) -> Identity:
    """The folder's key; a new one if there is none yet. Raises LocalStateError or MachineError."""
    path = folder / KEY_FILE
    if not path.exists() and not path.is_symlink():
        _write_new(path, Identity.generate().to_pem(), MachineError)
    return load(path, warn)


def load(path: Path, warn: Callable[[str], None] = lambda _: None) -> Identity:
    """Read a key file. Loose permissions are tightened, and said to `warn`. Raises LocalStateError."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            pem = file.read(_KEY_BYTES_MAX + 1)
            if mode & 0o077:
                os.fchmod(file.fileno(), stat.S_IMODE(mode) & 0o700)
                warn(f"others could read {path}; its permissions are {stat.S_IMODE(mode) & 0o700:o} now")
    except IsADirectoryError as error:
        raise _bad_key(path, "it is a directory") from error
    except PermissionError as error:
        raise LocalStateError(
            f"the identity key {path} can't be read by user {os.getuid()}",
            f"give that user the file (chown {os.getuid()} {path}), or run as its owner",
        ) from error
    except OSError as error:
        raise _bad_key(path, error.strerror or str(error)) from error
    if not pem.strip():
        raise _bad_key(path, "it is empty")
    if len(pem) > _KEY_BYTES_MAX:
        raise _bad_key(path, f"it has more than {_KEY_BYTES_MAX} bytes")
    try:
        return Identity.from_pem(pem)
    except SignatureError as error:
        raise _bad_key(path, str(error)) from error


def export(folder: Path, to: Path) -> Identity:
    """Copy the folder's key to a new file. Raises LocalStateError, or ConfigError where the file exists."""
    path = folder / KEY_FILE
    if not path.exists():
        raise LocalStateError(f"there is no identity key in {folder}", "name the node's folder with --data")
    identity = load(path)
    _write_new(to, identity.to_pem(), ConfigError)
    return identity


def import_key(folder: Path, source: Path) -> Identity:
    """Make a key from elsewhere the folder's key. A key that is there is never overwritten: raises LocalStateError."""
    identity = load(source)
    path = folder / KEY_FILE
    if path.exists() or path.is_symlink():
        if load(path).peer == identity.peer:
            return identity
        raise LocalStateError(
            f"{path} already holds another identity",
            "export that key first and move the file away, or choose another folder with --data",
        )
    _write_new(path, identity.to_pem(), MachineError)
    return identity


class FolderLock:
    """The right to use a data folder, held until `release` or until this process ends.

    Raises LocalStateError at once if another process has it.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_FILE
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise MachineError(
                f"{path} can't be opened: {error.strerror or error}",
                "choose a folder that this user can write to with --data",
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            raise LocalStateError(
                f"the data folder {folder} is in use by process {holder}",
                "stop that node (node leave), or choose another folder with --data",
            ) from error
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _write_new(path: Path, pem: bytes, kind: type[NodeError]) -> None:
    """Write a key that nobody else can read, only where no file is; whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, pem)
            os.fsync(file)
        finally:
            os.close(file)
        try:
            os.link(part, path)  # unlike a rename, it never replaces
        finally:
            part.unlink()
    except FileExistsError as error:
        raise kind(f"{path} exists already", "choose a file that doesn't") from error
    except OSError as error:
        raise kind(f"{path} can't be written: {error.strerror or error}", "choose another place") from error


def _bad_key(path: Path, why: str) -> LocalStateError:
    return LocalStateError(
        f"the identity key {path} can't be used: {why} (it should hold {_FORMAT})",
        "restore it from a copy (node identity import FILE), or move it away to join under a new identity",
    )
