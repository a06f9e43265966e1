"""Which of a machine's addresses others are told, and which ports are chosen."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from coordinator import listening
from coordinator.errors import MachineError
from coordinator.listening import own_hosts, parse, public_hosts

Interfaces = dict[str, tuple[str, ...]]
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Sets what this machine seems to be: its interfaces, which of them are down, and whence its ways out start."""

    def made(interfaces: Interfaces, *, down: tuple[str, ...] = (), out4: str = "", out6: str = "") -> None:
        entries = {
            name: [
                SimpleNamespace(family=socket.AF_INET6 if ":" in address else socket.AF_INET, address=address)
                for address in addresses
            ]
            for name, addresses in interfaces.items()
        }
        stats = {name: SimpleNamespace(isup=name not in down) for name in interfaces}
        ways = {socket.AF_INET: out4, socket.AF_INET6: out6}
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
        monkeypatch.setattr(listening, "_source_towards", lambda family, _: ways[family])

    return made


MANY: Interfaces = {
    "lo": ("127.0.0.1", "::1"),
    "docker0": ("172.17.0.1",),
    "tun0": ("10.8.0.2",),
    "eth0": ("10.77.0.1", "fe80::1%eth0", "fd77::1"),
}


def test_the_way_out_goes_before_whatever_interfaces_there_are(machine: Machine) -> None:
    machine(MANY, out4="198.51.100.7", out6="2001:db8::7")
    assert own_hosts() == ("198.51.100.7",)
    assert own_hosts(with_ipv6=True) == ("198.51.100.7", "2001:db8::7")


def test_without_a_way_out_bridges_and_tunnels_come_last(machine: Machine) -> None:
    machine(MANY)
    assert own_hosts(with_ipv6=True) == ("10.77.0.1", "fd77::1")
    machine(MANY, down=("eth0",))
    assert own_hosts(with_ipv6=True) == ("172.17.0.1",)


def test_a_machine_without_a_net_has_loopback_alone(machine: Machine) -> None:
    machine({"lo": ("127.0.0.1",)})
    assert own_hosts(with_ipv6=True) == ("127.0.0.1",)


@pytest.mark.parametrize(
    ("listen", "advertise", "told"),
    [
        ("0.0.0.0", "", ("10.77.0.1",)),
        ("::", "", ("10.77.0.1", "fd77::1")),
        ("10.8.0.2", "", ("10.8.0.2",)),
        ("0.0.0.0", "run.example", ("run.example",)),
    ],
)
def test_what_is_given_goes_before_what_is_found(
    machine: Machine, listen: str, advertise: str, told: tuple[str, ...]
) -> None:
    machine(MANY)
    assert public_hosts(listen, advertise) == told


@pytest.fixture
def outgoing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a system says which ports connections that go out may have; nothing is there yet."""
    said = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(listening, "_OUTGOING", said)
    return said


def test_a_port_that_is_kept_is_none_that_an_outgoing_connection_may_have(outgoing: Path) -> None:
    """Else, after a crash, a connection that nobody thinks of keeps the coordinator from its own port."""
    first = listening.KEPT_FROM_PORT + 2_000
    outgoing.write_text(f"{first}\t60999\n")
    free = parse("127.0.0.1:0", "--http")
    for _ in range(20):
        with listening.bind(free) as bound:
            assert listening.KEPT_FROM_PORT <= bound.getsockname()[1] < first
    with listening.bind(free) as bound:
        taken = parse(f"127.0.0.1:{bound.getsockname()[1]}", "--http", asked=False)
        with listening.bind(taken) as other:
            port = other.getsockname()[1]
    assert port != taken.port
    assert listening.KEPT_FROM_PORT <= port < first


@pytest.mark.parametrize("ports", ["1024 65535", "0", "nonsense", None], ids=str)
def test_where_the_system_keeps_no_ports_apart_any_free_one_will_do(outgoing: Path, ports: str | None) -> None:
    if ports is not None:
        outgoing.write_text(f"{ports}\n")
    with listening.bind(parse("127.0.0.1:0", "--http")) as bound:
        assert bound.getsockname()[1] >= 1024


def test_a_host_that_is_not_here_is_said_at_once() -> None:
    with pytest.raises(MachineError, match=r"--http 192\.0\.2\.1:0: no interface of this machine has this address"):
        listening.bind(parse("192.0.2.1:0", "--http"))
