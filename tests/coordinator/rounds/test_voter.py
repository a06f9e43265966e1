"""A voter's promises and votes, certificates, and a small model of many voters that no schedule makes disagree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from coordinator.rounds import policy
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.voter import ATTEMPTS_MAX, NOBODY, Voter, certificate_faults
from protos.messages import Leave, PeerId, Plan, Prepare, Promise, Proposal, Propose, Refusal, Vote
from tests.coordinator.rounds.cases import COORDINATOR, NO_HASH, PEERS, at_head, beginning, evidence_of, seated

A, B = PEERS[20], PEERS[21]  # leaders beside the coordinator
LEDGER = beginning(PEERS[:3])
ME = PEERS[0]


def prepare(attempt: int, leader: PeerId = COORDINATOR, round_: int = 1, epoch: int = 0) -> Prepare:
    return Prepare(epoch, round_, attempt, leader)


def proposal(name: str) -> Proposal:
    return Proposal(name.encode(), b"", b"", (), ())


def propose(attempt: int, leader: PeerId = COORDINATOR, name: str = "x", round_: int = 1) -> Propose:
    return Propose(0, round_, attempt, leader, 1.0, proposal(name), ())


def voted(voter: Voter, asked: Propose, ledger: Ledger = LEDGER) -> tuple[Vote, Promise] | Refusal:
    return voter.voted(asked, asked.proposal.body.ljust(32), NO_HASH, ledger)


def promised(voter: Voter, asked: Prepare, ledger: Ledger = LEDGER) -> Promise:
    answer = voter.prepared(asked, ledger)
    assert isinstance(answer, Promise), answer
    return answer


def refused(answer: object) -> Refusal:
    assert isinstance(answer, Refusal), answer
    return answer


# -- one voter -------------------------------------------------------------------------------------------------------


def test_a_number_is_promised_to_one_leader_and_lower_ones_are_refused() -> None:
    voter = Voter(ME, None)
    promise = promised(voter, prepare(3, A))
    assert promise == Promise(0, 1, 3, A, LEDGER.head, -1, None)
    assert voter.record is promise
    for asked in (prepare(2, A), prepare(2, B), prepare(3, B), prepare(1)):
        refusal = refused(voter.prepared(asked, LEDGER))
        assert (refusal.attempt, refusal.reason) == (3, f"promised number 3 to {A}")
    assert voter.record is promise
    assert promised(voter, prepare(3, A)) == promise
    assert promised(voter, prepare(4, B)).attempt == 4


def test_a_promise_hands_over_what_was_signed_and_under_which_number() -> None:
    voter = Voter(ME, None)
    assert isinstance(voted(voter, propose(0, name="first")), tuple)
    promise = promised(voter, prepare(2, A))
    assert (promise.voted_attempt, promise.proposal) == (0, proposal("first"))
    assert promised(voter, prepare(5, B)).voted_attempt == 0
    answer = voted(voter, propose(5, B, "second"))
    assert isinstance(answer, tuple)
    assert promised(voter, prepare(6, A)).proposal == proposal("second")


def test_a_vote_is_recorded_as_what_it_is() -> None:
    voter = Voter(ME, None)
    answer = voted(voter, propose(0))
    assert isinstance(answer, tuple)
    vote, record = answer
    assert vote == Vote(0, 1, 0, COORDINATOR, b"x".ljust(32), NO_HASH)
    assert record == Promise(0, 1, 0, COORDINATOR, LEDGER.head, 0, proposal("x"))
    assert voter.record is record


def test_votes_keep_promises() -> None:
    voter = Voter(ME, None)
    promised(voter, prepare(3, A))
    assert refused(voted(voter, propose(2, B))).attempt == 3
    assert refused(voted(voter, propose(3, B))).attempt == 3
    assert refused(voted(voter, propose(0))).attempt == 3
    assert isinstance(voted(voter, propose(3, A)), tuple)
    assert isinstance(voted(voter, propose(7, B)), tuple)  # a higher number needs no promise of this voter


def test_one_proposal_a_number_and_the_same_one_as_often_as_asked() -> None:
    voter = Voter(ME, None)
    first = voted(voter, propose(0, name="one"))
    assert "another proposal" in refused(voted(voter, propose(0, name="two"))).reason
    assert voted(voter, propose(0, name="one")) == first


def test_what_was_signed_in_a_later_epoch_binds_nobody_in_an_earlier_one() -> None:
    """Its branch was given up; what the voter signed in this epoch before is remembered all the same."""
    later = Promise(1, 7, 0, COORDINATOR, NO_HASH, 0, proposal("other branch"))
    assert isinstance(voted(Voter(ME, later), propose(0)), tuple)
    voter = Voter(ME, later, signed={0: 1})
    assert "older than its record" in refused(voter.prepared(prepare(1), LEDGER)).reason
    assert voter.leave(LEDGER) is None, "it can't say what it has promised"
    assert voter.signed == {0: 1, 1: 7}
    assert isinstance(voted(Voter(ME, later, signed={0: 0}), propose(0)), tuple)


def test_number_zero_is_the_coordinators() -> None:
    voter = Voter(ME, None)
    assert "coordinator's" in refused(voter.prepared(prepare(0, A), LEDGER)).reason
    assert "coordinator's" in refused(voted(voter, propose(0, A))).reason
    assert isinstance(voted(voter, propose(0)), tuple)


@pytest.mark.parametrize("attempt", [-1, ATTEMPTS_MAX + 1])
def test_numbers_that_are_none(attempt: int) -> None:
    assert "no attempt's number" in refused(Voter(ME, None).prepared(prepare(attempt, A), LEDGER)).reason


@pytest.mark.parametrize(
    ("voter", "asked", "why"),
    [
        (Voter(ME, None), prepare(1, round_=2), "my head is round 0"),
        (Voter(ME, None), prepare(1, epoch=1), "my head is round 0"),
        (Voter(PEERS[9], None), prepare(1), "not a voter"),
        (Voter(ME, None, lost=True), prepare(1), "abstains"),
        (Voter(ME, Leave(0, 1, -1, PeerId(""), NO_HASH, -1, None)), prepare(1), "has left"),
        (Voter(ME, Promise(0, 2, 0, A, NO_HASH, -1, None)), prepare(1), "older than its record"),
    ],
)
def test_whose_word_counts_not(voter: Voter, asked: Prepare, why: str) -> None:
    assert why in refused(voter.prepared(asked, LEDGER)).reason
    assert why in refused(voted(voter, propose(asked.attempt, round_=asked.round)) if not asked.epoch else
                          voter.prepared(asked, LEDGER)).reason  # fmt: skip


def test_a_record_of_an_earlier_round_binds_nobody() -> None:
    voter = Voter(ME, Promise(0, 1, 9, A, NO_HASH, 9, proposal("old")))
    promise = promised(voter, prepare(1, B, round_=2), seated(3))
    assert (promise.voted_attempt, promise.proposal) == (-1, None)


def test_who_lost_its_record_votes_again_after_a_commit() -> None:
    voter = Voter(ME, None, lost=True)
    assert voter.leave(LEDGER) is None  # it can't say what it has promised
    voter.moved()
    assert isinstance(voted(voter, propose(0)), tuple)


def test_a_leave_says_all_that_was_promised_and_signed() -> None:
    fresh = Voter(ME, None)
    assert fresh.leave(LEDGER) == Leave(0, 1, -1, PeerId(""), LEDGER.head, -1, None)
    voter = Voter(ME, None)
    voted(voter, propose(0, name="signed"))
    promised(voter, prepare(4, A))
    leave = voter.leave(LEDGER)
    assert leave == Leave(0, 1, 4, A, LEDGER.head, 0, proposal("signed"))
    assert voter.leave(LEDGER) == leave
    assert voter.has_left(LEDGER)
    assert not voter.has_left(seated(3))
    assert "has left" in refused(voted(voter, propose(9, A))).reason


def test_who_leaves_two_rounds_votes_in_neither_and_can_say_so_again() -> None:
    voter = Voter(ME, None)
    promised(voter, prepare(4, A))
    first, second = voter.leave(LEDGER), voter.leave_next(LEDGER)
    assert first is not None
    assert second == Leave(0, 2, -1, NOBODY, b"", -1, None)
    for each in (voter, Voter(ME, first, signed={0: 2})):
        assert each.last_words(LEDGER) == (first, second)
        assert each.last_words(seated(3)) == (second,)
        assert each.leave(LEDGER) == first
        assert each.leave(seated(3)) == second
        assert "has left" in refused(each.prepared(prepare(9, B), LEDGER)).reason
        assert "has left" in refused(each.prepared(prepare(9, B, round_=2), seated(3))).reason
    assert Voter(ME, first, signed={0: 1}).last_words(seated(3)) == ()


def test_a_plan_that_a_promise_speaks_against() -> None:
    ledger = seated(3)
    plan: Plan = evidence_of(ledger, 3, attempt=2, leader=A).plan
    voter = Voter(ME, None)
    assert voter.bound(plan, ledger) is None
    promised(voter, prepare(2, A, round_=2), ledger)
    assert voter.bound(plan, ledger) is None
    promised(voter, prepare(3, B, round_=2), ledger)
    assert refused(voter.bound(plan, ledger)).attempt == 3
    assert Voter(PEERS[9], None).bound(plan, ledger) is None


# -- certificates ----------------------------------------------------------------------------------------------------

BODY_HASH, DIGEST = bytes([1]) * 32, bytes([2]) * 32


def vote(attempt: int = 0, leader: PeerId = COORDINATOR, digest: bytes = DIGEST, round_: int = 1) -> Vote:
    return Vote(0, round_, attempt, leader, BODY_HASH, digest)


def leave(attempt: int = -1, leader: PeerId = NOBODY, round_: int = 1) -> Leave:
    return Leave(0, round_, attempt, leader, NO_HASH, -1, None)


@pytest.mark.parametrize(
    ("signed", "enough"),
    [
        ([(PEERS[0], vote()), (PEERS[1], vote())], True),
        ([(PEERS[0], vote())], False),
        ([(PEERS[0], vote()), (PEERS[0], vote())], False),
        ([(PEERS[0], vote()), (COORDINATOR, vote())], False),
        ([(PEERS[0], vote()), (PEERS[9], vote())], False),
        ([(PEERS[0], vote()), (PEERS[1], vote(digest=NO_HASH))], False),
        ([(PEERS[0], vote()), (PEERS[1], vote(attempt=1))], False),
        ([(PEERS[0], vote()), (PEERS[1], vote(round_=2))], False),
        ([(PEERS[0], vote()), (PEERS[1], vote(leader=A))], False),
        ([(PEERS[0], vote()), (COORDINATOR, vote()), (PEERS[1], leave())], True),
        ([(PEERS[0], vote()), (PEERS[1], leave()), (PEERS[2], leave())], True),
        ([(PEERS[0], vote()), (PEERS[1], leave())], False),
        ([(PEERS[0], vote()), (COORDINATOR, vote()), (PEERS[1], leave(round_=2))], False),
        ([(PEERS[0], vote()), (COORDINATOR, vote()), (PEERS[1], leave(attempt=1, leader=A))], False),
        ([(PEERS[0], vote()), (COORDINATOR, vote()), (PEERS[1], leave(attempt=0, leader=COORDINATOR))], True),
    ],
)
def test_certificates(signed: list[tuple[PeerId, Vote | Leave]], enough: bool) -> None:
    fault = certificate_faults(signed, BODY_HASH, DIGEST, 0, LEDGER, COORDINATOR)
    assert (fault == "") is enough
    if not enough:
        assert "no quorum" in fault


# -- many voters -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Leader:
    """A leader without machinery: it prepares a number, proposes what it must, and counts."""

    name: PeerId
    number: int = 0
    promises: dict[PeerId, Promise] = field(default_factory=dict)
    asked: Propose | None = None
    votes: dict[PeerId, Vote] = field(default_factory=dict)


Heeds = Callable[[Promise | Leave, int, PeerId], bool]


def disagreement(seed: int, heeds: Heeds) -> str:
    """One random history of a few voters and leaders, any message lost or late; two commits in it, if there are."""
    rng = Random(seed)
    n = rng.randint(2, 5)
    ledger = at_head(beginning(PEERS[:n]), "model")
    voters = {peer: Voter(peer, None) for peer in ledger.voters}
    leaders = [Leader(COORDINATOR), Leader(A), *([Leader(B)] if rng.random() < 0.5 else [])]
    leaves: dict[PeerId, Leave] = {}
    heard: dict[PeerId, dict[PeerId, Leave]] = {leader.name: {} for leader in leaders}
    committed: set[bytes] = set()
    for step in range(rng.randint(10, 60)):
        leader = rng.choice(leaders)
        peer = rng.choice(ledger.voters)
        left = {who for who, item in heard[leader.name].items() if heeds(item, leader.number, leader.name)}
        match rng.randrange(10):
            case 0:
                top = max(other.number for other in leaders)
                fresh = leader.number == 0 and leader.name == COORDINATOR and leader.asked is None
                leader.number = 0 if fresh else rng.randint(leader.number + 1, top + 2)
                leader.promises, leader.asked, leader.votes = {}, None, {}
                if fresh:
                    leader.asked = _propose(leader, f"{step}")
            case 1 | 2 | 3 if leader.number > 0 and leader.asked is None:
                answer = voters[peer].prepared(Prepare(0, 1, leader.number, leader.name), ledger)
                if isinstance(answer, Promise) and rng.random() < 0.8:
                    leader.promises[peer] = answer
                if policy.is_quorum(leader.promises, ledger.voters, COORDINATOR, left):
                    known: list[Promise | Leave] = [*leader.promises.values(), *heard[leader.name].values()]
                    signed = [(item.voted_attempt, item.proposal.body) for item in known if item.proposal]
                    leader.asked = _propose(leader, max(signed)[1].decode() if signed else f"{step}")
            case 4 | 5 | 6 if leader.asked is not None:
                cast = voters[peer].voted(leader.asked, leader.asked.proposal.body.ljust(32), NO_HASH, ledger)
                if not isinstance(cast, Refusal) and rng.random() < 0.8:
                    leader.votes[peer] = cast[0]
                without = left - set(leader.votes)
                if policy.is_quorum(leader.votes, ledger.voters, COORDINATOR, without):
                    committed.add(leader.asked.proposal.body)
            case 7 if rng.random() < 0.5 and peer != COORDINATOR:
                if (item := voters[peer].leave(ledger)) is not None:
                    leaves[peer] = item
            case 8 | 9 if leaves:
                who = rng.choice(sorted(leaves))
                heard[leader.name][who] = leaves[who]
            case _:
                pass
    return "" if len(committed) <= 1 else f"seed {seed}: {sorted(committed)}"


def _propose(leader: Leader, name: str) -> Propose:
    return Propose(0, 1, leader.number, leader.name, 1.0, proposal(name), ())


def test_no_history_commits_twice() -> None:
    assert not [found for seed in range(1500) if (found := disagreement(seed, policy.heeds))]


@pytest.mark.sim
def test_no_history_commits_twice_of_many() -> None:
    assert not [found for seed in range(10_000, 60_000) if (found := disagreement(seed, policy.heeds))]


def test_leaves_that_count_against_a_promise_would_commit_twice() -> None:
    """Why a LEAVE names the last promise: taking its weight out of a lower number lets two quorums miss each other."""

    def always(record: Promise | Leave, attempt: int, leader: PeerId) -> bool:
        return True

    assert any(disagreement(seed, always) for seed in range(20_000))


def test_the_history_by_which_it_would() -> None:
    """Four members. b, c, d promise 5 to A; c and d leave. The coordinator must not count them out for number 0."""
    a, b, c, d = PEERS[:4]
    ledger = beginning([a, b, c, d])
    voters = {peer: Voter(peer, None) for peer in ledger.voters}
    promises = {peer: promised(voters[peer], prepare(5, A), ledger) for peer in (b, c, d)}
    assert policy.is_quorum(promises, ledger.voters, COORDINATOR)
    left = {peer: voters[peer].leave(ledger) for peer in (c, d)}
    for peer in (a, COORDINATOR):
        assert isinstance(voted(voters[peer], propose(0, name="first"), ledger), tuple)
    counted = {peer for peer, item in left.items() if item is not None and policy.heeds(item, 0, COORDINATOR)}
    assert counted == set()
    assert not policy.is_quorum([a, COORDINATOR], ledger.voters, COORDINATOR, counted)
    assert policy.is_quorum([a, COORDINATOR], ledger.voters, COORDINATOR, left)  # what must not be
    for peer in (a, b):
        assert isinstance(voted(voters[peer], propose(5, A, "second"), ledger), tuple)
    counted = {peer for peer, item in left.items() if item is not None and policy.heeds(item, 5, A)}
    assert policy.is_quorum([a, b], ledger.voters, COORDINATOR, counted)


def test_changed_records_are_new_objects() -> None:
    """A record that was handed out to be kept never changes afterwards."""
    voter = Voter(ME, None)
    promise = promised(voter, prepare(1, A))
    kept = replace(promise)
    promised(voter, prepare(2, A))
    assert promise == kept
