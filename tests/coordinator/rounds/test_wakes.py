"""Instants that the machine named are looked at, whatever else comes at that moment."""

from __future__ import annotations

from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import Disconnected, Heard, Instant
from protos.messages import Heartbeat, Inquiry, MemberState
from tests.coordinator.rounds.cases import NO_HASH
from tests.coordinator.rounds.leader_script import exchanging


def test_a_heartbeat_that_changes_nothing_passes_no_instant_over() -> None:
    """Heartbeats come in step with a lost line: at the very end of the grace for who has gone, too."""
    script = exchanging(4)
    gone, *others = script.rounds.ledger.voters[:-1]
    script.keep_alive(*others)
    script.handle(Disconnected(gone, "broke off"))
    assert script.phase() is Phase.EXCHANGE
    wake = script.rounds.next_wake(Instant(script.at))
    assert wake is not None
    script.at = wake + 1e-4  # the driver was about to wake it
    ledger = script.rounds.ledger
    beat = Heartbeat(
        0, ledger.round + 1, ledger.head, NO_HASH, MemberState.READY, script.spec.work.h, 0, 1.0, 1.0, 0.0, 0, 0
    )
    script.handle(Heard(others[0], beat, b""))
    assert script.last(Inquiry).senders == (gone,), "a death is a death"
