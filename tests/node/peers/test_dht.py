"""The DHT's helper process and hivemind's side effects: contained, replaced when it dies, gone when we are."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.errors import MachineError, PortTaken
from protos.messages import Record
from protos.signing import Identity

pytestmark = pytest.mark.slow

RUN = Identity.from_private_bytes(b"r" * 32).peer


@pytest.fixture
def answers_may_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query that this machine is too slow for looks like one that finds nothing."""
    monkeypatch.setattr("node.peers.dht.FIND_S", 30.0)


async def start(folder: Path, identity: Identity, **options: object):  # type: ignore[no-untyped-def]
    from node.peers.dht import Dht

    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    given = {"listen": "127.0.0.1:0", "bootstrap": (), "clock": time.monotonic, "folder": folder, **options}
    return await Dht.start(identity, RUN, **given)


def helpers(parent: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended just now
            if child.name() == "p2pd":
                found.append(child)
    return found


def ended(process: psutil.Process) -> bool:
    """Whether it runs no more, whoever has yet to hear of it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - another process makes it true
        await asyncio.sleep(0.01)


def next_up(dht: Any) -> asyncio.Event:
    """Set once another daemon of this node has been started and has joined.

    Before, it would be cut off by whoever closes it, and hivemind leaves its connections to the garbage collector then.
    """
    up, is_up = dht._up, asyncio.Event()

    async def noted() -> None:
        await up()
        is_up.set()

    dht._up = noted
    return is_up


def test_closing_leaves_neither_process_nor_socket(tmp_path: Path) -> None:
    async def main() -> None:
        dht = await start(tmp_path / "a", Identity.generate())
        assert len(helpers(os.getpid())) == 1
        await dht.close()
        assert helpers(os.getpid()) == []
        assert os.listdir(tmp_path / "a") == ["p2p.key"]

    asyncio.run(main())


def test_a_killed_agent_leaves_no_helper(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys, time; from pathlib import Path; from node.peers.dht import Dht;"
        "from protos.signing import Identity\n"
        "async def main():\n"
        "    me = Identity.generate()\n"
        "    await Dht.start(me, me.peer, listen='127.0.0.1:0', bootstrap=(), clock=time.monotonic,"
        " folder=Path(sys.argv[1]))\n"
        "    print('up', flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"up\n"
        (helper,) = helpers(agent.pid)
        os.kill(agent.pid, signal.SIGKILL)
        agent.wait()

    async def again() -> None:  # and what it left in the folder is in nobody's way
        await until(lambda: ended(helper))
        dht = await start(tmp_path, Identity.generate())
        await dht.close()
        assert os.listdir(tmp_path) == ["p2p.key"]

    asyncio.run(again())


@pytest.mark.usefixtures("answers_may_take_their_time")
def test_a_helper_that_dies_is_said_and_replaced_at_the_same_address(tmp_path: Path) -> None:
    async def main() -> None:
        said: list[str] = []
        a, b = Identity.generate(), Identity.generate()
        first = await start(tmp_path / "a", a)
        second = await start(tmp_path / "b", b, bootstrap=first.addresses(), failed=said.append)
        before = second.addresses()
        helper, up_again = second._p2p._child.pid, next_up(second)
        os.kill(helper, signal.SIGKILL)
        await up_again.wait()
        assert second._p2p._child.pid != helper
        async with asyncio.timeout(90):
            while await first.find(b.peer, 2) is None:
                await second.publish(Record(b.peer, 2, ("127.0.0.1:1",), second.addresses(), 0, 0, bytes(32)))
        assert second.addresses() == before
        assert "ended with -9" in said[0]
        await second.close()
        await first.close()

    asyncio.run(main())


@pytest.mark.usefixtures("answers_may_take_their_time")
def test_a_bootstrap_node_that_is_not_there_is_no_error_and_can_be_joined_later(tmp_path: Path) -> None:
    async def main() -> None:
        a, b = Identity.generate(), Identity.generate()
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))  # and doesn't listen: it is nobody else's before it is the late one's
            port = held.getsockname()[1]
            address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{a.peer}"
            early = await start(tmp_path / "b", b, bootstrap=(address, "nonsense", "/ip4/127.0.0.1/tcp/1"))
            assert await early.find(a.peer, 0) is None
        late = await start(tmp_path / "a", a, listen=f"127.0.0.1:{port}")
        assert late.addresses() == (address,)
        await early.publish(Record(b.peer, 1, (), (), 0, 0, bytes(32)))  # notices that it knows nobody
        assert await late.find(b.peer, 1) is not None
        await early.close()
        await late.close()

    asyncio.run(main())


@pytest.mark.usefixtures("answers_may_take_their_time")
def test_one_that_goes_over_to_dialling_out_is_found_although_others_know_it_from_before(tmp_path: Path) -> None:
    async def main() -> None:
        a, b = Identity.generate(), Identity.generate()
        first = await start(tmp_path / "a", a)
        second = await start(tmp_path / "b", b, bootstrap=first.addresses())
        await until(lambda: not first.alone)
        before, up_again = second._node, next_up(second)
        await second.dial_out_only()
        await up_again.wait()
        assert second._node is not before
        assert second._node.node_id in first._node.protocol.routing_table  # so it is told of itself
        await second.publish(Record(b.peer, 1, (), (), 0, 0, bytes(32)))
        assert await first.find(b.peer, 1) is not None
        await second.close()
        await first.close()

    asyncio.run(main())


@pytest.mark.parametrize("lie", ["you are your own neighbour", "I fail in a way that nobody expects"])
def test_nothing_that_another_node_answers_ends_this_one(
    tmp_path: Path, lie: str, request: pytest.FixtureRequest
) -> None:
    if lie.startswith("you"):
        request.getfixturevalue("answers_may_take_their_time")

    async def main() -> None:
        a, b = Identity.generate(), Identity.generate()
        liar = await start(tmp_path / "a", a)
        honest = await start(tmp_path / "b", b, bootstrap=liar.addresses())
        await until(lambda: not honest.alone)
        own = {honest._node.node_id: honest._p2p.peer_id}

        async def answers(peer: object, keys: list[object]) -> dict[object, tuple[None, dict[object, object]]]:
            if not lie.startswith("you"):
                raise AssertionError
            return {key: (None, dict(own)) for key in keys}

        honest._node.protocol.call_find = answers
        await honest.publish(Record(b.peer, 1, (), (), 0, 0, bytes(32)))
        assert await honest.find(a.peer, 1) is None
        await honest.join(liar.addresses())
        if lie.startswith("you"):
            assert await honest.find(b.peer, 1) is not None
        await honest.close()
        await liar.close()

    asyncio.run(main())


def test_a_taken_port_is_named_with_its_option(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(PortTaken, match=f"127.0.0.1:{port} is in use.*--dht"):
                await start(tmp_path / "a", Identity.generate(), listen=f"127.0.0.1:{port}")
        with pytest.raises(MachineError, match="can't listen"):
            await start(tmp_path / "a", Identity.generate(), listen="nonsense")
        assert helpers(os.getpid()) == []

    asyncio.run(main())


def test_a_folder_with_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    async def main() -> None:
        folder = tmp_path / ("x" * 90)
        dht = await start(folder, Identity.generate())
        short = dht._sockets
        assert short != folder
        assert short.stat().st_mode & 0o077 == 0
        await dht.close()
        assert not short.exists()

    asyncio.run(main())


def test_hivemind_does_not_seize_our_logging() -> None:
    import node.peers.dht  # noqa: F401

    logger = logging.getLogger("hivemind")
    assert logger.handlers == []
    assert logger.propagate
    assert logging.getLevelName(logging.WARNING) == "WARNING"
    assert not logging.getLogger("hivemind.dht.node").isEnabledFor(logging.WARNING)


def test_whatever_goes_wrong_over_a_restart_it_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old daemon can't be cleared away, and the folder for its sockets is gone."""
    from node.peers import dht as module

    monkeypatch.setattr(module, "RESTART_FIRST_S", 0.01)
    monkeypatch.setattr(module, "SOCKET_PATH_MAX", 10)
    said: list[str] = []

    async def main() -> None:
        dht = await start(tmp_path / "a", Identity.generate(), failed=said.append)
        assert dht._sockets != dht._folder
        (helper,) = helpers(os.getpid())
        up_again = next_up(dht)
        down, failures = dht._down, [OSError("Permission denied"), OSError("Too many open files")]

        async def fails_at_first() -> None:
            await down()
            if len(failures) == 1:  # now that no daemon runs, nor is started
                shutil.rmtree(dht._sockets)
            if failures:
                raise failures.pop()

        dht._down = fails_at_first
        helper.kill()
        await up_again.wait()
        assert len(helpers(os.getpid())) == 1
        assert failures == []
        assert dht._sockets.is_dir()
        await dht.close()
        assert helpers(os.getpid()) == []

    asyncio.run(asyncio.wait_for(main(), 100))
    assert "Too many open files" in said[1]
