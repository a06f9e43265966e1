"""The centre of a centred rule: the results of the head's commit, found by the hashes that its body vouches for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aggregation.digest import results_root
from node.results import ResultsStore
from node.state import Held
from protos import hashes, wire
from protos.messages import Body, Outcome


@dataclass(frozen=True, slots=True)
class Centre:
    """What a rule starts from after a committed round; after an empty one there is none."""

    previous: Callable[[int], memoryview | None]
    """A chunk's encoded result; None where it is not here."""
    scale: float
    """The clip factor with which it was applied."""


@dataclass(frozen=True, slots=True)
class HeadResults:
    """The results of a held state's commit."""

    body: Body
    body_hash: bytes
    hashes: tuple[bytes, ...]
    """In chunk order, as the body's root has them; empty where it is not known which they are."""

    @classmethod
    def of(cls, held: Held | None) -> HeadResults | None:
        """None without a state, and after an empty round, which has no results."""
        if held is None:
            return None
        body = wire.decode(Body, held.commit.body)
        if body.outcome is not Outcome.COMMITTED:
            return None
        # Beside the commit, not in it: whoever handed it over may have written anything there.
        listed = held.commit.result_hashes
        known = listed if results_root(listed) == body.results_root else ()
        return cls(body, hashes.body_hash(held.commit.body), known)


def centre_of(held: Held | None, results: ResultsStore) -> Centre | None:
    """The centre of the round after the held state; checks a great many hashes, so in a thread."""
    head = HeadResults.of(held)
    if head is None:
        return None
    listed = head.hashes

    def previous(chunk: int) -> memoryview | None:
        return results.find(listed[chunk]) if chunk < len(listed) else None

    return Centre(previous, head.body.clip_factor)
