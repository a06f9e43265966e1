"""Every way in which a node ends, and what holds after each: nothing of it is left, the run goes on, it may return."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.network import Network, Rows, children_of, counted
from tests.e2e.runs import NODE, left_over, run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

GONE_S = 10.0
FOLLOWING_S = 0.05
"""What a round of this small model costs who follows it, with as much again to spare."""
SETTINGS = ("work.h=6", "work.batch_tokens=256", "deadlines.heartbeat_s=0.5", "deadlines.stand_in_s=600")
TOLD = {"bob": signal.SIGTERM, "eve": signal.SIGINT, "joe": signal.SIGHUP}
"""A service manager, Ctrl-C, and a terminal that is closed."""


def parts(network: Network, name: str, mark: str) -> list[int]:
    """The node's helpers whose command line has this word in it."""
    found: list[int] = []
    for pid in children_of(network.nodes[name].pid):
        with suppress(psutil.NoSuchProcess):
            if any(mark in word for word in psutil.Process(pid).cmdline()):
                found.append(pid)
    return found


def family(network: Network, name: str) -> list[psutil.Process]:
    pid = network.nodes[name].pid
    found = [psutil.Process(each) for each in [pid, *children_of(pid)] if psutil.pid_exists(each)]
    assert len(found) >= 3, "an agent, its trainer and the DHT's helper"
    return found


def ended(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    return not alive


def busy_s(processes: list[psutil.Process], seconds: float) -> float:
    """Processor time that they take in so many seconds."""
    before = sum(times.user + times.system for times in (each.cpu_times() for each in processes))
    time.sleep(seconds)  # what is looked at is that nothing happens meanwhile
    return float(sum(times.user + times.system for times in (each.cpu_times() for each in processes)) - before)


def follows_only(network: Network, processes: list[psutil.Process], seconds: float = 3.0) -> bool:
    """Whether they take no more than it costs to follow the rounds, so that the node may go on at once."""
    n_before = rows_after(network)
    taken_s = busy_s(processes, seconds)
    return taken_s <= 0.02 * seconds + FOLLOWING_S * (rows_after(network) - n_before + 1)


def nothing_held(folder: Path) -> bool:
    """No socket is left, and the folder may be used at once."""
    with (folder / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return not list(folder.glob("*.sock")) and not (folder / "control.json").exists()


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(tmp_path_factory.mktemp("network"), *SETTINGS, "membership.start_contributors=4") as made:
        for name in ("ann", *TOLD):
            made.join(name)
        made.wait_for(lambda rows: any(len(counted(row)) == 4 for row in rows), limit_s=180)
        yield made
    assert left_over(made.folder) == []


def offline(network: Network, name: str) -> None:
    """Returns once the node knows that its leader is away: until then it would tell it."""
    ends_at = time.monotonic() + 120  # each look is a process
    while network.status(name)["state"] != "offline":
        assert time.monotonic() < ends_at


def rows_after(network: Network) -> int:
    return len(network.rows())


def test_told_to_go_it_leaves_at_once_and_may_come_back_at_once(network: Network) -> None:
    peers = {name: network.peer(name) for name in network.nodes}
    families = {name: family(network, name) for name in TOLD}
    n_before = rows_after(network)
    for name, number in TOLD.items():
        network.nodes[name].send_signal(number)
    for name in TOLD:
        assert network.nodes.pop(name).wait(GONE_S) == 0, network.log(name)
        assert ended(families[name]), f"something of {name} outlives it"
        assert nothing_held(network.folder / name)
        assert "left on a signal" in network.log(name).splitlines()[-1]
    rows = network.wait_for(lambda rows: any(counted(row) == {peers["ann"]} for row in rows[n_before:]))
    alone = next(row for row in rows[n_before:] if counted(row) == {peers["ann"]})
    assert alone["round"] - rows[n_before - 1]["round"] <= 3, "they left by word, not by a deadline"

    for name in TOLD:
        network.join(name)
    network.wait_for(lambda rows: any(counted(row) == set(peers.values()) for row in rows[len(rows) - 1 :]), 180)


def test_asked_by_its_owner_it_leaves(network: Network) -> None:
    processes, peer = family(network, "joe"), network.peer("joe")
    assert run(*NODE, "leave", "--data", network.folder / "joe").code == 0
    assert network.nodes.pop("joe").wait(GONE_S) == 0
    assert ended(processes)
    assert nothing_held(network.folder / "joe")
    n_before = rows_after(network)
    network.wait_for(lambda rows: any(counted(row) and peer not in counted(row) for row in rows[n_before:]))


def test_told_twice_it_ends_at_once(network: Network) -> None:
    processes = family(network, "eve")
    network.nodes["eve"].send_signal(signal.SIGSTOP)  # so that both are there when it looks
    network.nodes["eve"].send_signal(signal.SIGINT)
    network.nodes["eve"].send_signal(signal.SIGTERM)
    network.nodes["eve"].send_signal(signal.SIGCONT)
    assert network.nodes.pop("eve").wait(GONE_S) == 130
    assert ended(processes)
    network.join("eve")


def returns(network: Network, peer: str) -> bool:
    """Whether rounds that begin from now on count the peer."""
    n_before = rows_after(network) + 1
    return bool(network.wait_for(lambda rows: any(peer in counted(row) for row in rows[n_before:]), 120))


def test_parts_that_are_killed_come_back_by_themselves(network: Network) -> None:
    peer = network.peer("bob")
    for mark, said in (("node.training.trainer", "the trainer ended by SIGKILL"), ("p2pd", "helper program ended")):
        victim = next(each for each in family(network, "bob") if any(mark in word for word in each.cmdline()))
        victim.kill()
        assert ended([victim])
        assert returns(network, peer)

        def is_back(_: Rows, mark: str = mark, said: str = said, gone: int = victim.pid) -> bool:
            again = parts(network, "bob", mark)
            return said in (network.folder / "bob.log").read_text() and [pid != gone for pid in again] == [True]

        network.wait_for(is_back)
    status = network.status("bob")
    assert status["trainer_restarts"] == 1
    assert "SIGKILL" in status["trainer_last_end"]
    assert status["checkpoint"]["step"] == 6
    assert network.nodes["bob"].poll() is None


def test_paused_it_leaves_the_machine_alone_and_killed_it_may_come_back_at_once_still_paused(network: Network) -> None:
    processes, peer = family(network, "bob"), network.peer("bob")
    assert run(*NODE, "pause", "--data", network.folder / "bob").code == 0
    trainer = [each for each in processes if any("node.training.trainer" in word for word in each.cmdline())]
    assert any(busy_s(trainer, 1.0) <= 0.02 for _ in range(5)), "it trains on"
    assert any(follows_only(network, processes) for _ in range(3)), "a node that is paused keeps the machine busy"
    network.kill("bob")
    assert ended(processes), "helpers outlive their agent"
    n_before = rows_after(network)
    network.join("bob")
    network.wait_for(lambda rows: any(counted(row) and peer not in counted(row) for row in rows[n_before:]))
    network.wait_for(lambda _: "paused, as it was" in (network.folder / "bob.log").read_text(), 120)
    assert run(*NODE, "resume", "--data", network.folder / "bob").code == 0
    assert returns(network, peer)


def test_without_a_leader_it_keeps_its_seat(network: Network) -> None:
    """Last: it ends the coordinator."""
    processes, peer = family(network, "bob"), network.peer("bob")
    network.kill_coordinator()
    offline(network, "bob")
    network.nodes["bob"].send_signal(signal.SIGTERM)
    assert network.nodes.pop("bob").wait(GONE_S) == 0
    assert ended(processes)
    assert "the seat is kept" in network.log("bob").splitlines()[-1]
    network.serve()
    network.join("bob")
    assert returns(network, peer)


@pytest.mark.long
@pytest.mark.skipif(
    run("unshare", "--pid", "--fork", "true", limit_s=10).code != 0, reason="needs pid namespaces (root)"
)
def test_as_the_first_process_of_a_container_it_hears_sigterm(network: Network) -> None:
    words = [*NODE, "join", network.invite, "--data", str(network.folder / "pod"), "--name", "pod", "--threads", "1"]
    with (network.folder / "pod.log").open("ab") as log:
        shell = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *words, "--listen", "127.0.0.1:0",
             "--dht", "127.0.0.1:0"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        n_before = rows_after(network)
        network.wait_for(lambda rows: len(rows) > n_before and _counts(network, "pod"), 120)
        (init,) = psutil.Process(shell.pid).children()
        init.send_signal(signal.SIGTERM)
        assert shell.wait(GONE_S) == 0, network.log("pod")
    finally:
        shell.kill()


def _counts(network: Network, name: str) -> bool:
    return "accepted 1" in network.log(name)
