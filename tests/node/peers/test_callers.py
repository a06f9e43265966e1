"""Who calls: nonsense, many calls at once, and certificates that are not of the run."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path

import grpc
import pytest

from node.peers.grpc import Credentials, GrpcPeers, IdentityMismatch
from node.peers.server import CALLS_AT_ONCE, NodeServer
from node.peers.transport import open_call
from node.ports import PeerBusy, PeerFailed
from protos import services
from protos.messages import PeerId
from tests.fakes.certificates import Authority
from tests.fakes.holder import FakeHolder
from tests.fakes.loop import until
from tests.node.peers.served import AUTHORITY, LONG_S, calling, ignore, new_peer, patient, scenario, serving, source


def test_nonsense_ends_the_call_and_not_the_server(tmp_path: Path) -> None:
    async def main() -> None:
        dialer = patient(AUTHORITY.issue(new_peer()))
        async with serving(FakeHolder(tmp_path)) as (peer, address), calling() as peers:
            channel = await dialer.channel(peer, [address])
            for method in (services.EXCHANGE_SEND, services.EXCHANGE_FETCH_THINGS, services.STATE_COMMITS):
                call = open_call(channel, method)
                await call.write(b"\xff\xff\xff")
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, method
            await peers.ping(peer, [address])
            await dialer.close()

    scenario(main)


def test_one_caller_has_so_many_calls_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        holder = FakeHolder(tmp_path, checking=asyncio.Event())
        async with serving(holder) as (peer, address), calling() as peers:
            sending = [
                asyncio.create_task(peers.send_rows(peer, [address], b"deal", [i], source, ignore))
                for i in range(CALLS_AT_ONCE)
            ]
            await until(lambda: holder.n_checks == CALLS_AT_ONCE)
            with pytest.raises(PeerFailed, match="busy"):
                await peers.ping(peer, [address])
            assert holder.checking is not None
            holder.checking.set()
            await asyncio.gather(*sending)
            await peers.ping(peer, [address])

    scenario(main)


def test_a_caller_that_dies_and_comes_back_again_and_again_gets_its_calls_back(tmp_path: Path) -> None:
    """What its former lives had open holds no place for long, or it would shut itself out."""

    async def main() -> None:
        me, holder = AUTHORITY.issue(new_peer()), FakeHolder(tmp_path, checking=asyncio.Event())
        peer = new_peer()
        server = NodeServer(AUTHORITY.issue(peer), holder, allowed=lambda _: "", no_progress_s=LONG_S)
        address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
        for n_lives in range(1, 4):
            async with calling(me) as peers:
                sending = [
                    asyncio.create_task(peers.send_rows(peer, [address], b"deal", [i], source, ignore))
                    for i in range(CALLS_AT_ONCE)
                ]
                await until(lambda n=n_lives * CALLS_AT_ONCE: holder.n_checks == n)  # type: ignore[misc]
            ended = await asyncio.gather(*sending, return_exceptions=True)
            assert all(isinstance(each, PeerFailed) for each in ended)
            async with calling(me) as peers:
                await until_it_answers(peers, peer, address)
            await until(lambda: not server._calls)  # an answer shows one free place, the next life takes all
        await server.stop()

    scenario(main)


async def until_it_answers(peers: GrpcPeers, peer: PeerId, address: str) -> None:
    while True:
        try:
            return await peers.ping(peer, [address])
        except PeerBusy:
            await asyncio.sleep(0.001)


# -- who answers -------------------------------------------------------------------------------------------------


def test_another_peer_at_the_address_is_an_identity_mismatch(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(FakeHolder(tmp_path)) as (_, address), calling() as peers:
            with pytest.raises(IdentityMismatch, match="identity mismatch"):
                await peers.ping(new_peer(), [address])

    scenario(main)


@pytest.mark.parametrize("case", ["another run", "expired", "no peer id"])
def test_a_caller_without_a_good_certificate_gets_nowhere(tmp_path: Path, case: str) -> None:
    credentials = {
        "another run": lambda: Authority().issue(new_peer()),
        "expired": lambda: AUTHORITY.issue(new_peer(), valid_for=-datetime.timedelta(hours=1)),
        "no peer id": lambda: AUTHORITY.issue("localhost"),
    }[case]()
    ours = Credentials(credentials.certificate, credentials.key, AUTHORITY.pem)

    async def main() -> None:
        holder = FakeHolder(tmp_path)
        async with serving(holder) as (peer, address), calling(ours) as peers:
            with pytest.raises(PeerFailed):
                await peers.send_rows(peer, [address], b"deal", [1], source, ignore)
            assert holder.deals == []

    scenario(main)


def test_a_server_of_another_run_is_told_apart_from_an_unreachable_one(tmp_path: Path) -> None:
    async def main() -> None:
        stranger = Authority()
        credentials = stranger.issue(new_peer())
        async with serving(FakeHolder(tmp_path)) as (peer, address), calling(credentials) as peers:
            with pytest.raises(PeerFailed, match="TLS failed"):
                await peers.ping(peer, [address])

    scenario(main)
