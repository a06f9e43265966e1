"""What a member keeps of the run: the books it holds, its part in the round, what it fetches and verifies."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.rounds.events import Instant, Sealer
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.voter import Voter
from node.session import effects as fx
from node.session import events as ev
from node.session.effects import Effect
from node.session.events import HeadSigned
from node.session.idle import IdleClock
from node.session.part import CombinedHere, Part, Training
from node.session.reasons import Reasons
from node.session.standing_in import Succession
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
        stands_in: whether others can connect to this node, so that it may lead while the coordinator is away.
        signed_head: the newest head that the coordinator has signed, from disk.
        specs: the revisions of the RunSpec that are known, beside `spec`.
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
        stands_in: bool = True,
        signed_head: HeadSigned | None = None,
        specs: Mapping[int, RunSpec] | None = None,
    ) -> None:
        self.me, self._sealer, self._coordinator = me, sealer, coordinator
        self.specs: dict[int, RunSpec] = {spec.revision: spec, **(specs or {})}
        self.spec = spec if ledger is None else self.specs.get(ledger.spec_revision, spec)
        self._asked_revisions: set[int] = set()  # of the RunSpec, that are being fetched
        self._voter, self.ledger, self._observer, self._rounds = voter, ledger, observer, rounds
        self._line = False
        self._succession = Succession(me, coordinator, self.spec.deadlines, now)
        self._leader_now: PeerId | None = None
        self._stands_in = stands_in and not observer
        self._signed_head = signed_head.head if signed_head else None
        self.signed_head = signed_head.envelope if signed_head else b""
        self._strayed: set[PeerId] = set()  # leaders whose branch is not followed
        self._line_changed_at = now
        self._line_problem = "not connected yet"
        self._trainer_up = False
        self._trained_round: int | None = None
        self._training: Training | None = None
        self._before: Training | None = None  # of the round before: the next one may go on from it
        self._speed = 0.0  # tokens a second that the trainer has measured at its start
        self._no_seat = ""  # why it has none, as the leader says
        self._idle = IdleClock(now)
        self._part: Part | None = None
        self._proposed: ev.Proposed | None = None
        self._verifying: bytes | None = None  # hash of the body
        self._candidate: tuple[bytes, bytes] | None = None  # body hash and digest of what was verified last
        self._combined = CombinedHere()
        self._commit: ev.CommitHeard | None = None  # extends the held state, not yet applied
        self._after: Ledger | None = None  # the books after that commit
        self._applying = False
        self._fetching: fx.FetchState | None = None
        self._refetch_at: Instant | None = None
        self._n_refetches = 0
        self._fetch_problem = ""  # why the state could not be fetched the last time
        self._newest: ev.CommitHeard | None = None
        self._ahead: dict[bytes, ev.CommitHeard] = {}  # commits that are not yet their turn, by the head they extend
        self._asking: fx.FetchCommits | None = None
        self._unreplayable = b""  # the held head, where the commits or results since are not to be had
        self._n_refused = 0  # commits of others that did not hold, since the held head
        self._newest_ledger: Ledger | None = None  # the books after it, where the leader has sent them
        self._lost_round = 0
        self._left = False
        self._paused_by: dict[str, None] = {"operator": None} if ledger is not None and ledger.paused else {}
        self._targets: dict[bytes, Ledger] = {}  # books of states that were restored in this round, by their heads
        self._restoring: ev.Proposed | None = None  # whose state to go back to is not here yet
        self._accepted = 0
        self._rejected = Reasons()
        self._empty_said = ""
        self._reachable: bool | None = None
        self._heartbeat_at = now
        self._said_state = ""
        self._said_enough = False  # whether it was said that this member has made steps enough to contribute
        self._state_since = now

    def _drop_part(self) -> list[Effect]:
        part, self._part = self._part, None
        return [fx.EndExchange(part.planned.plan_hash)] if part is not None and part.exchange is not None else []
