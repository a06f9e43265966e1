"""What would fit no message: an attempt fails over it, with words, and its leader goes on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from coordinator.rounds import state
from coordinator.rounds import voting as votes
from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import Committed, Persist
from protos import limits
from protos.messages import AttemptFailed, Body, Commit, Deal, Plan, Propose, SignedMessage
from protos.wire import WireError, encode
from tests.coordinator.rounds.cases import COORDINATOR, PEERS
from tests.coordinator.rounds.leader_script import DIGEST, Script, training
from tests.coordinator.rounds.leader_script import voting as in_vote
from tests.fakes.sealer import FakeSealer


@dataclass(frozen=True, slots=True)
class Narrow(FakeSealer):
    """Finds messages of one kind too long."""

    kind: type = Plan

    def encode(self, message: object) -> bytes:
        if isinstance(message, self.kind):
            raise WireError(f"{self.kind.__name__}: 70000000 bytes exceed the limit")
        return self.registry.encode(message)

    def seal(self, message: SignedMessage) -> bytes:
        if isinstance(message, self.kind):
            raise WireError(f"{self.kind.__name__}: 70000000 bytes exceed the limit")
        return self.registry.seal(self.me, message)


def a_round(script: Script) -> None:
    script.ready(*PEERS[:3])
    if script.phase() is Phase.PREPARE:
        for peer in PEERS[:2]:
            script.promise(peer)
    if script.phase() is Phase.COMMITMENT:
        script.commit_to_plan(*PEERS[:3])
    if script.phase() is Phase.EXCHANGE:
        script.reduce()
    if script.phase() is Phase.VOTE:
        script.vote(*PEERS[:2])


@pytest.mark.parametrize("kind", [Plan, Deal, Body, Propose])
def test_what_is_too_long_to_be_told_fails_its_attempt(kind: type) -> None:
    script = training(3)
    script.rounds._sealer = Narrow(script.registry, COORDINATOR, kind)
    a_round(script)
    (failed,) = [message for _, message in script.told(AttemptFailed, script.did)]
    assert f"{kind.__name__}: 70000000 bytes" in failed.reason
    assert script.phase() is Phase.TRAIN
    kept = [effect.entry for effect in script.effects(Persist, script.did)]
    assert len(kept) == 1, "the number that it used, and nothing that no disk would take"
    script.rounds._sealer = FakeSealer(script.registry, COORDINATOR)
    script.at += 1.0
    a_round(script)
    assert script.effects(Committed, script.did)


def test_a_proposal_whose_commit_would_fit_no_message_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    script = training(3)
    monkeypatch.setattr(votes, "LEAVES_BYTES", limits.MESSAGE_BYTES)
    a_round(script)
    (failed,) = [message for _, message in script.told(AttemptFailed, script.did)]
    assert "its commit could take" in failed.reason
    assert not script.told(Propose, script.did)


def test_the_most_that_a_commit_takes_is_not_less_than_it_takes() -> None:
    script = in_vote(3)
    proposal = script.last(Propose).proposal
    long = Commit(
        proposal.body,
        DIGEST,
        2**31,
        (bytes(state.LEAVES_BYTES), *[bytes(limits.VOTE_BYTES + limits.ENVELOPE_EXTRA_BYTES)] * limits.VOTERS),
        proposal.result_hashes,
    )
    assert len(encode(long)) <= votes._commit_bytes(proposal)
