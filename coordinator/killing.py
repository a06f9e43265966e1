"""Whom a simulation ends without warning, what of it, and when: drawn by seed, so that a bad night can be had again."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import psutil


class Part(StrEnum):
    """What of a node is killed."""

    AGENT = "agent"
    TRAINER = "trainer"
    HELPER = "DHT helper"


_MARKS = {Part.TRAINER: "node.training.trainer", Part.HELPER: "p2pd"}
"""What the command line of a part that is the agent's child contains."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One death: of which node, what of it, and when at the earliest."""

    number: int
    part: Part
    due_at: float
    after_rounds: int


class Killing:
    """Draws a death every so many committed rounds, at a random moment of the next one.

    Not more nodes than `at_once_most` are down or coming back at the same time, so that a quorum is left: a death that
    would be one too many waits until somebody is back.

    Args:
        every: rounds; 0: nobody is killed.
        last: with the last rounds there is nothing left to come back for.
        seed: of the draws.
        n_nodes: of the simulation.
    """

    def __init__(self, every: int, last: int, seed: int, n_nodes: int) -> None:
        self._every, self._last, self._seed = every, last, seed
        self.at_once_most = max(1, (n_nodes - 1) // 2)
        self._drawn = 0
        self.pending: list[Kill] = []
        self.recovering: dict[int, int] = {}
        """Node and the round that was committed when it was hit: it is back once a later round counts it."""

    def draw(self, n_committed: int, numbers: Sequence[int], now: float, round_s: float) -> None:
        """Plan the deaths that are due by now. `round_s`: how long a round takes about."""
        while self._every and self._drawn < min(n_committed, self._last - 1) // self._every and numbers:
            self._drawn += 1
            chance = random.Random(f"{self._seed} {self._drawn}")
            number, part = chance.choice(sorted(numbers)), chance.choice(list(Part))
            self.pending.append(Kill(number, part, now + chance.uniform(0.0, round_s), n_committed))

    def due(self, now: float, living: Collection[int], n_committed: int) -> list[Kill]:
        """The deaths to carry out now; they count as recovering from here on."""
        found: list[Kill] = []
        for kill in list(self.pending):
            crowded = kill.number not in self.recovering and len(self.recovering) >= self.at_once_most
            if now < kill.due_at or kill.number not in living or crowded:
                continue
            self.pending.remove(kill)
            self.recovering[kill.number] = n_committed
            found.append(kill)
        return found

    def counted(self, number: int, n_committed: int) -> None:
        """A round that was this many-th to be committed counted the node."""
        if n_committed > self.recovering.get(number, n_committed):
            del self.recovering[number]


def process_of(agent_pid: int, part: Part) -> psutil.Process | None:
    """The living process of a node's part; None while there is none."""
    with suppress(psutil.Error):
        agent = psutil.Process(agent_pid)
        if part is Part.AGENT:
            return agent
        for child in agent.children(recursive=True):
            with suppress(psutil.Error):
                if any(_MARKS[part] in word for word in child.cmdline()):
                    return child
    return None
