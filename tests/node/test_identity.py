"""The contributor's key and folder: what they are after every way in which they can be damaged or shared."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from node import identity
from node.errors import ConfigError, LocalStateError, MachineError
from node.identity import KEY_FILE, FolderLock
from protos.signing import Identity


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    first = identity.load_or_make(tmp_path)
    path = tmp_path / KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    assert identity.load_or_make(tmp_path).peer == first.peer
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == [KEY_FILE]


def rsa_pem() -> bytes:
    return rsa.generate_private_key(65537, 1024).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (Identity.from_private_bytes(bytes(32)).to_pem()[:60], "no private key in PEM"),
        (b"\x00\xff" * 100, "no private key in PEM"),
        (b"x" * 100_000, "more than"),
        (rsa_pem(), "type RSA"),
    ],
)
def test_a_damaged_key_is_named_and_never_replaced(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / KEY_FILE
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(LocalStateError, match=why) as error:
        identity.load_or_make(tmp_path)
    assert str(path) in str(error.value)
    assert "Ed25519 private key in PEM" in str(error.value)
    assert "restore it" in error.value.remedy
    assert path.read_bytes() == content


def test_a_folder_or_a_dead_link_in_place_of_the_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / KEY_FILE).mkdir()
    with pytest.raises(LocalStateError, match="directory"):
        identity.load_or_make(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / KEY_FILE).symlink_to(tmp_path / "nowhere")
    with pytest.raises(LocalStateError, match="No such file"):
        identity.load_or_make(tmp_path / "b")


def test_a_key_that_this_user_may_not_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity.load_or_make(tmp_path)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(LocalStateError, match=r"can't be read by user .*chown"):
        identity.load(tmp_path / KEY_FILE)


def test_loose_permissions_are_tightened_and_said(tmp_path: Path) -> None:
    identity.load_or_make(tmp_path)
    path = tmp_path / KEY_FILE
    path.chmod(0o644)
    said: list[str] = []
    identity.load_or_make(tmp_path, said.append)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(said) == 1
    assert str(path) in said[0]
    identity.load_or_make(tmp_path, said.append)
    assert len(said) == 1


def test_a_key_moves_by_export_and_import(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    peer = identity.load_or_make(old).peer
    file = tmp_path / "key"
    assert identity.export(old, file).peer == peer
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="exists already"):
        identity.export(old, file)
    assert identity.import_key(new, file).peer == peer
    assert identity.load_or_make(new).peer == peer
    assert identity.import_key(new, file).peer == peer  # again: nothing to do


def test_an_import_never_replaces_another_key(tmp_path: Path) -> None:
    peer = identity.load_or_make(tmp_path).peer
    file = tmp_path / "key"
    file.write_bytes(Identity.generate().to_pem())
    with pytest.raises(LocalStateError, match="already holds another identity"):
        identity.import_key(tmp_path, file)
    assert identity.load_or_make(tmp_path).peer == peer
    with pytest.raises(LocalStateError, match="no identity key"):
        identity.export(tmp_path / "nothing", tmp_path / "x")


def test_a_folder_is_used_by_one_process(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(LocalStateError, match=f"in use by process {os.getpid()}"):
        FolderLock(tmp_path)
    lock.release()
    lock.release()
    FolderLock(tmp_path).release()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from node.identity import FolderLock;"
        "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(LocalStateError, match=f"in use by process {other.pid}"):
            FolderLock(tmp_path)
        other.kill()
        other.wait()
    FolderLock(tmp_path).release()


def test_a_data_folder_is_made_private_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a" / "b"
    identity.make_folder(folder)
    identity.make_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.listdir(folder) == []
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match=r"is a file.*--data"):
        identity.make_folder(tmp_path / "file")
    with pytest.raises(MachineError, match=r"can't be written to.*--data"):
        identity.make_folder(tmp_path / "file" / "below")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", denied)
    with pytest.raises(MachineError, match=r"Permission denied.*--data"):
        identity.make_folder(folder)
