"""A small internet on this machine: hosts as network namespaces on one bridge, some of them behind routers with NAT.

Nothing of it touches the machine's own network: the bridge has a namespace, too. Needs root and iproute2; `missing()`
says what is not there. Traffic can be cut, dropped, rejected and slowed, each host by itself.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

TOOLS = ("ip", "nft", "tc")
PREFIX = "10.77.0"
RESOLVERS = Path("/etc/netns")
LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000

T = TypeVar("T")


def missing() -> str:
    """Why no lab can be built here, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"network namespaces need {', '.join(absent)} (Debian: iproute2, nftables)"
    probe = f"bn{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces can't be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True, capture_output=True)
    return ""


class Lab:
    """Hosts by name; a context manager that takes everything down again.

    Args:
        public: hosts on the bridge, in the order of their addresses 10.77.0.1, .2, …
        private: hosts behind a router of their own each, which masquerades what goes out and drops what comes in
            unasked. They have 192.168.K.2, their routers the next addresses of the bridge.
        ipv6: hosts on the bridge have fd77::1, … as well.
    """

    def __init__(self, public: Sequence[str], private: Sequence[str] = (), *, ipv6: bool = False) -> None:
        self._mark = f"bn{secrets.token_hex(2)}"
        self._public, self._private, self._ipv6 = tuple(public), tuple(private), ipv6
        self._spaces: list[str] = []
        self._files: list[Path] = []
        self._n_links = 0

    def __enter__(self) -> Lab:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for space in reversed(self._spaces):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        self._spaces.clear()
        for file in self._files:
            shutil.rmtree(file, ignore_errors=True)

    # -- where things are -----------------------------------------------------------------------------------------

    def address(self, host: str) -> str:
        """The address by which a host is reached, or, of one behind a router, by which nobody reaches it."""
        if host in self._private:
            return f"192.168.{self._private.index(host) + 1}.2"
        return f"{PREFIX}.{self._public.index(host) + 1}"

    def address6(self, host: str) -> str:
        return f"fd77::{self._public.index(host) + 1:x}"

    def within(self, host: str, *words: str) -> list[str]:
        """The words of a command that runs on a host; the process that starts is the command itself."""
        return ["ip", "netns", "exec", self._space(host), *words]

    def names(self, host: str, entries: Mapping[str, Sequence[str]]) -> None:
        """What a host resolves names to, for processes that are started after this."""
        folder = RESOLVERS / self._space(host)
        folder.mkdir(parents=True, exist_ok=True)
        self._files.append(folder)
        lines = [f"{address} {name}" for name, addresses in entries.items() for address in addresses]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def interface(self, host: str, device: str, address: str) -> None:
        """One more interface of a host, which leads to nobody."""
        self._ip(host, "link", "add", device, "type", "bridge")
        self._ip(host, "addr", "add", address, "dev", device)
        self._ip(host, "link", "set", device, "up")

    def blackhole6(self, host: str) -> None:
        """A host that believes to have IPv6: what it sends there vanishes."""
        self._nft(host, "output", "meta", "nfproto", "ipv6", "meta", "oifname", "eth0", "counter", "drop")

    def only6(self, host: str) -> None:
        """Take a host's IPv4 address away."""
        self._ip(host, "addr", "del", f"{self.address(host)}/24", "dev", "eth0")

    # -- faults ---------------------------------------------------------------------------------------------------

    def unplug(self, host: str) -> None:
        """The cable is out: the host's interface stays up, and nothing passes. Routes stay."""
        self._ip("hub", "link", "set", self._port(host), "down")

    def plug(self, host: str) -> None:
        self._ip("hub", "link", "set", self._port(host), "up")

    def drop(self, host: str, *, source: str = "", target: str = "", port: int = 0) -> None:
        """Packets of a host vanish without a word: all, or those from or to an address, to a TCP port of its own."""
        for chain, field, other in (("input", "saddr", source), ("output", "daddr", target)):
            if (chain == "input" and target and not source) or (chain == "output" and source and not target):
                continue
            words = [*(["ip", field, other] if other else []), *(["tcp", "dport", str(port)] if port else [])]
            if port and chain == "output":
                continue
            self._nft(host, chain, *words, "counter", "drop")

    def reject(self, host: str, port: int) -> None:
        """A host answers connections to a port with a reset."""
        self._nft(host, "input", "tcp", "dport", str(port), "counter", "reject", "with", "tcp", "reset")

    def lose(self, host: str, percent: int) -> None:
        """So many packets of a hundred that come to a host or leave it are lost, at random."""
        for chain in ("input", "output"):
            self._nft(host, chain, "numgen", "random", "mod", "100", "<", str(percent), "counter", "drop")

    def reset(self, host: str) -> None:
        """A host's TCP connections are broken off, at both ends, as something speaks on them; new ones, too."""
        for chain in ("input", "output"):
            self._nft(host, chain, "oifname" if chain == "output" else "iifname", "lo", "accept")
            self._nft(host, chain, "tcp", "flags", "rst", "accept")
            self._nft(host, chain, "meta", "l4proto", "tcp", "counter", "reject", "with", "tcp", "reset")

    def heal(self, host: str) -> None:
        """End what `drop`, `reject`, `lose` and `reset` did."""
        self._run(self.within(host, "nft", "delete", "table", "inet", "lab"), check=False)

    def forget(self, host: str, idle_s: int) -> None:
        """A private host's router forgets connections idle for so long: what comes on them later is not let through."""
        for setting in (f"tcp_timeout_established={idle_s}", "tcp_loose=0"):
            self._run(self.within(self._gate(host), "sysctl", "-qw", f"net.netfilter.nf_conntrack_{setting}"))
        rule = ("nft", "insert", "rule", "ip", "guard", "through", "ct", "state", "invalid", "counter", "drop")
        self._run(self.within(self._gate(host), *rule))

    def hits(self, host: str) -> int:
        """How many packets of a host met a fault since its last `heal`."""
        listed = self._run(self.within(host, "nft", "list", "table", "inet", "lab"), check=False)
        words = listed.split()
        return sum(int(words[index + 2]) for index, word in enumerate(words) if word == "counter")

    def slow(self, host: str, rate: str, *, burst: str = "32kb", latency: str = "400ms") -> None:
        """What a host sends and receives passes at a rate such as `3mbit`."""
        for space, device in ((self._space(host), "eth0"), (self._space(self._gate(host)), self._far(host))):
            limits = ("rate", rate, "burst", burst, "latency", latency)
            self._run(["ip", "netns", "exec", space, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *limits])

    def quicken(self, host: str) -> None:
        """End what `slow` did."""
        for space, device in ((self._space(host), "eth0"), (self._space(self._gate(host)), self._far(host))):
            words = ["ip", "netns", "exec", space, "tc", "qdisc", "del", "dev", device, "root"]
            self._run(words, check=False)

    def inside(self, host: str, do: Callable[[], T]) -> T:
        """What a function returns that runs in a thread on a host: sockets that it opens are the host's."""

        def there() -> T:
            with open(f"/run/netns/{self._space(host)}") as space:
                if LIBC.setns(space.fileno(), CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "no way into the host")
            return do()

        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(there).result()

    # -- building -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        self._add("hub")
        self._ip("hub", "link", "add", "br0", "type", "bridge")
        self._ip("hub", "link", "set", "br0", "up")
        for index, host in enumerate(self._public, 1):
            self._add(host)
            self._plug_in(host, f"{PREFIX}.{index}/24")
            if self._ipv6:
                self._ip(host, "addr", "add", f"fd77::{index:x}/64", "dev", "eth0", "nodad")
        for index, host in enumerate(self._private, 1):
            self._behind_router(host, index)

    def _behind_router(self, host: str, index: int) -> None:
        router = self._gate(host)
        self._add(router)
        self._plug_in(router, f"{PREFIX}.{len(self._public) + index}/24")
        self._add(host)
        net = f"192.168.{index}"
        self._link(router, "lan0", host, "eth0")
        self._ip(router, "addr", "add", f"{net}.1/24", "dev", "lan0")
        self._ip(host, "addr", "add", f"{net}.2/24", "dev", "eth0")
        self._ip(host, "route", "add", "default", "via", f"{net}.1")
        self._run(self.within(router, "sysctl", "-qw", "net.ipv4.ip_forward=1"))
        rules = """
            table ip nat {
                chain out {
                    type nat hook postrouting priority 100
                    oifname "eth0" masquerade
                }
            }
            table ip guard {
                chain through {
                    type filter hook forward priority 0
                    policy drop
                    ct state established,related accept
                    iifname "lan0" accept
                }
            }
        """
        self._run(self.within(router, "nft", "-f", "-"), text=rules)

    def _plug_in(self, host: str, address: str) -> None:
        self._link("hub", self._port(host), host, "eth0")
        self._ip("hub", "link", "set", self._port(host), "master", "br0")
        self._ip(host, "addr", "add", address, "dev", "eth0")

    def _link(self, one: str, one_device: str, other: str, other_device: str) -> None:
        self._n_links += 1
        self._ip(
            one, "link", "add", one_device, "type", "veth", "peer", "name", other_device, "netns", self._space(other)
        )  # fmt: skip
        self._ip(one, "link", "set", one_device, "up")
        self._ip(other, "link", "set", other_device, "up")

    def _add(self, name: str) -> None:
        space = self._space(name)
        self._run(["ip", "netns", "add", space])
        self._spaces.append(space)
        self._ip(name, "link", "set", "lo", "up")

    def _gate(self, host: str) -> str:
        """What a host is plugged into: its router or the hub."""
        return f"r-{host}" if host in self._private else "hub"

    def _far(self, host: str) -> str:
        return "lan0" if host in self._private else self._port(host)

    def _port(self, host: str) -> str:
        plugged = self._gate(host) if host in self._private else host
        return f"p-{plugged}"[:15]

    def _space(self, name: str) -> str:
        return f"{self._mark}-{name}"

    def _nft(self, host: str, chain: str, *rule: str) -> None:
        chains = "".join(f"chain {name} {{ type filter hook {name} priority 0; }}\n" for name in ("input", "output"))
        table = f"table inet lab {{\n{chains}}}\n"
        self._run(self.within(host, "nft", "-f", "-"), text=table)
        self._run(self.within(host, "nft", "add", "rule", "inet", "lab", chain, *rule))

    def _ip(self, name: str, *words: str) -> None:
        self._run(["ip", "-n", self._space(name), *words])

    def _run(self, words: Sequence[str], *, text: str | None = None, check: bool = True) -> str:
        done = subprocess.run(list(words), input=text, capture_output=True, text=True, check=False)
        if check and done.returncode != 0:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout
