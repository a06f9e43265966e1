"""Finds the process that serves a run's folder, and speaks to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from coordinator.errors import OrderRefused, StateError, UnreachableError
from coordinator.folder import PRIVATE, RunFolder, read_json, write_json
from coordinator.parent import is_alive
from protos.messages import PeerId

ANSWER_S = 10.0
BUSY_S = 10.0
"""For so long a coordinator whose places are all taken is asked again: strangers share them, and leave soon."""
AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Serving:
    """How to reach the serving process; the secret is the operator's, who may read the folder."""

    http: str  # HOST:PORT, from this machine
    secret: str
    pid: int
    run: PeerId
    invite: str

    def write(self, folder: RunFolder) -> None:
        content = {
            "http": self.http,
            "secret": self.secret,
            "pid": self.pid,
            "run_id": self.run,
            "invite": self.invite,
        }
        write_json(folder.serving, content, mode=PRIVATE)


def find(folder: RunFolder) -> Serving | None:
    """The process that serves the folder now, or None."""
    content = read_json(folder.serving)
    if content is None:
        return None
    try:
        found = Serving(
            str(content["http"]),
            str(content["secret"]),
            int(content["pid"]),
            PeerId(str(content["run_id"])),
            str(content["invite"]),
        )
    except (KeyError, TypeError, ValueError):
        return None
    return found if is_alive(found.pid) else None


class _Busy(UnreachableError):
    """Others have all places just now."""


class Caller:
    """Calls to the serving process. Raises UnreachableError where it doesn't answer in time."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            f"http://{self._serving.http}", timeout=aiohttp.ClientTimeout(total=ANSWER_S)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def status(self) -> dict[str, Any]:
        found = await self._call("GET", "/api/status")
        return found if isinstance(found, dict) else {}

    async def ledger(self, after_round: int = -1) -> list[dict[str, Any]]:
        """All rows of later rounds."""
        rows: list[dict[str, Any]] = []
        while True:
            found = await self._call("GET", f"/api/ledger?after={after_round}")
            if not isinstance(found, list) or not found:
                return rows
            rows += found
            after_round = int(found[-1]["round"])

    async def order(self, envelope: bytes) -> dict[str, Any]:
        """Hand a signed order over; its number and kind, once it is journalled. Raises OrderRefused."""
        found = await self._call("POST", "/v1/orders", envelope)
        return found if isinstance(found, dict) else {}

    async def run_info(self, revision: int = 0) -> bytes:
        """RunInfo, encoded, with this revision of the RunSpec; 0: the one in force."""
        found = await self._call("GET", f"/v1/run?revision={revision}", as_json=False)
        return found if isinstance(found, bytes) else b""

    async def digests(self) -> dict[str, dict[str, str]]:
        """By commit hash, what each peer said that its state's digest is after it."""
        found = await self._call("GET", "/api/digests")
        return found if isinstance(found, dict) else {}

    async def _call(self, method: str, path: str, data: bytes | None = None, *, as_json: bool = True) -> Any:
        loop = asyncio.get_running_loop()
        busy_until = loop.time() + BUSY_S
        while True:
            try:
                return await self._ask(method, path, data, as_json=as_json)
            except _Busy:
                if loop.time() >= busy_until:
                    raise
                await asyncio.sleep(AGAIN_S)

    async def _ask(self, method: str, path: str, data: bytes | None, *, as_json: bool) -> Any:
        if self._session is None:
            raise RuntimeError("a Caller is entered before it calls")
        headers = {"Authorization": f"Bearer {self._serving.secret}"}
        try:
            async with self._session.request(method, path, headers=headers, data=data) as response:
                if response.status == 200 and not as_json:
                    return await response.read()
                content = await response.json()
                if response.status == 200:
                    return content
                content = content if isinstance(content, dict) else {}
                reason = content.get("reason", "")
                if response.status == 409:
                    raise OrderRefused(str(reason))
                refused = f"the coordinator answers {response.status}: {reason}"
                if response.status == 503 and content.get("code") == "busy":
                    raise _Busy(refused, "try again")
                raise StateError(refused)
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, OSError) as error:
            raise UnreachableError(
                f"the coordinator (process {self._serving.pid}) doesn't answer at {self._serving.http}: {error}",
                "try again, or restart it",
            ) from error
