"""Faults of networks and machines, each on a run of four real nodes that everybody counts in before and after it.

After each fault: one commit a round, one chain, no batch twice, all digests equal, and everybody counts again in time.
All of them, and those of `test_lab`: `bash deploy/test.sh --long tests/e2e/test_lab.py tests/e2e/test_lab_faults.py`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.e2e import lab as labs
from tests.e2e.distant import Distant, Rows
from tests.e2e.network import counted
from tests.e2e.soundness import committed, one_chain

NO_LAB = labs.missing()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(NO_LAB), reason=NO_LAB or "a lab can be built"),
]

NAMES = ("n1", "n2", "n3", "n4")
HOSTS = ("c0", *NAMES)
PORT = 8490
HEALED_S = 60.0
"""So soon after a fault everybody counts again."""
SETTINGS = (
    "work.h=12",
    "keep.results=200",
    "membership.start_contributors=4",
    "deadlines.heartbeat_s=0.5",
    "deadlines.heartbeat_timeout_s=4",
    "deadlines.gone_grace_s=1",
    "deadlines.no_progress_s=4",
    "deadlines.commitment_s=10",
    "deadlines.exchange_s=20",
    "deadlines.vote_s=20",
    "deadlines.stand_in_s=2",
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Distant]:
    """One network for all faults: starting it takes longer than a fault does."""
    with labs.Lab([*HOSTS, "n5"]) as lab, Distant(lab, tmp_path_factory.mktemp("run"), *SETTINGS) as network:
        for name in NAMES:
            network.join(name, "--listen", f"0.0.0.0:{PORT}")
        try:
            yield network
        finally:
            heal(network)


@pytest.fixture
def network(shared: Distant) -> Iterator[Distant]:
    """The network while everybody counts."""
    shared.wait_for(lambda rows: bool(rows) and len(counted(rows[-1])) >= len(NAMES), 120)
    yield shared
    heal(shared)


def heal(network: Distant) -> None:
    for host in (*HOSTS, "n5"):
        network.lab.heal(host)
        network.lab.quicken(host)


def peers(network: Distant, names: Iterable[str] = NAMES) -> set[str]:
    return {network.peer(name) for name in names}


def part(network: Distant, these: Iterable[str], those: Iterable[str]) -> None:
    """No packet goes from these hosts to those or back."""
    for one, other in product(these, those):
        address = network.lab.address(other)
        network.lab.drop(one, source=address, target=address)


def since(rows: Rows, round_: int) -> Rows:
    return [row for row in committed(rows) if row["round"] > round_]


def whole_again(network: Distant, names: Iterable[str] = NAMES, limit_s: float = HEALED_S) -> Rows:
    """The ledger once everybody counts in two rounds from now on; all that must hold of it holds."""
    everybody, round_ = peers(network, names), network.head()
    rows = network.wait_for(lambda rows: sum(counted(row) >= everybody for row in since(rows, round_)) >= 2, limit_s)
    digests = network.digests()
    one_chain([row for row in rows if row["round"] > 0 and not row["orphaned"]], digests)
    assert any(everybody <= set(said) for said in digests.values())
    return rows


def test_halves_part_the_one_with_the_coordinator_goes_on_and_they_meet(network: Distant) -> None:
    """Two of four members and the coordinator are a quorum; the other two are none."""
    mine, theirs = NAMES[:2], NAMES[2:]
    part(network, ("c0", *mine), theirs)
    round_ = network.head()
    network.wait_for(lambda rows: sum(counted(row) == peers(network, mine) for row in since(rows, round_)) >= 4, 60)
    ahead = network.head()
    stand_in = "stands in for the coordinator"
    network.wait_until(lambda: any(stand_in in network.log(name) for name in theirs), "somebody stands in", 30)
    for name in theirs:
        assert network.status(name)["round"] <= round_ + 1 < ahead
    waits = "voters for a quorum: "
    network.wait_until(lambda: any(network.status(n)["waiting_for"].startswith(waits) for n in theirs), "its word", 30)
    heal(network)
    rows = whole_again(network)
    assert {row["leader"] for row in rows if row["round"] > round_} == {rows[0]["leader"]}


def test_one_member_cant_reach_another_and_both_count(network: Distant) -> None:
    """Who dials is n1: what it sends to n2's port vanishes, and n2 gets its rows' chunks off."""
    network.lab.drop("n2", source=network.lab.address("n1"), port=PORT)
    round_, everybody = network.head(), peers(network)
    network.wait_for(lambda rows: sum(counted(row) == everybody for row in since(rows, round_ + 1)) >= 2, 90)
    assert network.lab.hits("n2") > 0
    heal(network)
    whole_again(network)


@pytest.mark.long
def test_the_coordinator_parted_beside_one_member_leads_nobody_and_the_others_go_on(network: Distant) -> None:
    others = NAMES[:3]
    part(network, ("c0", "n4"), others)
    round_ = network.head()
    network.wait_until(lambda: network.status("n1")["round"] > round_ + 3, "a stand-in leads", 90)
    assert network.status("n1")["leader"] in peers(network, others)
    heal(network)
    rows = whole_again(network)
    led = [row for row in since(rows, round_) if row["leader"] in peers(network, others)]
    assert len(led) >= 2
    assert all(counted(row) <= peers(network, others) for row in led[:2])


@pytest.mark.long
@pytest.mark.parametrize("fault", ["loses 10 % of its packets", "is at 1 Mbit/s"])
def test_everybody_counts_although_one(network: Distant, fault: str) -> None:
    if fault.startswith("loses"):
        network.lab.lose("n3", 10)
    else:
        network.lab.slow("n3", "1mbit")
    round_, everybody = network.head(), peers(network)
    network.wait_for(lambda rows: sum(counted(row) == everybody for row in since(rows, round_ + 1)) >= 3, 120)
    heal(network)
    whole_again(network)


@pytest.mark.long
def test_connections_that_are_reset_are_made_anew(network: Distant) -> None:
    network.lab.reset("n2")
    network.wait_until(lambda: network.lab.hits("n2") > 20, "resets", 20)
    heal(network)
    whole_again(network, limit_s=45)


@pytest.mark.long
def test_a_member_that_stands_still_holds_nobody_for_long_and_goes_on(network: Distant) -> None:
    network.nodes["n2"].send_signal(signal.SIGSTOP)
    try:
        round_, others = network.head(), peers(network) - peers(network, ["n2"])
        network.wait_for(lambda rows: sum(counted(row) == others for row in since(rows, round_)) >= 2, 60)
    finally:
        network.nodes["n2"].send_signal(signal.SIGCONT)
    whole_again(network)


@pytest.mark.long
def test_donors_that_vanish_without_a_word_are_replaced(network: Distant) -> None:
    """All but one, in the middle of a slow download: no reset, no refusal."""
    lab = network.lab
    lab.slow("n5", "1mbit")
    network.join("n5")
    network.wait_until(lambda: "the state" in network.log("n5"), "n5 asks for the state", 90)
    part(network, ("n5",), NAMES[:3])
    began_s = time.monotonic()
    network.wait_until(lambda: lab.hits("n5") > 0, "n5 misses a donor", 60)
    network.wait_until(lambda: network.status("n5")["digest"] != "", "n5 holds the state", 120)
    assert time.monotonic() - began_s < 120
    heal(network)
    whole_again(network, (*NAMES, "n5"), 120)
    network.end("n5")
    whole_again(network)


@pytest.mark.long
def test_a_node_that_starts_while_every_address_is_dead_joins_when_one_is_back(network: Distant) -> None:
    network.end("n4")
    part(network, ("n4",), HOSTS[:-1])
    network.join("n4", "--listen", f"0.0.0.0:{PORT}")
    waits = "waits for voters for a quorum: "  # as a stand-in for a coordinator that does not answer
    network.wait_until(lambda: waits in network.log("n4").rpartition("left on a signal")[2], "n4 says why", 60)
    heal(network)
    whole_again(network, limit_s=45)


@pytest.mark.long
def test_a_killed_coordinator_is_stood_in_for_and_learns_of_it(network: Distant) -> None:
    round_ = network.head()
    network.kill_coordinator()
    network.wait_until(lambda: network.status("n1")["round"] > round_ + 4, "a stand-in leads", 90)
    network.serve()
    rows = whole_again(network)
    assert len([row for row in since(rows, round_) if row["leader"] in peers(network)]) >= 2


@pytest.mark.long
@pytest.mark.timeout(420)
def test_a_newcomer_at_3_mbit_joins_rounds_of_6_s_within_3_minutes(tmp_path: Path) -> None:
    paced = ("work.h=60", "work.round_s=6")
    with labs.Lab(["c0", "n1", "n2", "n3"]) as lab, Distant(lab, tmp_path, *paced) as network:
        network.join("n1")
        network.join("n2")
        network.wait_for(lambda rows: any(len(counted(row)) == 2 for row in rows), 120)
        lab.slow("n3", "3mbit")
        network.join("n3")
        network.wait_for(lambda rows: any(len(counted(row)) == 3 for row in rows), 180)
