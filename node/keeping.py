"""What a node keeps beside its state for those who were away: the last commits, their results, a frozen snapshot."""

from __future__ import annotations

from node.commits import CommitLog
from node.errors import NodeError
from node.results import ResultsStore
from node.state import StateStore
from protos.runspec import KeepSpec


class Keeper:
    """Brings what is kept in line with the state that is held."""

    def __init__(self, store: StateStore, results: ResultsStore, commits: CommitLog, keep: KeepSpec) -> None:
        self._store, self._results, self._commits, self._keep = store, results, commits, keep

    def settle(self) -> list[str]:
        """At the start, and whenever another state is held; what a contributor would want to read of it.

        Blocks for the disk. May be cut off anywhere, and repeated. What has no room is left out, and said.
        """
        notes: list[str] = []
        held = self._store.current
        if held is not None:
            try:
                self._commits.add(held.commit)
            except NodeError as error:
                notes.append(f"the commit of round {held.ledger.round} is not kept for others: {error}")
            chain = (entry.body_hash for entry in self._commits.back(held.head) if entry.committed)
            self._results.hold([key for key, _ in zip(chain, range(self._keep.results), strict=False)])
            try:
                if held.ledger.round % self._keep.snapshot_every == 0:
                    self._store.freeze()
                self._store.tidy()
            except NodeError as error:
                notes.append(f"no snapshot after round {held.ledger.round}: {error}")
        return [*notes, *self._store.take_notes()]
