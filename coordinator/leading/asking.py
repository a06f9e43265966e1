"""Asks members for commits over gRPC with mutual TLS: a port of the learner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio

from coordinator.leading.learning import Unknown
from coordinator.leading.service import Tls
from protos import limits
from protos.invite import InviteError, check_host_port
from protos.messages import Commit, CommitsAfter, PeerId
from protos.messages import Part as WirePart
from protos.services import STATE_COMMITS
from protos.wire import WireError, decode, decode_commits, encode

ADDRESS_S = 20.0
ADDRESSES_MOST = 4
ANSWER_BYTES = 64 * 2**20


class GrpcChain:
    """Proves a peer by its certificate from the run's CA; the channel is closed after."""

    def __init__(self, tls: Tls) -> None:
        self._credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)

    async def commits_after(
        self, peer: PeerId, addresses: Sequence[str], epoch: int, round_: int, n_most: int
    ) -> Sequence[Commit]:
        """As `learning.Chain` has it."""
        why = "it has no address"
        for address in addresses[:ADDRESSES_MOST]:
            try:
                check_host_port(address)
                async with asyncio.timeout(ADDRESS_S):
                    return await self._ask(peer, address, CommitsAfter(epoch, round_, n_most))
            except (grpc.RpcError, grpc.aio.BaseError, InviteError, WireError, TimeoutError) as error:
                why = f"{address}: {error!r}"
        raise Unknown(why)

    async def _ask(self, peer: PeerId, address: str, asked: CommitsAfter) -> Sequence[Commit]:
        options = [
            ("grpc.ssl_target_name_override", peer),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.max_receive_message_length", limits.FRAME_BYTES),
        ]
        async with grpc.aio.secure_channel(address, self._credentials, options=options) as channel:
            call = channel.stream_stream(STATE_COMMITS, request_serializer=None, response_deserializer=None)()  # type: ignore[call-arg]
            await call.write(encode(asked))
            await call.done_writing()
            raw = bytearray()
            while isinstance(frame := await call.read(), bytes):
                raw += decode(WirePart, frame).data
                if len(raw) > ANSWER_BYTES:
                    raise WireError(f"an answer of more than {ANSWER_BYTES} bytes")
            return decode_commits(bytes(raw))
