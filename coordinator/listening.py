"""Addresses: which port to listen on, whether it is free, and by which host others reach this machine."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import random
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from coordinator.errors import MachineError, UsageError

ENDS_S = 10.0
AGAIN_S = 0.1
ANY = ("0.0.0.0", "::", "")
KEPT_FROM_PORT = 10240
"""Ports that are chosen here are from this one on: those below are what programs listen on by default."""
KEPT_TRIES = 64
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_OUTGOING_FROM_PORT = 32768  # Linux's default; elsewhere it begins higher
_ELSEWHERE = ("192.0.2.1", 9)  # a documentation address (RFC 5737): it chooses a route, nothing is sent
_ELSEWHERE_6 = ("2001:db8::1", 9)  # RFC 3849
_INNER = ("docker", "br-", "veth", "virbr", "cni", "flannel", "lxc", "podman", "tun", "tap", "wg")
"""Names of interfaces that lead to containers, virtual machines or tunnels rather than to other contributors."""


@dataclass(frozen=True, slots=True)
class Address:
    """HOST:PORT to listen on, and the option that it came by.

    Attributes:
        asked: it is more than a default: a taken port is an error.
        remembered: it is asked for because it was used the last time.
    """

    host: str
    port: int
    option: str
    asked: bool = True
    remembered: bool = False

    def __str__(self) -> str:
        return host_port(self.host, self.port)


def host_port(host: str, port: int) -> str:
    return f"{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    """A host as it stands before a colon and a port."""
    return f"[{host}]" if ":" in host else host


def parse(text: str, option: str, *, asked: bool = True, remembered: bool = False) -> Address:
    """HOST:PORT, or a PORT alone for all interfaces; port 0 asks for a free one. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    host = host.strip("[]") if colon else "0.0.0.0"
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or (colon and not host):
        raise UsageError(f"{option} {text!r} is not HOST:PORT", f"write for example {option} 0.0.0.0:8470")
    return Address(host, int(port), option, asked, remembered)


def bind(address: Address) -> socket.socket:
    """A bound TCP socket. A taken default port gives way to a free one; one that was asked for raises MachineError.

    A free one will be wanted again at the next start. So it is none of those that the system gives to connections that
    go out, for any of them could have it then.
    """
    try:
        return _bound(address.host, address.port) if address.port else _bound_to_free(address.host)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and not address.asked:
            return _bound_to_free(address.host)
        raise _cannot_listen(address, error) from error


def reserve(address: Address) -> Address:
    """The address with a port that was free a moment ago, for a listener that binds by itself. As `bind` otherwise."""
    with bind(address) as probe:
        port = probe.getsockname()[1]
    return replace(address, port=port)


async def reserve_soon(address: Address) -> Address:
    """As `reserve`, for a helper's port; a remembered one may be taken for a moment.

    The helper of a coordinator that was killed ends by itself, but after it.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + ENDS_S
    while True:
        try:
            return reserve(address)
        except MachineError:
            if not address.remembered or loop.time() >= until:
                raise
            await asyncio.sleep(AGAIN_S)


def taken(address: Address) -> MachineError:
    return MachineError(
        f"{address.option} {address}: the port is taken by another program",
        f"stop it or choose another port with {address.option} HOST:PORT",
    )


def _cannot_listen(address: Address, error: OSError) -> MachineError:
    if error.errno == errno.EADDRINUSE:
        return taken(address)
    if error.errno == errno.EACCES:
        why, remedy = "this user may not listen there", "choose a port above 1023"
    elif error.errno == errno.EADDRNOTAVAIL:
        why, remedy = "no interface of this machine has this address", "give one that it has, or 0.0.0.0"
    else:
        why, remedy = error.strerror or str(error), "give an address of this machine"
    return MachineError(f"{address.option} {address}: {why}", f"{remedy} with {address.option} HOST:PORT")


def _bound_to_free(host: str) -> socket.socket:
    ports = range(KEPT_FROM_PORT, outgoing_from())
    for port in random.SystemRandom().sample(ports, min(KEPT_TRIES, len(ports))):
        try:
            return _bound(host, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # the latter: kept for something else
                raise
    return _bound(host, 0)


def outgoing_from() -> int:
    """The first port that the system gives to connections which go out."""
    try:
        return int(_OUTGOING.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _OUTGOING_FROM_PORT


def _bound(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, where = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports in TIME_WAIT are free
        bound.bind(where)
        if port:  # a listener with SO_REUSEADDR on the same port shows only here
            bound.listen(1)
    except OSError:
        bound.close()
        raise
    return bound


def public_hosts(listen_host: str, advertise: str) -> tuple[str, ...]:
    """The hosts that others are told: the advertised one, the one listened on, or this machine's own addresses."""
    if advertise:
        return (advertise,)
    return own_hosts(with_ipv6=listen_host == "::") if listen_host in ANY else (listen_host,)


def own_hosts(*, with_ipv6: bool = False) -> tuple[str, ...]:
    """This machine's addresses on the ways out, IPv4 first; without such a way that of an interface, or loopback.

    A bridge of containers is nobody's way out, so the name of the host or the order of interfaces is never asked
    before the routes are.
    """
    found = [_source_towards(socket.AF_INET, _ELSEWHERE) or _of_an_interface(4)]
    if with_ipv6:
        found.append(_source_towards(socket.AF_INET6, _ELSEWHERE_6) or _of_an_interface(6))
    return tuple(host for host in found if host) or ("127.0.0.1",)


def _source_towards(family: socket.AddressFamily, target: tuple[str, int]) -> str:
    """The address that a packet to the target would carry, or an empty string. Nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            host = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if is_loopback(host) else host


def _of_an_interface(version: int) -> str:
    """The first address of an interface that is up and leads out of this machine; bridges and tunnels come last."""
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    stats = psutil.net_if_stats()
    found: list[tuple[bool, int, str]] = []
    for index, (name, addresses) in enumerate(psutil.net_if_addrs().items()):
        if name not in stats or not stats[name].isup:
            continue
        for entry in addresses:
            if entry.family is not family:
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if not address.is_loopback and not address.is_link_local:
                found.append((name.startswith(_INNER), index, str(address)))
    return min(found)[2] if found else ""


def local_host(listen_host: str) -> str:
    """By which host this machine reaches the listener."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(listen_host, listen_host)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
