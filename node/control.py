"""How `node status`, `pause` and `leave` reach the running node: a loopback port and a secret in its data folder."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from node.errors import LocalStateError, Unreachable
from node.files import replace_file

FILE = "control.json"
LINE_BYTES_MAX = 4096
ANSWER_BYTES_MAX = 2**20
ANSWER_S = 5.0

Answer = Callable[[str], Mapping[str, Any]]
"""Gives the answer to a word: "status", "pause", "resume", "leave". Raises KeyError for another."""


class ControlServer:
    """Listens on loopback for the owner of the data folder, who alone can read the secret."""

    def __init__(self, folder: Path, answer: Answer) -> None:
        self._path, self._answer = folder / FILE, answer
        self._secret = secrets.token_hex(16)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=LINE_BYTES_MAX)
        port = self._server.sockets[0].getsockname()[1]
        content = json.dumps({"port": port, "secret": self._secret, "pid": os.getpid()})
        await asyncio.to_thread(replace_file, self._path, content.encode(), private=True)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        await asyncio.to_thread(self._path.unlink, missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                words = json.loads(await reader.readline())
            if not hmac.compare_digest(str(words["secret"]), self._secret):
                return
            writer.write(json.dumps(self._answer(str(words["word"])), allow_nan=False).encode() + b"\n")
            await writer.drain()
        except (TimeoutError, ValueError, KeyError, TypeError, OSError):
            return  # not one of ours, or gone; nothing to say to it
        finally:
            writer.close()


async def ask(folder: Path, word: str) -> dict[str, Any]:
    """The running node's answer. Raises Unreachable if none runs in this folder."""
    try:
        where = json.loads((folder / FILE).read_bytes())
        port, secret = int(where["port"]), str(where["secret"])
    except FileNotFoundError:
        raise Unreachable(f"a node in {folder}", ["none runs there"], "start it with: node join INVITE") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LocalStateError(f"{folder / FILE} is damaged: {error}", "restart the node") from error
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=ANSWER_BYTES_MAX)
            try:
                writer.write(json.dumps({"secret": secret, "word": word}).encode() + b"\n")
                await writer.drain()
                answer = json.loads(await reader.readline())
            finally:
                writer.close()
    except (TimeoutError, OSError, ValueError) as error:
        raise Unreachable(
            f"the node in {folder}", [f"port {port}: {error or 'no answer'}"], "it has ended without a word: restart it"
        ) from error
    if not isinstance(answer, dict):
        raise Unreachable(f"the node in {folder}", ["it answered nonsense"], "restart it")
    return answer
