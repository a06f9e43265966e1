"""Opening connections: several addresses of a peer in order, overlapping, with a diagnosis for each that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from node.peers.transport import Credentials, IdentityMismatch, channel_options, failure
from node.ports import PeerFailed
from node.racing import OVERLAP_S, NoneWillDo, first_of
from protos import limits, services, wire
from protos.calls import PingRequest
from protos.invite import InviteError, check_host_port
from protos.messages import PeerId

CONNECT_S = 5.0
CHANNELS_SWEPT = 64
"""With so many channels, those that broke are closed before another one is opened: peers come and go for weeks."""


class Dialer:
    """Keeps one open channel for each peer, and opens others when it broke.

    Args:
        connect_s: how long one address may take.
        overlap_s: how long an address is tried alone before the next one is tried too.
    """

    def __init__(self, credentials: Credentials, *, connect_s: float = CONNECT_S, overlap_s: float = OVERLAP_S) -> None:
        self._tls = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.certificate)
        self._connect_s = connect_s
        self._overlap_s = overlap_s
        self._channels: dict[PeerId, grpc.aio.Channel] = {}
        self._locks: dict[PeerId, asyncio.Lock] = {}
        self._closed = False

    async def channel(self, peer: PeerId, addresses: Sequence[str]) -> grpc.aio.Channel:
        """A connected channel. Raises PeerFailed with what each address said, IdentityMismatch if others answered."""
        lock = self._locks.setdefault(peer, asyncio.Lock())
        async with lock:
            if self._closed:
                raise PeerFailed(peer, "this node is closing")
            known = self._channels.get(peer)
            if known is not None:
                if known.get_state() is grpc.ChannelConnectivity.READY:
                    return known
                await self.forget(peer, known)
            if len(self._channels) >= CHANNELS_SWEPT:
                await self._sweep()
            channel = await self._race(peer, list(dict.fromkeys(addresses))[: limits.ADDRESSES])
            self._channels[peer] = channel
            return channel

    async def forget(self, peer: PeerId, channel: grpc.aio.Channel) -> None:
        """Close a channel that failed, so that the next call dials again."""
        if self._channels.get(peer) is channel:
            del self._channels[peer]
        await channel.close(None)

    async def _sweep(self) -> None:
        """Close channels that are not connected; whoever wants such a peer again would dial anew anyhow."""
        for peer, channel in list(self._channels.items()):
            if channel.get_state() is not grpc.ChannelConnectivity.READY:
                await self.forget(peer, channel)
        for peer in [peer for peer, lock in self._locks.items() if peer not in self._channels and not lock.locked()]:
            del self._locks[peer]

    async def close(self) -> None:
        self._closed = True
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close(None)

    async def _race(self, peer: PeerId, addresses: list[str]) -> grpc.aio.Channel:
        if not addresses:
            raise PeerFailed(peer, "no address is known (it may be behind a firewall)")
        outcome = await first_of(
            addresses,
            lambda address: self._connect(peer, address),
            PeerFailed,
            overlap_s=self._overlap_s,
            spare=lambda channel: channel.close(None),
        )
        if not isinstance(outcome, NoneWillDo):
            return outcome
        why = "; ".join(f"{address}: {error.why}" for address, error in outcome.failures.items())
        if all(isinstance(error, IdentityMismatch) for error in outcome.failures.values()):
            raise IdentityMismatch(peer, why)
        raise PeerFailed(peer, why)

    async def _connect(self, peer: PeerId, address: str) -> grpc.aio.Channel:
        try:
            check_host_port(address)  # gRPC would take "unix:7" for a socket of this machine
        except InviteError as error:
            raise PeerFailed(peer, str(error)) from None
        channel = grpc.aio.secure_channel(f"dns:///{address}", self._tls, options=channel_options(peer))
        try:
            async with asyncio.timeout(self._connect_s):
                state = channel.get_state(try_to_connect=True)
                while state is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise await self._why(peer, channel)
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            await channel.close(None)
            raise PeerFailed(peer, f"no answer in {self._connect_s:g} s") from None
        except BaseException:
            await channel.close(None)
            raise
        return channel

    async def _why(self, peer: PeerId, channel: grpc.aio.Channel) -> PeerFailed:
        """The state of a channel names no reason; a call on it fails with one."""
        ping = channel.unary_unary(services.STATE_PING, None, None)
        try:
            await ping(wire.encode(PingRequest(b"")), timeout=self._connect_s)
        except grpc.aio.AioRpcError as error:
            return failure(peer, error)
        return PeerFailed(peer, "the connection came and went")
