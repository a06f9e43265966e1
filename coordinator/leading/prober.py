"""Finds out whether a member can be connected to: dials its advertised addresses and asks who is there."""

from __future__ import annotations

import asyncio
import secrets

import grpc
import grpc.aio

from coordinator.leading.service import Tls
from protos.calls import PingReply, PingRequest
from protos.invite import InviteError, check_host_port
from protos.messages import PeerId
from protos.services import STATE_PING
from protos.wire import WireError, decode, encode

ADDRESS_S = 5.0
ALL_S = 15.0
ADDRESSES_MOST = 4
_REPLY_BYTES = 4096


class GrpcProber:
    """Proves a peer by its certificate from the run's CA, and by its word; the channel is closed after."""

    def __init__(self, tls: Tls) -> None:
        self._credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)

    async def reaches(self, peer: PeerId, addresses: tuple[str, ...]) -> bool:
        """Whether this peer, and no other, answers at one of the addresses; at most `ALL_S`. Never raises."""
        try:
            async with asyncio.timeout(ALL_S):
                for address in addresses[:ADDRESSES_MOST]:
                    if await self._answers(peer, address):
                        return True
        except TimeoutError:
            pass
        return False

    async def _answers(self, peer: PeerId, address: str) -> bool:
        nonce = secrets.token_bytes(16)
        try:
            check_host_port(address)
            options = [
                ("grpc.ssl_target_name_override", peer),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.enable_retries", 0),
                ("grpc.max_receive_message_length", _REPLY_BYTES),
            ]
            async with grpc.aio.secure_channel(address, self._credentials, options=options) as channel:
                call = channel.unary_unary(STATE_PING, request_serializer=_as_is, response_deserializer=_as_is)
                reply = decode(PingReply, await call(encode(PingRequest(nonce)), timeout=ADDRESS_S))
        except (grpc.RpcError, InviteError, WireError):
            return False
        return reply.nonce == nonce and reply.peer == peer


def _as_is(raw: bytes) -> bytes:
    return raw
