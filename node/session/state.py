"""What a member keeps of the run: the books it holds, its part in the round, what it fetches and verifies."""

from __future__ import annotations

from coordinator.rounds.events import Instant, Sealer
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.voter import Voter
from node.session import events as ev
from node.session.events import Effect
from node.session.part import CombinedHere, Part, Training
from protos.messages import PeerId
from protos.runspec import RunSpec


class SessionState:
    """What a member keeps of the run, and how it moves along the chain.

    Args:
        me: this member.
        spec: the run's RunSpec.
        sealer: encodes and signs with this member's key.
        coordinator: the coordinator's peer id.
        voter: this member's voter, with its record from disk.
        ledger: the books after the state on disk, or None if there is none.
        now: the present.
        observer: follow only.
        rounds: leave after so many rounds that counted this member; None: stay.
    """

    def __init__(
        self,
        me: PeerId,
        spec: RunSpec,
        sealer: Sealer,
        *,
        coordinator: PeerId,
        voter: Voter,
        ledger: Ledger | None,
        now: Instant,
        observer: bool = False,
        rounds: int | None = None,
    ) -> None:
        self.me, self.spec, self._sealer, self._coordinator = me, spec, sealer, coordinator
        self._voter, self.ledger, self._observer, self._rounds = voter, ledger, observer, rounds
        self._line = False
        self._line_changed_at = now
        self._line_problem = "not connected yet"
        self._trainer_up = False
        self._trained_round: int | None = None
        self._training: Training | None = None
        self._part: Part | None = None
        self._proposed: ev.Proposed | None = None
        self._verifying: bytes | None = None  # hash of the body
        self._candidate: tuple[bytes, bytes] | None = None  # body hash and digest of what was verified last
        self._combined = CombinedHere()
        self._commit: ev.CommitHeard | None = None  # extends the held state, not yet applied
        self._after: Ledger | None = None  # the books after that commit
        self._applying = False
        self._fetching: ev.FetchState | None = None
        self._refetch_at: Instant | None = None
        self._n_refetches = 0
        self._fetch_problem = ""  # why the state could not be fetched the last time
        self._newest: ev.CommitHeard | None = None
        self._newest_ledger: Ledger | None = None  # the books after it, where the leader has sent them
        self._lost_round = 0
        self._left = False
        self._paused_by: dict[str, None] = {}
        self._accepted = 0
        self._rejected: dict[str, int] = {}
        self._empty_said = ""
        self._reachable: bool | None = None
        self._heartbeat_at = now
        self._said_state = ""
        self._state_since = now

    def _drop_part(self) -> list[Effect]:
        part, self._part = self._part, None
        return [ev.EndExchange(part.planned.plan_hash)] if part is not None and part.exchange is not None else []
