"""The last commits on disk, so that whoever was away can follow the chain from where it left it.

    commits/<epoch>-<round>-<head16>.bin    one encoded commit

What is here was committed; whoever fetches a commit judges it for itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from node.files import replace_file, writing
from protos import wire
from protos.hashes import body_hash, commit_hash
from protos.messages import Body, Commit, Outcome

_NAME = re.compile(r"[0-9]{1,16}-[0-9]{1,16}-[0-9a-f]{16}\.bin")


@dataclass(frozen=True, slots=True)
class Entry:
    """One commit that is here: what is needed to find the way along the chain without reading it again."""

    head: bytes
    previous: bytes
    epoch: int
    round: int
    body_hash: bytes
    committed: bool
    """Whether it has results."""
    path: Path


class CommitLog:
    """The newest commits of a node. Methods block for the disk and are called one at a time, but `after`, `back`.

    Args:
        folder: `commits/` of the data folder; made if it is missing.
        kept: how many stay, those of lost branches among them.
    """

    def __init__(self, folder: Path, kept: int) -> None:
        self.folder, self._kept = folder, kept
        self._entries: dict[bytes, Entry] = {}
        with writing(folder, "the commits", 0):
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.iterdir()):
                entry = _read(path)
                if entry is None:  # a left-over of a crash, or damaged: it is one commit less to serve
                    path.unlink(missing_ok=True)
                else:
                    self._entries[entry.head] = entry

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, commit: Commit) -> None:
        """Keep a commit, if it isn't here; the oldest ones leave. Raises DiskFull or MachineError."""
        head = commit_hash(commit.body, commit.digest)
        if head not in self._entries:
            body = wire.decode(Body, commit.body)
            path = self.folder / f"{body.epoch}-{body.round}-{head.hex()[:16]}.bin"
            with writing(self.folder, "the commits", len(commit.body)):
                replace_file(path, wire.encode(commit))
            self._entries = {**self._entries, head: _entry(commit, body, head, path)}
        chain = {entry.head for entry in self.back(head)}  # a lost branch may be of a higher epoch
        oldest = sorted(self._entries.values(), key=lambda entry: (entry.head in chain, entry.epoch, entry.round))
        gone = oldest[: max(0, len(oldest) - self._kept)]
        self._entries = {key: entry for key, entry in self._entries.items() if entry not in gone}
        for entry in gone:
            entry.path.unlink(missing_ok=True)

    def back(self, head: bytes) -> Iterator[Entry]:
        """The commits from a head backwards, as far as they are here without a gap."""
        entries = self._entries
        while (entry := entries.get(head)) is not None:
            yield entry
            head = entry.previous

    def after(self, head: bytes, epoch: int, round_: int, n_most: int) -> list[Commit]:
        """The commits up to a head that come after a round, oldest first: the oldest `n_most` that are here."""
        found: list[Entry] = []
        for entry in self.back(head):
            if (entry.epoch, entry.round) <= (epoch, round_):
                break
            found.append(entry)
        commits: list[Commit] = []
        for entry in reversed(found[max(0, len(found) - n_most) :]):
            try:
                commits.append(wire.decode(Commit, entry.path.read_bytes()))
            except (OSError, wire.WireError):  # what comes after it leads nowhere
                break
        return commits


def _entry(commit: Commit, body: Body, head: bytes, path: Path) -> Entry:
    committed = body.outcome is Outcome.COMMITTED
    return Entry(head, body.previous, body.epoch, body.round, body_hash(commit.body), committed, path)


def _read(path: Path) -> Entry | None:
    if not _NAME.fullmatch(path.name):
        return None
    try:
        commit = wire.decode(Commit, path.read_bytes())
        body = wire.decode(Body, commit.body)
    except (OSError, wire.WireError):
        return None
    head = commit_hash(commit.body, commit.digest)
    if path.name != f"{body.epoch}-{body.round}-{head.hex()[:16]}.bin":
        return None
    return _entry(commit, body, head, path)
