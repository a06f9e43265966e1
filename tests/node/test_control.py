"""How `node status` and `node leave` reach the running node: by the secret in its folder, on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from node import control
from node.control import FILE, LINE_BYTES_MAX, ControlServer, ask
from node.errors import LocalStateError, Unreachable


@pytest.fixture(autouse=True)
def answers_may_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ANSWER_S", 60.0)


def answer(word: str) -> Mapping[str, Any]:
    if word == "status":
        return {"state": "training", "text": "x" * 100_000}
    if word == "broken":
        return {"figure": float("nan")}
    raise KeyError(word)


def play(folder: Path, scenario: Callable[[ControlServer], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        server = ControlServer(folder, answer)
        await server.start()
        try:
            async with asyncio.timeout(60):
                await scenario(server)
        finally:
            await server.stop()

    asyncio.run(main())


async def raw(folder: Path, line: bytes) -> bytes:
    """What the port says to these bytes."""
    port = json.loads((folder / FILE).read_bytes())["port"]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(line)
        await writer.drain()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def test_a_word_is_answered(tmp_path: Path) -> None:
    async def scenario(_: ControlServer) -> None:
        assert (await ask(tmp_path, "status"))["state"] == "training"

    play(tmp_path, scenario)


def test_only_the_owner_can_read_the_secret_and_nobody_after_the_end(tmp_path: Path) -> None:
    async def scenario(_: ControlServer) -> None:
        path = tmp_path / FILE
        assert json.loads(path.read_bytes())["pid"] == os.getpid()
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0

    play(tmp_path, scenario)
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"not json\n",
        b"[]\n",
        b'{"word": "status"}\n',
        b'{"secret": "wrong", "word": "status"}\n',
        b'{"secret": 7, "word": "status"}\n',
        b"x" * (2 * LINE_BYTES_MAX) + b"\n",
    ],
)
def test_whoever_has_not_read_the_secret_hears_nothing(tmp_path: Path, line: bytes) -> None:
    async def scenario(_: ControlServer) -> None:
        assert await raw(tmp_path, line) == b""
        assert (await ask(tmp_path, "status"))["state"] == "training", "others are still served"

    play(tmp_path, scenario)


@pytest.mark.parametrize("word", ["dance", "broken"])
def test_a_word_without_an_answer_is_a_node_that_does_not_answer(tmp_path: Path, word: str) -> None:
    async def scenario(_: ControlServer) -> None:
        with pytest.raises(Unreachable, match="restart it"):
            await ask(tmp_path, word)

    play(tmp_path, scenario)


def test_where_no_node_runs(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="none runs there"):
        asyncio.run(ask(tmp_path, "status"))


def test_a_node_that_ended_without_a_word(tmp_path: Path) -> None:
    kept = b""

    async def scenario(_: ControlServer) -> None:
        nonlocal kept
        kept = (tmp_path / FILE).read_bytes()

    play(tmp_path, scenario)
    (tmp_path / FILE).write_bytes(kept)
    with pytest.raises(Unreachable, match="ended without a word"):
        asyncio.run(ask(tmp_path, "status"))


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"port": "x", "secret": "y"}', b"\xff"])
def test_a_damaged_control_file_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(LocalStateError, match="damaged"):
        asyncio.run(ask(tmp_path, "status"))
