"""Multiaddresses of the DHT's nodes: written, from what a daemon listens at to what others are told, and tried."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from contextlib import suppress

from node.errors import MachineError


def multiaddress(listen: str) -> str:
    """HOST:PORT as a TCP multiaddress. Raises MachineError for anything else."""
    host, colon, port = listen.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise MachineError(f"the DHT can't listen at {listen!r}", "give HOST:PORT, port 0 for any free one")
    try:
        return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"
    except ValueError:
        return f"/dns/{host}/tcp/{port}"


def told(visible: Sequence[str], host: str | None) -> tuple[str, ...]:
    """What others are told of the addresses that the daemon listens at: with the host that is known to lead here, else
    all but loopback, which is another machine for everybody else. Loopback alone stays: then all are on this machine.
    """
    if host and visible:
        port, name = visible[0].split("/tcp/")[1].split("/")[0], visible[0].rpartition("/p2p/")[2]
        bracketed = f"[{host}]" if ":" in host else host
        return (f"{multiaddress(f'{bracketed}:{port}')}/p2p/{name}",)
    outside = tuple(each for each in visible if not each.startswith(("/ip4/127.", "/ip6/::1/")))
    return outside or tuple(visible)


def listened(listen: str) -> list[str]:
    """Multiaddresses to listen at: all of IPv6 means all of IPv4 as well, as it does for TCP elsewhere."""
    host, _, port = listen.rpartition(":")
    return [multiaddress(listen), *([f"/ip4/0.0.0.0/tcp/{port}"] if host.strip("[]") == "::" else [])]


def with_port(listen: str, addresses: Sequence[str]) -> str:
    """The address listened at with the port that was got, so that a daemon started again takes the same."""
    host, _, port = listen.rpartition(":")
    ports = [address.split("/tcp/")[1].split("/")[0] for address in addresses if "/tcp/" in address]
    return f"{host}:{ports[0]}" if port == "0" and ports else listen


async def knock(multiaddress: str) -> None:
    """Raises OSError if nothing listens at a TCP multiaddress, ValueError for another kind."""
    match multiaddress.strip("/").split("/"):
        case ["ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port]:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        case _:
            raise ValueError(f"{multiaddress} is no TCP address")
