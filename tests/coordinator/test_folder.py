"""The run's folder: founded whole or not at all, locked by one process, damage named with path and remedy."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import load
from coordinator.errors import CoordinatorError, MachineError, StateError, UsageError
from coordinator.folder import FolderLock, RunFolder, read_founded, read_identity, read_seal_key, write_whole
from coordinator.founding import found
from coordinator.journal import Journal
from coordinator.rounds.ledger import genesis
from protos.hashes import body_hash
from protos.messages import Genesis
from protos.signing import Purpose, unseal
from protos.wire import decode
from tests.coordinator.made import TODAY, make_data, make_run

WORDS = ("data.sequence_length=16", "work.batch_tokens=16")


def test_a_founded_run_verifies_from_its_run_id(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "work.h=3", "rule.name=median")
    founded = read_founded(folder)
    assert founded.spec.work.h == 3
    assert founded.spec.rule.name == "median"
    assert read_identity(folder.keys / "coordinator.pem").peer == founded.operator.coordinator
    assert read_identity(folder.keys / "run.pem").peer == founded.run
    assert len(read_seal_key(folder.keys / "seal.pem")) == 32
    envelope = unseal(founded.genesis.votes[0], purpose=Purpose.GENESIS, run=founded.run, signer=founded.run)
    signed = decode(Genesis, envelope.body)
    assert signed == Genesis(body_hash(founded.genesis.body), bytes.fromhex(founded.spec.model.initial_digest))
    journal = Journal.open(folder.journal, founded.run)
    recovered = journal.recover()
    journal.close()
    assert recovered.commit == founded.genesis
    assert recovered.ledger.hash() == genesis(founded.run, founded.operator.coordinator).hash()


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for key in folder.keys.iterdir():
        assert key.stat().st_mode & 0o077 == 0
    assert folder.keys.stat().st_mode & 0o077 == 0
    key = folder.keys / "coordinator.pem"
    key.chmod(0o644)
    read_identity(key)
    assert key.stat().st_mode & 0o077 == 0


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    before = folder.spec.read_bytes()
    with pytest.raises(StateError, match="coordinator serve"):
        make_run(tmp_path / "run")
    assert folder.spec.read_bytes() == before


def test_only_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "empty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(MachineError, match="--data"):
        make_run(tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_a_failed_founding_leaves_nothing(tmp_path: Path) -> None:
    async def fails(wish: Path, to: Path) -> dict[str, Any]:
        (to / "half").write_text("half")
        raise CoordinatorError("no")

    with pytest.raises(CoordinatorError):
        asyncio.run(found(tmp_path / "run", load("tiny", None, WORDS), fails, TODAY))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_founding_left_is_cleared(tmp_path: Path) -> None:
    left = tmp_path / ".run.founding-999999999-abc"
    left.mkdir()
    others = tmp_path / f".run.founding-{os.getpid()}-abc"
    others.mkdir()
    make_run(tmp_path / "run")
    assert not left.exists()
    assert others.exists()


def test_a_tool_that_makes_another_run_is_a_fault_of_ours(tmp_path: Path) -> None:
    async def wrong(wish: Path, to: Path) -> dict[str, Any]:
        made = await make_data(wish, to)
        return {**made, "work": {**made["work"], "h": 77}}

    with pytest.raises(CoordinatorError, match="work") as caught:
        asyncio.run(found(tmp_path / "run", load("tiny", None, WORDS), wrong, TODAY))
    assert caught.value.exit_code == 1


def test_an_unknown_rule_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mean"):
        make_run(tmp_path / "run", "rule.name=meen")


@pytest.mark.parametrize("name", ["spec.bin", "operator.bin", "genesis.bin"])
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "run")
    path = folder.path / name
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    if name == "genesis.bin":
        raw = raw[:-5]
    path.write_bytes(raw)
    with pytest.raises(StateError, match="damaged") as caught:
        read_founded(folder)
    assert str(folder.path) in str(caught.value)


def test_a_folder_without_a_run_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="coordinator init"):
        read_founded(RunFolder(tmp_path))


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PRIVATE KEY-----\n", b"\x00" * 40])
def test_a_bad_key_names_its_path_and_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "coordinator.pem"
    path.write_bytes(content)
    with pytest.raises(StateError, match=str(path)):
        read_identity(path)
    assert path.read_bytes() == content


def test_one_process_holds_the_lock(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with FolderLock(folder):
        with pytest.raises(StateError, match="in use"), FolderLock(folder):
            pass
    with FolderLock(folder):
        pass


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    write_whole(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    with pytest.raises(MachineError, match="--data"):
        write_whole(tmp_path / "missing" / "file", b"")
