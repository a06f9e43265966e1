"""Runs over a network that is none of loopback's: NAT, cut cables, lost packets, several interfaces, IPv6."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import lab as labs
from tests.e2e.distant import Distant, Rows
from tests.e2e.network import counted

NO_LAB = labs.missing()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(NO_LAB), reason=NO_LAB or "a lab can be built"),
]

SHORT = (
    "work.h=12",
    "keep.results=200",
    "deadlines.heartbeat_s=0.5",
    "deadlines.heartbeat_timeout_s=5",
    "deadlines.stand_in_s=2",
)


@pytest.fixture
def nat() -> Iterator[labs.Lab]:
    with labs.Lab(["c0"], ["n1", "n2"]) as lab:
        yield lab


def full(rows: Rows, n: int) -> list[set[str]]:
    """Who counted, of each round that counted n members or more."""
    return [members for row in rows if len(members := counted(row)) >= n]


def test_two_nodes_behind_two_routers_count_in_every_round(nat: labs.Lab, tmp_path: Path) -> None:
    with Distant(nat, tmp_path, *SHORT) as network:
        assert nat.address("c0") in network.invite
        network.join("n1")
        network.join("n2")
        rows = network.wait_for(lambda rows: len(full(rows, 2)) >= 5)
        peers = {network.peer(name) for name in ("n1", "n2")}
        both = [row for row in rows if counted(row) == peers]
        from_then_on = [row for row in rows if row["round"] >= both[0]["round"] and row["outcome"] == "committed"]
        assert from_then_on == both
        for name in ("n1", "n2"):
            assert network.status(name)["reachable"] is False


@pytest.mark.long
def test_the_join_line_works_as_printed_and_names_the_way_out_of_a_machine_with_several(tmp_path: Path) -> None:
    """The node's machine has a container bridge, a tunnel, and a name that leads to loopback, as Debian sets it up."""
    with labs.Lab(["c0", "n1", "n2"]) as lab:
        for host in ("c0", "n1"):
            lab.interface(host, "docker0", "172.17.0.1/16")
            lab.interface(host, "tun0", "10.8.0.2/24")
            lab.names(host, {"thishost": ["127.0.1.1"]})
        with Distant(lab, tmp_path, *SHORT) as network:
            assert network.invite.endswith(f"@{lab.address('c0')}:8470")
            network.join("n1")
            network.join("n2")
            rows = network.wait_for(lambda rows: len(full(rows, 2)) >= 2)
            reducers = {network.status(name)["peer"]: network.status(name)["reachable"] for name in ("n1", "n2")}
            assert reducers == dict.fromkeys(counted(rows[-1]), True)


@pytest.mark.long
def test_a_dead_first_address_and_a_refusing_second_one_delay_joining_by_seconds(tmp_path: Path) -> None:
    with labs.Lab(["c0", "n1", "x1", "x2"]) as lab, Distant(lab, tmp_path, *SHORT) as network:
        lab.drop("x1")
        hosts = ",".join(f"{lab.address(host)}:8470" for host in ("x1", "x2", "c0"))
        run = network.invite.rpartition("@")[0]
        network.join("n1", invite=f"{run}@{hosts}")
        network.wait_for(lambda rows: len(full(rows, 1)) >= 1, limit_s=60)
        assert lab.hits("x1") > 0


@pytest.mark.long
def test_a_black_hole_of_ipv6_is_passed_by_and_a_net_of_ipv6_alone_will_do(tmp_path: Path) -> None:
    listen = ("--http", "[::]:8470", "--listen", "[::]:8471", "--dht", "[::]:8472")
    with labs.Lab(["c0", "n1", "n2"], ipv6=True) as lab, Distant(lab, tmp_path, *SHORT, serve=listen) as network:
        run = network.invite.rpartition("@")[0]
        lab.names("n1", {"run.example": [lab.address6("c0"), lab.address("c0")]})
        lab.blackhole6("n1")
        network.join("n1", invite=f"{run}@run.example:8470")
        network.wait_for(lambda rows: len(full(rows, 1)) >= 1)
        assert lab.hits("n1") > 0
        gone = network.peer("n1")
        network.end("n1")  # it can't reach the other one, nor be reached by it
        lab.only6("n2")
        network.join("n2", "--listen", "[::]:0", "--dht", "[::]:0", invite=f"{run}@[{lab.address6('c0')}]:8470")
        network.wait_for(lambda rows: any(members - {gone} for members in full(rows, 1)))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_router_that_forgets_what_is_idle_costs_no_round(nat: labs.Lab, tmp_path: Path) -> None:
    """Nodes train for longer than their routers remember a connection that nobody keeps alive."""
    idle_s = 25
    for name in ("n1", "n2"):
        nat.forget(name, idle_s)
    long = ("work.h=20000", f"work.round_s={1.5 * idle_s}", f"deadlines.train_limit_s={2 * idle_s}")  # at any speed
    with Distant(nat, tmp_path, *SHORT, *long, "membership.start_contributors=2") as network:
        network.join("n1")
        network.join("n2")
        rows = network.wait_for(lambda rows: sum(row["outcome"] == "committed" for row in rows) >= 3, 500)
        done = [row for row in rows if row["outcome"] == "committed"]
        assert [len(counted(row)) for row in done] == [2] * len(done)
        assert all(row["seconds"]["train"] > idle_s for row in done[1:]), [row["seconds"] for row in done]


@pytest.mark.long
def test_a_node_whose_cable_was_out_says_so_and_comes_back_by_itself(tmp_path: Path) -> None:
    """It stands in for the coordinator, finds nobody, and names whom it waits for."""
    with labs.Lab(["c0", "n1", "n2"]) as lab, Distant(lab, tmp_path, *SHORT) as network:
        network.join("n1")
        network.join("n2")
        rows = network.wait_for(lambda rows: len(full(rows, 2)) >= 2)
        away = network.peer("n1")
        lab.unplug("n1")
        alone = network.wait_for(lambda rows: any(away not in counted(row) for row in rows[-2:]), limit_s=60)
        assert len(alone) > len(rows)
        network.wait_until(lambda: is_alone(network.status("n1")["waiting_for"]), "n1 knows that it is alone", 30)
        lab.plug("n1")
        network.wait_for(lambda rows: away in counted(rows[-1]), limit_s=60)


def is_alone(waiting_for: str) -> bool:
    return waiting_for.startswith(("voters for a quorum: ", "the leader: "))
