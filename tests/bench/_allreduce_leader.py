"""The leader's side of the benchmark's all-reduce, in the parent process, and the members' processes that it starts."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

from aggregation.digest import results_root
from coordinator.rounds import policy
from protos import wire
from protos.hashes import plan_hash
from protos.messages import Bandwidth, Commitment, Deal, PeerId, Plan, PlanMember, Range
from protos.sealer import KeySealer, open_signed
from protos.signing import Identity
from tests.bench._allreduce_member import run
from tests.bench._allreduce_words import (
    Agreed,
    Begin,
    Case,
    Close,
    Committed,
    Dealt,
    Done,
    Ended,
    Failed,
    Listening,
    Measure,
    Meet,
    Ready,
    Reported,
    Setup,
    Start,
)
from tests.bench._cgroup import MemoryGroup
from tests.coordinator.made import COORDINATOR, RUN, genesis
from tests.fakes.certificates import Authority

W = TypeVar("W")

START_S = 180.0
TURN_S = 60.0
SLOWEST_VALUES_S = 1e6
"""A member may take so much longer than these limits as it has values, at so many a second: from a disk, say."""
HEAD_START_S = 0.02
"""So long before its start every member is told of it."""


class AllReduceFailed(RuntimeError):
    """A member failed or fell silent, or they did not end with the same values."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One all-reduce, done and compared."""

    seconds: float
    members: tuple[Done, ...]


class Village:
    """Members in processes of their own, and their leader; a context manager."""

    def __init__(
        self,
        cases: Sequence[Case],
        n_peers: int,
        *,
        seed: int = 0,
        loop: str = "uvloop",
        profile: str = "",
        memory_bytes: int = 0,
        outer: bool = False,
    ) -> None:
        self._cases = tuple(cases)
        self._sealer = KeySealer(COORDINATOR, RUN.peer)
        self._n_turns = 0
        self._slack_s = cases[0].spec.model.n_values / SLOWEST_VALUES_S
        self._profile = profile
        self._outer = outer
        self._folder = Path(tempfile.mkdtemp(prefix="barnraise-bench-"))
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: dict[Connection, str] = {}
        self._peers: list[PeerId] = []
        self._groups = [MemoryGroup(memory_bytes) for _ in range(n_peers)] if memory_bytes else []
        # The members inherit these: one thread a process for arithmetic, and no hooks for forks that never come.
        os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", GRPC_ENABLE_FORK_SUPPORT="0")
        try:
            self._start(n_peers, seed, loop)
        except BaseException:
            self.close()
            raise

    def _start(self, n_peers: int, seed: int, loop: str) -> None:
        authority, context = Authority(), multiprocessing.get_context("spawn")
        for rank in range(n_peers):
            identity = Identity.from_private_bytes(bytes([rank + 1]) * 32)
            folder = self._folder / str(rank)
            folder.mkdir()
            setup = Setup(
                rank, n_peers, seed, bytes([rank + 1]) * 32, RUN.peer, authority.issue(identity.peer), self._cases,
                str(folder), loop, bool(self._profile), genesis()[1],
                str(self._groups[rank].procs) if self._groups else "", self._outer,
            )  # fmt: skip
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(setup, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes[ours] = f"member {rank}"
        listening = self._all(Listening, START_S + self._slack_s)
        self._peers = [each.peer for each in listening]
        self._say(Meet({each.peer: each.address for each in listening}))

    def turn(self, case: int, *, watched: bool = False) -> Turn:
        """One all-reduce, timed from the common start to the end of the slowest. Raises AllReduceFailed."""
        spec, replicas = self._cases[case].spec, self._cases[case].replicas
        self._n_turns += 1
        plan = self._plan(case)
        name = plan_hash(wire.encode(plan))
        self._say(Begin(case, plan, name, watched))
        self._all(Ready, TURN_S + self._slack_s)
        start_at = time.monotonic() + HEAD_START_S
        self._say(Start(start_at))
        envelopes = [each.envelope for each in self._all(Committed, TURN_S + self._slack_s)]
        commitments: dict[PeerId, Commitment] = {}
        for envelope in envelopes:
            opened = open_signed(envelope, RUN.peer, kind=Commitment)
            assert isinstance(opened.message, Commitment)
            commitments[opened.signer] = opened.message
        bandwidths = tuple(Bandwidth(peer, 0.0) for peer in sorted(self._peers))
        deal = Deal(name, 0, tuple(envelopes), (), bandwidths)
        n_chunks = policy.grid(spec).n_chunks
        lines = policy.lines(name, commitments, bandwidths, n_chunks)
        self._say(Dealt(deal, self._sealer.seal(deal), commitments, lines))
        found: dict[int, set[bytes]] = {chunk: set() for chunk in range(n_chunks)}
        n_results = 0
        for report in self._all(Reported, TURN_S + self._slack_s):
            for result in report.results.results if report.results else ():
                found[result.chunk].add(result.hash)
                n_results += 1
        if n_results != n_chunks * replicas or any(len(hashes) != 1 for hashes in found.values()):
            raise AllReduceFailed(f"{n_results} results of {n_chunks} chunks by {replicas}, or reducers differ")
        hashes = tuple(next(iter(found[chunk])) for chunk in range(n_chunks))
        self._say(Agreed(results_root(hashes), hashes))
        self._all(Ended, TURN_S + self._slack_s)
        self._say(Measure())
        done = self._all(Done, TURN_S + self._slack_s)
        if len({(each.digest, each.state_digest) for each in done}) != 1:
            raise AllReduceFailed(f"{self._cases[case].name}: the members ended with different values")
        return Turn(max(each.ended_at for each in done) - start_at, tuple(done))

    def peak_bytes(self) -> int:
        """The most memory of any member so far, the page cache of its files included; 0 without a limit."""
        return max((group.peak_bytes for group in self._groups), default=0)

    def _plan(self, case: int) -> Plan:
        spec = self._cases[case].spec
        members = tuple(PlanMember(peer, 1, True, True) for peer in sorted(self._peers))
        zero = bytes(32)
        return Plan(
            RUN.peer, 0, self._n_turns, 0, COORDINATOR.peer, zero, zero, 1, members, spec.rule.name, 0, "", "",
            spec.codec.name, Range(0, spec.model.n_values), 0, "identity", self._cases[case].replicas, 1.0, 1.0, 1.0,
        )  # fmt: skip

    def _say(self, word: object) -> None:
        for pipe in self._pipes:
            pipe.send(word)

    def _all(self, kind: type[W], limit_s: float) -> list[W]:
        """One word of each member, in their order."""
        heard: dict[Connection, W] = {}
        deadline = time.monotonic() + limit_s
        while len(heard) < len(self._pipes):
            silent = [pipe for pipe in self._pipes if pipe not in heard]
            ready = wait(silent, max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(self._pipes[pipe] for pipe in silent)
                raise AllReduceFailed(f"no {kind.__name__} of {names} in {limit_s:g} s")
            for pipe in silent:
                if pipe in ready:
                    heard[pipe] = self._word(pipe, kind)
        return [heard[pipe] for pipe in self._pipes]

    def _word(self, pipe: Connection, kind: type[W]) -> W:
        try:
            word = pipe.recv()
        except EOFError:
            raise AllReduceFailed(f"{self._pipes[pipe]} ended") from None
        if isinstance(word, Failed):
            raise AllReduceFailed(f"{self._pipes[pipe]} failed:\n{word.why}")
        if not isinstance(word, kind):
            raise AllReduceFailed(f"{self._pipes[pipe]} said {type(word).__name__}, not {kind.__name__}")
        return word

    def close(self) -> None:
        """End the members and remove their files."""
        for pipe in self._pipes:
            try:
                pipe.send(Close())
            except OSError:
                continue
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        for group in self._groups:
            with group:
                pass
        if self._profile and (self._folder / "profile").exists():
            shutil.copy(self._folder / "profile", self._profile)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Village:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
