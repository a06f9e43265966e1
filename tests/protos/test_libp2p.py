"""hivemind's libp2p daemon takes our key for its identity and gives it the same peer id."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protos.signing import Identity


@pytest.mark.slow  # starts a daemon
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what hivemind and its imports call is not ours to mend
def test_the_daemon_has_our_peer_id(tmp_path: Path) -> None:
    from hivemind.p2p import P2P  # here, since it sets up more than itself

    identity = Identity.from_private_bytes(bytes(range(32)))
    path = tmp_path / "identity"
    path.write_bytes(identity.libp2p_private_key())

    async def peer_id_of_the_daemon() -> str:
        daemon = await P2P.create(
            identity_path=str(path), dht_mode="client", auto_nat=False, nat_port_map=False, use_relay=False,
            startup_timeout=60,
        )  # fmt: skip
        try:
            return str(daemon.peer_id)
        finally:
            await daemon.shutdown()

    assert asyncio.run(asyncio.wait_for(peer_id_of_the_daemon(), 90)) == identity.peer
    assert path.read_bytes() == identity.libp2p_private_key()
