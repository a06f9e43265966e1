"""Makes a run: keys, packed data, first state, the signed RunSpec and commit 0, in a folder that appears whole."""

from __future__ import annotations

import datetime
import json
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pydantic import ValidationError

from coordinator.authority import Authority
from coordinator.config import RunConfig
from coordinator.errors import CoordinatorError, MachineError, StateError, UsageError
from coordinator.folder import PRIVATE, RunFolder, sync_folder, write_json, write_whole
from coordinator.journal import Journal
from coordinator.parent import is_alive
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.ledger import genesis as genesis_ledger
from protos.hashes import body_hash, commit_hash
from protos.messages import ZERO_HASH, Body, Commit, Genesis, Operator, Outcome, PeerId, Range
from protos.runspec import RunSpec
from protos.signing import Identity, Purpose, generate_seal_key, seal
from protos.wire import encode

RunTool = Callable[[Path, Path], Awaitable[Mapping[str, Any]]]
"""Given the file of what is wished and the folder, makes `data/` and `state/` in it; gives the whole RunSpec."""


@dataclass(frozen=True, slots=True)
class Keys:
    """All private keys of a run, as they are made; the run key may move offline afterwards."""

    run: Identity
    coordinator: Identity
    authority: Authority
    seal_private: bytes
    seal_public: bytes

    @classmethod
    def generate(cls, now: datetime.datetime) -> Keys:
        run = Identity.generate()
        return cls(run, Identity.generate(), Authority.generate(run.peer, now), *generate_seal_key())

    def operator(self) -> Operator:
        return Operator(self.run.peer, self.coordinator.peer, self.authority.certificate_der, self.seal_public)


async def found(path: Path, config: RunConfig, run_tool: RunTool, now: datetime.datetime) -> tuple[PeerId, RunSpec]:
    """Make the run in `path`, which appears whole or not at all. Returns its id and RunSpec.

    Raises StateError where there is a run already, MachineError where the folder can't be made, UsageError where the
    configuration and the data don't go together, and whatever `run_tool` raises.
    """
    _check_free(path)
    _clear_abandoned(path)
    beside = path.with_name(f".{path.name}.founding-{os.getpid()}-{secrets.token_hex(3)}")
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        run, spec = await _fill(RunFolder(beside), config, run_tool, now)
        _move(beside, path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return run, spec


async def _fill(
    folder: RunFolder, config: RunConfig, run_tool: RunTool, now: datetime.datetime
) -> tuple[PeerId, RunSpec]:
    wish = folder.path / "wish.json"
    write_json(wish, config.wish())
    spec = checked(config, await run_tool(wish, folder.path))
    write_whole(folder.spec_json, spec.to_bytes())
    keys = Keys.generate(now)
    run = keys.run.peer
    _write_keys(folder, keys)
    write_whole(folder.spec, seal(keys.run, Purpose.RUNSPEC, run, spec.to_bytes()))
    write_whole(folder.operator, seal(keys.run, Purpose.OPERATOR, run, encode(keys.operator())))
    commit, body, ledger = genesis_commit(keys.run, keys.coordinator.peer, spec)
    write_whole(folder.genesis, encode(commit))
    Journal.create(folder.journal, run, commit, body, ledger, origin_unix_s=now.timestamp()).close()
    return run, spec


def checked(config: RunConfig, made: Mapping[str, Any]) -> RunSpec:
    """The RunSpec that the node's tool made, if it is what was asked for; raises UsageError if there is none."""
    try:
        spec = RunSpec.model_validate_json(json.dumps(made))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise UsageError(
            f"this configuration and this data make no run: {where + ': ' if where else ''}{said}",
            "give more data or change the setting",
        ) from error
    made_sections = spec.model_dump(mode="json")
    for name, asked in config.spec_sections().items():
        if made_sections[name] != asked:
            raise CoordinatorError(f"the node's tool made {name} = {made_sections[name]} where {asked} was asked for")
    return spec


def genesis_commit(run: Identity, coordinator: PeerId, spec: RunSpec) -> tuple[Commit, Body, Ledger]:
    """Commit 0: it seats nobody, its only voter is the coordinator, and the run key signs it."""
    ledger = genesis_ledger(run.peer, coordinator)
    digest = bytes.fromhex(spec.model.initial_digest)
    body = Body(
        run=run.peer, epoch=0, round=0, previous=ZERO_HASH, attempt=0, leader=coordinator, spec_revision=spec.revision,
        fragment=Range(0, spec.model.n_values), tau=0, anchor_digest=digest, outcome=Outcome.EMPTY, reason="founding",
        members=(), reducers=(), rule=spec.rule.name, f=0, fallback="", degraded="", codec=spec.codec.name,
        results_root=ZERO_HASH, clip_factor=1.0, aggregate_norm=0.0, numerics_version=spec.numerics_version,
        h=spec.work.h, lr=0.0, outer_lr=spec.outer.lr, outer_momentum=spec.outer.momentum, returned=(), standing=(),
        orders=(), seats=(), voters=ledger.voters, ledger_hash=ledger.hash(),
    )  # fmt: skip
    raw = encode(body)
    signed = seal(run, Purpose.GENESIS, run.peer, encode(Genesis(body_hash(raw), digest)))
    commit = Commit(body=raw, digest=digest, attempt=0, votes=(signed,), result_hashes=())
    return commit, body, ledger.at(commit_hash(raw, digest), digest)


def _write_keys(folder: RunFolder, keys: Keys) -> None:
    folder.keys.mkdir(mode=0o700)
    for name, content in (
        ("run.pem", keys.run.to_pem()),
        ("coordinator.pem", keys.coordinator.to_pem()),
        ("ca.pem", keys.authority.key_pem),
        ("ca-cert.pem", keys.authority.certificate_pem),
        ("seal.pem", _x25519_pem(keys.seal_private)),
    ):
        write_whole(folder.keys / name, content, mode=PRIVATE)


def _x25519_pem(private: bytes) -> bytes:
    key = X25519PrivateKey.from_private_bytes(private)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _check_free(path: Path) -> None:
    if RunFolder(path).holds_run():
        raise StateError(
            f"{path} holds a run already",
            f"serve it with: coordinator serve --data {path}, or choose another folder with --data",
        )
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise MachineError(f"{path} is there and not an empty folder", "choose another folder with --data")
    except OSError as error:
        raise _unwritable(path, error) from error


def _clear_abandoned(path: Path) -> None:
    """Remove what a founding of this folder left that was ended by force."""
    for left in path.parent.glob(f".{path.name}.founding-*"):
        pid = left.name.rpartition(".founding-")[2].partition("-")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _move(beside: Path, path: Path) -> None:
    try:
        beside.replace(path)  # also over an empty folder
        sync_folder(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> CoordinatorError:
    return MachineError(
        f"{path} can't be made: {error.strerror or error}",
        "choose a folder that this user may write with --data",
    )
