"""A real PostgreSQL server of the tests' own, on a socket in a folder of its own; skipped where there is none."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import quote

import pytest

MISSING = "no PostgreSQL server on this machine (initdb, postgres): on Debian, apt-get install postgresql"
_READY = b"ready to accept connections"
_STOP_S = 60.0


def server_binaries() -> Path | None:
    """The folder of initdb and postgres."""
    on_path = shutil.which("initdb")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    for folder in [*([Path(on_path).resolve().parent] if on_path else []), *reversed(debian)]:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    return None


class Server:
    """One server. PostgreSQL refuses to run as root: then it runs as a user that may do little."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self.folder = Path(tempfile.mkdtemp(prefix="barnraise-pg-"))
        self._data = self.folder / "data"
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._user: int | None = None
        self._group: int | None = None
        if os.geteuid() == 0:
            names = {entry.pw_name: entry for entry in pwd.getpwall()}
            user = names.get("postgres") or names["nobody"]
            self._user, self._group = user.pw_uid, user.pw_gid
            os.chown(self.folder, user.pw_uid, user.pw_gid)
        words = ("--auth=trust", "--username=barnraise", "--encoding=UTF8", "--locale=C", "--no-sync")
        made = subprocess.run(
            [self._binaries / "initdb", "-D", self._data, *words],
            capture_output=True, text=True, check=False, cwd=self.folder,
            user=self._user, group=self._group, extra_groups=None if self._user is None else [],
        )  # fmt: skip
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stderr}")

    def start(self) -> None:
        """Returns when it takes connections."""
        settings = (
            "listen_addresses=",
            "shared_buffers=16MB",
            "max_connections=60",
            "fsync=on",
            "log_min_messages=log",
        )
        self._process = subprocess.Popen(
            [
                self._binaries / "postgres", "-D", self._data, "-k", self.folder,
                *(word for setting in settings for word in ("-c", setting)),
            ],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=self.folder,
            user=self._user, group=self._group, extra_groups=None if self._user is None else [],
        )  # fmt: skip
        assert self._process.stderr is not None
        said: list[bytes] = []
        for line in self._process.stderr:
            said.append(line)
            if _READY in line:
                break
        else:
            raise RuntimeError(f"postgres ended: {b''.join(said).decode()}")
        threading.Thread(target=_drain, args=(self._process.stderr,), daemon=True).start()

    def stop(self) -> None:
        """Every session ends. (As after a crash, but for the recovery, which takes seconds on a busy disk: tried.)"""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(_STOP_S)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, statement: str) -> list[tuple[object, ...]]:
        """One statement beside everybody; the rows it gives."""
        import psycopg

        with psycopg.connect(f"host={self.folder} user=barnraise dbname=postgres", autocommit=True) as connection:
            done = connection.execute(statement.encode())
            return list(done.fetchall()) if done.description else []

    def new_database(self) -> str:
        """The URL of a fresh, empty one: a schema of its own, which is quicker made than a database."""
        name = f"test_{next(self._numbers)}"
        self.run(f"CREATE SCHEMA {name}")
        return (
            f"postgresql://barnraise@/postgres?host={quote(str(self.folder), safe='')}&options=-csearch_path%3D{name}"
        )


def schema_of(url: str) -> str:
    return url.rpartition("%3D")[2]


def _drain(pipe: IO[bytes]) -> None:
    with pipe:
        while pipe.read(2**16):
            pass


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A server that runs; skips where the machine has none."""
    pytest.importorskip("psycopg", reason="the driver is not installed: bash deploy/install.sh postgres")
    binaries = server_binaries()
    if binaries is None:
        pytest.skip(MISSING)
    server = Server(binaries)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def url(postgres: Server) -> str:
    return postgres.new_database()
