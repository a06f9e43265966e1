"""What the web pages need of the coordinator: one port, so that they can be tried without one."""

from __future__ import annotations

from typing import Any, Protocol


class AdmitRefused(Exception):
    """The run doesn't let the peer in; `code` is for programs. Asking again won't help."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class AdmitMalformed(Exception):
    """Bytes that are no request for admission."""


class OrderRefused(Exception):
    """An order that the run can't obey: says why."""


class Follower(Protocol):
    async def next(self) -> tuple[str, Any]:
        """The next event: its kind, and what has happened as JSON."""


class Site(Protocol):
    def run_info(self, revision: int = 0) -> bytes | None:
        """RunInfo, encoded: the first thing a newcomer asks for. None without this revision (0: the one in force)."""

    async def admit(self, raw: bytes) -> bytes:
        """The answer, encoded. Raises AdmitRefused or AdmitMalformed."""

    async def piece(self, hash_: bytes) -> bytes | None:
        """Data by hash. Raises PieceDamaged or OSError."""

    def status(self) -> dict[str, Any]: ...

    async def rows(self, after_round: int, limit: int) -> list[dict[str, Any]]: ...

    def follow(self) -> Follower | None:
        """None where too many follow already."""

    def unfollow(self, follower: Follower) -> None: ...

    async def order(self, envelope: bytes) -> dict[str, Any]:
        """Take an operator's signed order in; its number and kind, once it is journalled. Raises OrderRefused."""

    def is_operator(self, secret: str) -> bool: ...

    async def digests(self) -> dict[str, dict[str, str]]:
        """By commit hash, what each peer said that its state's digest is after it."""

    def explain(self, peer: str) -> list[str]: ...

    def metrics(self) -> bytes:
        """In Prometheus' text format."""
