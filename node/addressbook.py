"""The address records of others on disk: who restarts while the coordinator is away finds them by these."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from node.errors import NodeError
from node.files import replace_file
from node.whereabouts import Whereabouts
from protos import limits, wire
from protos.messages import Records

KEPT_MOST = 256
KEEP_EVERY_S = 2.0
FILE_BYTES_MOST = 2 * KEPT_MOST * limits.RECORD_BYTES


class AddressBook:
    """Keeps what `whereabouts` has learnt; what is in the file is signed, so it is worth no more than it says."""

    def __init__(self, path: Path, whereabouts: Whereabouts) -> None:
        self._path, self._whereabouts = path, whereabouts
        self._kept: tuple[bytes, ...] = ()

    async def load(self) -> None:
        """Learn what an earlier process has kept; a file that is missing or damaged teaches nothing."""
        try:
            raw = await asyncio.to_thread(self._read)
            self._whereabouts.learn(wire.decode(Records, raw).records)
        except (OSError, wire.WireError):
            return
        self._kept = self._envelopes()

    async def run(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Write the file anew when something has changed, until cancelled."""
        while True:
            envelopes = self._envelopes()
            if envelopes != self._kept:
                try:
                    await asyncio.to_thread(replace_file, self._path, wire.encode(Records(envelopes)))
                    self._kept = envelopes
                except (NodeError, OSError):  # no room, say: it is tried again
                    pass
            await sleep(KEEP_EVERY_S)

    def _envelopes(self) -> tuple[bytes, ...]:
        return self._whereabouts.envelopes()[:KEPT_MOST]

    def _read(self) -> bytes:
        with self._path.open("rb") as file:
            return file.read(FILE_BYTES_MOST)
