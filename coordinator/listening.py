"""Addresses: which port to listen on, whether it is free, and by which host others reach this machine."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass

from coordinator.errors import MachineError, UsageError

ANY = ("0.0.0.0", "::", "")
_ELSEWHERE = ("192.0.2.1", 9)  # a documentation address (RFC 5737): it chooses a route, nothing is sent


@dataclass(frozen=True, slots=True)
class Address:
    """HOST:PORT to listen on, and the option that it came by; `asked` unless it is only a default."""

    host: str
    port: int
    option: str
    asked: bool = True

    def __str__(self) -> str:
        return host_port(self.host, self.port)


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse(text: str, option: str, *, asked: bool = True) -> Address:
    """HOST:PORT, or a PORT alone for all interfaces; port 0 asks for a free one. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    host = host.strip("[]") if colon else "0.0.0.0"
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or (colon and not host):
        raise UsageError(f"{option} {text!r} is not HOST:PORT", f"write for example {option} 0.0.0.0:8470")
    return Address(host, int(port), option, asked)


def bind(address: Address) -> socket.socket:
    """A bound TCP socket. A taken default port gives way to a free one; one that was asked for raises MachineError."""
    try:
        return _bound(address.host, address.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and not address.asked:
            return _bound(address.host, 0)
        raise _cannot_listen(address, error) from error


def reserve(address: Address) -> Address:
    """The address with a port that was free a moment ago, for a listener that binds by itself. As `bind` otherwise."""
    with bind(address) as probe:
        port = probe.getsockname()[1]
    return Address(address.host, port, address.option, address.asked)


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


def public_host(listen_host: str, advertise: str) -> str:
    """The host that others are told: the advertised one, the one listened on, or the one on the way out."""
    if advertise:
        return advertise
    return _host_on_the_way_out() if listen_host in ANY else listen_host


def _host_on_the_way_out() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def local_host(listen_host: str) -> str:
    """By which host this machine reaches the listener."""
    return "127.0.0.1" if listen_host in ANY else listen_host


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
