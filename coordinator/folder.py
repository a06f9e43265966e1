"""A run's folder: where its files are, how they are written whole, and the lock of the process that serves it."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from coordinator.errors import MachineError, StateError
from protos import limits
from protos.messages import Commit, Envelope, Operator, PeerId
from protos.runspec import RunSpec, SpecError
from protos.signing import Identity, Purpose, SignatureError, unseal
from protos.wire import WireError, decode

PRIVATE = 0o600
_JSON_BYTES_MAX = 2**20


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths below a run's data folder."""

    path: Path

    @property
    def spec(self) -> Path:
        """Envelope of the RunSpec, by the run key."""
        return self.path / "spec.bin"

    @property
    def spec_json(self) -> Path:
        """The RunSpec alone, for the node's tools."""
        return self.path / "spec.json"

    @property
    def operator(self) -> Path:
        """Envelope of Operator, by the run key."""
        return self.path / "operator.bin"

    @property
    def genesis(self) -> Path:
        """Commit 0, encoded."""
        return self.path / "genesis.bin"

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def state(self) -> Path:
        """The state after commit 0."""
        return self.path / "state"

    @property
    def observer(self) -> Path:
        """The observer's own data folder."""
        return self.path / "observer"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def journal(self) -> Path:
        return self.path / "journal.sqlite"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def serving(self) -> Path:
        """Where the serving process answers; there while it runs."""
        return self.path / "serve.json"

    @property
    def term(self) -> Path:
        """The last term that was led from this folder: a database that knows none so high is an old copy."""
        return self.path / "term.json"

    @property
    def ports(self) -> Path:
        """The addresses of the last time, since people hold invites that name them."""
        return self.path / "ports.json"

    @property
    def allowed(self) -> Path:
        """Peer ids that an allow-list run admits, one a line."""
        return self.path / "allow.txt"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    def holds_run(self) -> bool:
        return self.spec.exists() or self.operator.exists()


@dataclass(frozen=True, slots=True)
class Founded:
    """What a folder says of its run, verified from the run key's signatures."""

    run: PeerId
    spec: RunSpec
    spec_envelope: bytes
    operator: Operator
    operator_envelope: bytes
    genesis: Commit


def read_founded(folder: RunFolder) -> Founded:
    """Raises StateError where the folder holds no run, or its files are damaged."""
    if not folder.holds_run():
        raise StateError(
            f"{folder.path} holds no run",
            f"name the run's folder with --data, or make one with: coordinator init --data {folder.path}",
        )
    try:
        operator_envelope = folder.operator.read_bytes()
        spec_envelope = folder.spec.read_bytes()
        # The run id is the signer's: whoever holds the folder says which run it is, everything else must agree.
        claimed = decode(Operator, _body(operator_envelope))
        unseal(operator_envelope, purpose=Purpose.OPERATOR, run=claimed.run, signer=claimed.run)
        spec_body = unseal(spec_envelope, purpose=Purpose.RUNSPEC, run=claimed.run, signer=claimed.run).body
        genesis = decode(Commit, folder.genesis.read_bytes())
        return Founded(claimed.run, RunSpec.from_bytes(spec_body), spec_envelope, claimed, operator_envelope, genesis)
    except (OSError, WireError, SignatureError, SpecError) as error:
        raise StateError(
            f"the run in {folder.path} is damaged: {error}",
            "restore spec.bin, operator.bin and genesis.bin from a copy of the folder",
        ) from error


def _body(envelope: bytes) -> bytes:
    return decode(Envelope, envelope).body


def read_identity(path: Path) -> Identity:
    """An Ed25519 key of the folder. Raises StateError that names the path."""
    try:
        mode = path.stat().st_mode
        if stat.S_IMODE(mode) & 0o077:
            path.chmod(PRIVATE)
        return Identity.from_pem(path.read_bytes())
    except (OSError, SignatureError) as error:
        raise StateError(f"the key {path} can't be used: {error}", "restore it from a copy of the folder") from error


def read_private(path: Path, what: str) -> bytes:
    """A small file that only its owner may read. Raises StateError that names the path."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StateError(f"{what} {path} can't be read: {error}", "restore it from a copy of the folder") from error
    if len(raw) > limits.CERTIFICATE_BYTES * 4:
        raise StateError(f"{what} {path} is too long to be one", "restore it from a copy of the folder")
    return raw


def read_seal_key(path: Path) -> bytes:
    """The 32 bytes of the X25519 key that tokens are sealed to. Raises StateError that names the path."""
    try:
        key = load_pem_private_key(read_private(path, "the seal key"), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StateError(f"the key {path} can't be used: {error}", "restore it from a copy of the folder") from error
    if not isinstance(key, X25519PrivateKey):
        raise StateError(f"the key {path} is not an X25519 key", "restore it from a copy of the folder")
    return key.private_bytes_raw()


# -- files written whole -------------------------------------------------------------------------------------------


def write_whole(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write beside and rename, on disk before this returns: a reader sees the old file or the new one.

    Raises MachineError where the folder can't be written.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise MachineError(
            f"{path} can't be written: {error.strerror or error}", "free space or choose another folder with --data"
        ) from error


def write_json(path: Path, content: Mapping[str, Any], *, mode: int = 0o644) -> None:
    write_whole(path, json.dumps(content, indent=1).encode() + b"\n", mode=mode)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a small file of ours; None where there is none, or it is no JSON object."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_JSON_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def sync_folder(path: Path) -> None:
    """Have a rename in this folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- the lock ------------------------------------------------------------------------------------------------------


class FolderLock:
    """Held while a process serves the folder; the kernel releases it when the process ends, however it ends."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """Raises StateError if another process holds it, MachineError if the folder can't be written."""
        try:
            descriptor = os.open(self._folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        except OSError as error:
            raise MachineError(
                f"{self._folder.path} can't be written: {error.strerror}",
                "make it writable for this user or choose another folder with --data",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise StateError(
                f"{self._folder.path} is in use by another coordinator" + (f" (process {holder})" if holder else ""),
                "stop it first, or use another folder with --data",
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
