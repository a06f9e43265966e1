"""Deaths by seed: the same again, never so many at once that no quorum is left, and each carried out once."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from coordinator.killing import Kill, Killing, Part, process_of

LIVING = range(5)


def drawn(seed: int, rounds: int = 40, every: int = 2) -> list[Kill]:
    killing = Killing(every, rounds, seed, 5)
    for n_committed in range(rounds):
        killing.draw(n_committed, LIVING, 10.0 * n_committed, 4.0)
    return killing.pending


def test_the_same_seed_kills_the_same() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert {kill.part for kill in drawn(1)} == set(Part)
    assert {kill.number for kill in drawn(1)} == set(LIVING)


def test_one_dies_every_so_many_rounds_and_none_at_the_end() -> None:
    assert [kill.after_rounds for kill in drawn(1, rounds=9, every=3)] == [3, 6]
    for kill in drawn(1):
        assert 0.0 <= kill.due_at - 10.0 * kill.after_rounds <= 4.0
    assert drawn(1, every=0) == []


def test_rounds_that_nobody_looked_at_are_made_up_for() -> None:
    killing = Killing(2, 40, 1, 5)
    killing.draw(7, LIVING, 0.0, 1.0)
    assert len(killing.pending) == 3
    killing.draw(7, LIVING, 1.0, 1.0)
    assert len(killing.pending) == 3


@pytest.mark.parametrize(("n_nodes", "most"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (8, 3)])
def test_a_quorum_is_left(n_nodes: int, most: int) -> None:
    killing = Killing(1, 1000, 3, n_nodes)
    down: set[int] = set()
    for n_committed in range(200):
        killing.draw(n_committed, range(n_nodes), 0.0, 0.0)
        for kill in killing.due(0.0, range(n_nodes), n_committed):
            down.add(kill.number)
        assert len(down) <= most == killing.at_once_most
        assert down == set(killing.recovering)
        if n_committed % 3 == 2:
            for number in sorted(down):
                killing.counted(number, n_committed)  # a round that was over before
                killing.counted(number, n_committed + 1)
            down = set(killing.recovering)
            assert not down


def test_who_is_down_already_is_not_killed_before_it_is_back() -> None:
    killing = Killing(1, 10, 3, 5)
    killing.draw(1, [2], 0.0, 0.0)
    assert killing.due(0.0, [0, 1], 1) == []
    assert [kill.number for kill in killing.due(0.0, [2], 1)] == [2]
    assert killing.due(0.0, [2], 1) == []


def test_a_node_is_back_once_a_later_round_counts_it() -> None:
    killing = Killing(1, 10, 3, 5)
    killing.draw(3, [2], 0.0, 0.0)
    killing.due(0.0, [2], 3)
    killing.counted(2, 3)
    assert killing.recovering == {2: 3}
    killing.counted(2, 4)
    assert killing.recovering == {}
    killing.counted(2, 5)


def test_parts_are_found_among_an_agents_children() -> None:
    script = (  # a child has its arguments once it speaks: Popen returns in the midst of its exec
        "import subprocess, sys\n"
        "code = 'import sys; print(flush=True); sys.stdin.read()'\n"
        "children = [subprocess.Popen([sys.executable, '-c', code, word], stdout=subprocess.PIPE)"
        " for word in ('node.training.trainer', '/x/p2pd')]\n"
        "[child.stdout.readline() for child in children]\n"
        "print(*[child.pid for child in children], flush=True)\n"
        "[child.wait() for child in children]\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert agent.stdin is not None
    assert agent.stdout is not None
    try:
        trainer, helper = (psutil.Process(int(pid)) for pid in agent.stdout.readline().split())
        assert process_of(agent.pid, Part.TRAINER) == trainer
        assert process_of(agent.pid, Part.HELPER) == helper
        assert process_of(agent.pid, Part.AGENT) == psutil.Process(agent.pid)
        trainer.kill()
        trainer.wait(timeout=60)
        assert process_of(agent.pid, Part.TRAINER) is None
    finally:
        agent.communicate()
    assert process_of(agent.pid, Part.TRAINER) is None
