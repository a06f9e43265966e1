"""Where a peer is reached, by one of several addresses, and where one listens."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import grpc
import pytest

from node.errors import MachineError, PortTaken
from node.peers import dialing
from node.peers.dialing import Dialer
from node.peers.grpc import Credentials
from node.peers.server import NodeServer
from node.ports import PeerFailed
from protos.messages import PeerId
from tests.fakes.holder import FakeHolder
from tests.fakes.loop import until
from tests.node.peers.served import AUTHORITY, LONG_S, calling, new_peer, patient, scenario, serving


def test_each_address_that_fails_says_why() -> None:
    async def main() -> None:
        me = AUTHORITY.issue(new_peer())
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))  # and doesn't listen: it is nobody else's meanwhile
            await refused(me, closed.getsockname()[1])

    async def refused(me: Credentials, port: int) -> None:
        async with calling(me, dialer=Dialer(me, connect_s=10.0)) as peers:
            with pytest.raises(PeerFailed) as failed:
                await peers.ping(new_peer(), [f"127.0.0.1:{port}", "unix:7", "nonsense", "host.invalid:80"])
            why = failed.value.why
            assert f"127.0.0.1:{port}: connection refused" in why
            assert "nonsense: " in why
            assert re.search(r"host\.invalid:80: (name not found|no answer)", why)
            with pytest.raises(PeerFailed, match="no address is known"):
                await peers.ping(new_peer(), [])

    scenario(main)


def test_a_later_address_is_tried_beside_one_that_does_not_answer(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.socket() as mute:  # takes connections and never says a word
            mute.bind(("127.0.0.1", 0))
            mute.listen()
            silent = f"127.0.0.1:{mute.getsockname()[1]}"
            me = AUTHORITY.issue(new_peer())
            ended: list[tuple[str, type[BaseException]]] = []

            class Watched(Dialer):
                async def _connect(self, peer: PeerId, address: str) -> grpc.aio.Channel:
                    try:
                        return await super()._connect(peer, address)
                    except BaseException as error:
                        ended.append((address, type(error)))
                        raise

            dialer = Watched(me, connect_s=LONG_S, overlap_s=0.02)
            async with serving(FakeHolder(tmp_path)) as (peer, address), calling(me, dialer=dialer) as peers:
                await peers.ping(peer, [silent, address])
                assert ended == [(silent, asyncio.CancelledError)]  # it was still tried, and not given up before

    scenario(main)


def test_an_address_that_never_answers_is_given_up() -> None:
    async def main() -> None:
        with socket.socket() as mute:
            mute.bind(("127.0.0.1", 0))
            mute.listen()
            silent = f"127.0.0.1:{mute.getsockname()[1]}"
            me = AUTHORITY.issue(new_peer())
            async with calling(me, dialer=Dialer(me, connect_s=0.1)) as peers:
                with pytest.raises(PeerFailed, match=r"no answer in 0\.1 s"):
                    await peers.ping(new_peer(), [silent])

    scenario(main)


def test_a_peer_that_comes_back_elsewhere_is_found_there(tmp_path: Path) -> None:
    async def main() -> None:
        peer, me = new_peer(), AUTHORITY.issue(new_peer())
        dialer = patient(me)
        async with calling(me, dialer=dialer) as peers:
            async with serving(FakeHolder(tmp_path), peer) as (_, address):
                await peers.ping(peer, [address])
                left = dialer._channels[peer]
            await until(lambda: left.get_state() is not grpc.ChannelConnectivity.READY)
            with pytest.raises(PeerFailed):
                await peers.ping(peer, [address])
            async with serving(FakeHolder(tmp_path), peer) as (_, elsewhere):
                await peers.ping(peer, [address, elsewhere])

    scenario(main)


def test_connections_to_peers_that_left_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "CHANNELS_SWEPT", 2)

    async def main() -> None:
        me = AUTHORITY.issue(new_peer())
        dialer = patient(me)
        async with serving(FakeHolder(tmp_path)) as (stays, there), calling(me, dialer=dialer) as peers:
            await peers.ping(stays, [there])
            async with serving(FakeHolder(tmp_path)) as (leaves, address):
                await peers.ping(leaves, [address])
                left = dialer._channels[leaves]
            await until(lambda: left.get_state() is not grpc.ChannelConnectivity.READY)
            async with serving(FakeHolder(tmp_path)) as (comes, address):
                await peers.ping(comes, [address])
            assert set(dialer._channels) == {stays, comes}
            assert set(dialer._locks) == {stays, comes}

    scenario(main)


# -- listening ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_taken_port_is_an_error_that_names_port_and_option(tmp_path: Path, host: str) -> None:
    async def main() -> None:
        async with serving(FakeHolder(tmp_path)) as (_, address):
            port = address.rpartition(":")[2]
            second = NodeServer(AUTHORITY.issue(new_peer()), FakeHolder(tmp_path), allowed=lambda _: "")
            with pytest.raises(PortTaken, match=rf"{host}:{port} is in use.*--listen"):
                await second.start(f"{host}:{port}")
            await second.stop()

    scenario(main)


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "203.0.113.9:0", ":5", ""])
def test_an_address_that_is_not_ours_is_an_error(tmp_path: Path, listen: str) -> None:
    async def main() -> None:
        server = NodeServer(AUTHORITY.issue(new_peer()), FakeHolder(tmp_path), allowed=lambda _: "")
        with pytest.raises(MachineError, match=r"can't listen.*--listen"):
            await server.start(listen)

    scenario(main)
