"""The exchange of an attempt as its leader goes through it: whose rows and results are there, and who is at fault.

What goes wrong is mended within the attempt, by a redeal, as long as every chunk has somebody left to reduce it.
"""

from __future__ import annotations

from collections.abc import Collection

from coordinator.rounds import policy, proposing, redealing
from coordinator.rounds.attempt import Attempt
from coordinator.rounds.events import (
    Effect,
    Instant,
    Probe,
    Say,
    Tell,
)
from coordinator.rounds.members import Member, listed, named
from coordinator.rounds.moves import Change, by_claims
from coordinator.rounds.state import InvariantBroken
from coordinator.rounds.voting import LEADER_SLACK, Voting, because
from protos.limits import LACKS
from protos.messages import (
    Inquiry,
    Missing,
    PeerId,
    Results,
    Signed,
)

LOST = "lost in the exchange: "
"""How the reason begins why a sender that was dealt in does not count."""
REASON_MOST = 200
"""Characters of such a reason: it stands in the commit."""


class Exchanging(Voting):
    """The moves of a leader while rows and results travel."""

    # EXCHANGE: senders stream, reducers combine and sign results. Who is lost is looked for after every event, and what
    # follows from it is told to all in one redeal. An attempt fails where nobody is left to reduce a chunk, where the
    # set would have to shrink too often or by too much, and where there is no end to what goes wrong.

    def _exchange(self, now: Instant) -> list[Effect] | None:
        attempt = self._running()
        gone = {peer for peer in {*attempt.included, *attempt.reducers} if self._is_lost(attempt, peer, now)}
        if attempt.outbid > attempt.number and gone & attempt.declined.keys():
            return self._fail(f"lost {named(gone)}{because(attempt.declined)}", now)
        moves = attempt.moves
        awaited = [peer for peer in attempt.reducers if peer not in attempt.results]
        hopeful = [peer for peer in awaited if peer not in gone and peer not in moves.unable]
        silent = [peer for peer in hopeful if peer not in moves.claims]
        change = self._by_disputes(attempt, gone, hopeful)
        if not change and self._is_done(attempt, gone, silent, now):
            evidence = attempt.evidence()
            if evidence is None:
                raise InvariantBroken("an exchange without a deal")
            faults = proposing.evidence_faults(evidence, self.ledger, self.spec)
            if not faults:
                return self._propose_new(evidence, "", now)
            change.lost = {peer for peer in attempt.results if any(peer in fault for fault in faults)}
            change.reasons += faults
            self._out_reducers |= change.lost
            if not change:
                return self._fail(listed(faults, "; "), now)
        if not change:
            self._by_claims(attempt, gone, hopeful, silent, change, now)
        reason = self._by_absence(attempt, gone, change, now)
        asked = [] if reason else self._by_inquiry(attempt, gone, hopeful, change, now)
        if change and not reason:  # who is out as a sender is so as a reducer, if it is gone
            reason = self._by_absence(attempt, gone, change, now)
        if reason:
            return self._given_up(attempt, gone, change, reason, now)
        if change:
            return self._redeal(attempt, gone, change, now)
        if asked:
            return asked
        if moves.asked and hopeful:
            waiting = [peer for peer in hopeful if peer not in moves.answers]
            return self._wait(f"word of {named(waiting)} on the rows of {named(moves.asked)}, gone")
        return self._wait(f"results of {named(awaited)}{self._claimed(attempt)}")

    def _is_done(self, attempt: Attempt, gone: Collection[PeerId], silent: Collection[PeerId], now: Instant) -> bool:
        """Whether enough replicas agree, somebody is here that has each result, and the other replicas are not here or
        have had a little longer."""
        if not attempt.is_agreed() or attempt.disputed():
            return False
        # Whose line has just broken may be dead, and what it alone has could not be fetched.
        here = {p for p in attempt.results if p not in gone and self.members.fresh(p, now)}
        if not all(any(peer in here for peer in line) for line in attempt.reducing):
            return False
        if attempt.enough_at is None:
            attempt.enough_at = now
        late = now >= attempt.enough_at + self.spec.deadlines.gone_grace_s
        return late or not any(self.members.fresh(peer, now) for peer in silent)

    # -- what there is to change --------------------------------------------------------------------------------

    def _by_disputes(self, attempt: Attempt, gone: Collection[PeerId], hopeful: Collection[PeerId]) -> Change:
        """Where replicas differ, who is against enough of them is a liar; else the next in line decide."""
        change, moves = Change(), attempt.moves
        out = {*gone, *moves.unable, *moves.lost}
        for chunk, words in moves.words.items():
            if attempt.is_settled(chunk):
                (right, _), *_ = attempt.camps(chunk)
                change.lost |= {peer for word, said in words.items() if word != right for peer in said} - moves.lost
        for chunk in attempt.disputed():
            camps = attempt.camps(chunk)
            (_, most), (_, second), *_ = camps
            said = {peer for _, camp in camps for peer in camp}
            has_room = len(moves.moved | change.moved) + len(said) <= LACKS  # a redeal names no more
            if len(most) > len(second) and len(most) >= attempt.enough > len(second):
                change.lost |= said - most
            elif any(peer in hopeful for peer in attempt.reducing[chunk]):
                continue  # more words are to come
            elif not has_room and (hopeful or change.moved or change.lost & said):
                continue  # who is found to lie about the chunks that have moved is out of these too
            elif has_room and any(peer not in {*said, *out} for peer in attempt.lines[chunk]):
                known = moves.words.setdefault(chunk, {})
                for word, camp in camps:
                    known.setdefault(word, set()).update(camp)
                change.moved |= {(chunk, peer) for peer in said}
                change.reasons.append(f"replicas differ on chunk {chunk}: the next in line decide")
            else:
                change.lost |= said - most if len(most) > len(second) else said
        if change.lost:
            change.reasons.append(f"the results of {named(change.lost)} are not what other replicas have")
            self._out_reducers |= change.lost
        return change

    def _by_claims(
        self,
        attempt: Attempt,
        gone: Collection[PeerId],
        hopeful: Collection[PeerId],
        silent: Collection[PeerId],
        change: Change,
        now: Instant,
    ) -> None:
        """What reducers say of the rows of living senders, once all have said something or have had time to."""
        moves, timed_out = attempt.moves, now >= attempt.deadline_at
        if timed_out:
            # Who neither has results nor says whose rows are missing is itself at fault.
            change.lost |= set(silent)
            self._out_reducers |= change.lost
            change.reasons += [f"no word from {named(silent)} in time"] if silent else []
        claimed_at = moves.claimed_at
        if claimed_at is None or not (timed_out or not silent or now >= claimed_at + self.spec.deadlines.gone_grace_s):
            return
        needed = [p for p in hopeful if not all(attempt.is_settled(chunk) for chunk in attempt.dealt[p])]
        claims = {
            reducer: {sender: chunks for sender, chunks in moves.claims.get(reducer, {}).items() if sender not in gone}
            for reducer in needed
        }
        found = by_claims(
            moves,
            {reducer: lacks for reducer, lacks in claims.items() if lacks},
            {peer: len(chunks) for peer, chunks in attempt.dealt.items()},
            attempt.plan.f if attempt.plan else 0,
            self._able(attempt, {*gone, *moves.unable, *moves.lost, *change.lost}),
        )
        for sender in found.excluded:  # a reducer that was blamed for its rows has said the truth
            self._out_reducers -= {peer for (_, of), peers in moves.turns.items() if of == sender for peer in peers}
        self._out_reducers |= found.lost | {peer for _, peer in found.moved}
        self._out_senders |= found.excluded.keys()
        change.excluded |= found.excluded
        change.lost |= found.lost
        change.moved |= found.moved
        change.reasons += found.reasons

    def _able(self, attempt: Attempt, out: Collection[PeerId]) -> list[PeerId]:
        """Reducers that have combined their rows, or could: not those in reserve, before they are dealt anything."""
        members = attempt.plan.members if attempt.plan else ()
        waiting = {member.peer for member in members if member.reserve} - attempt.dealt.keys()
        not_now = waiting.union(out)
        line = attempt.lines[0] if attempt.lines else ()
        return [peer for peer in line if peer in attempt.results or peer not in not_now]

    def _by_absence(self, attempt: Attempt, gone: Collection[PeerId], change: Change, now: Instant) -> str:
        """Chunks whose reducers are not here or unable go to the next in line. Why they can't, or an empty string."""
        moves, plan = attempt.moves, attempt.plan
        if plan is None:
            raise InvariantBroken("an exchange without a plan")
        out = {*gone, *moves.unable, *change.lost}
        changed = bool(change)
        if not out and not changed:
            return ""
        for chunk, line in enumerate(attempt.reducing):
            here = [peer for peer in line if peer not in out and (chunk, peer) not in change.moved]
            n_words = sum(1 for peer in line if peer in here or (peer in attempt.results and peer not in change.lost))
            if not here or n_words < attempt.needed(chunk):
                changed = True
                change.lost |= {peer for peer in line if peer in out and (not here or peer not in attempt.results)}
        if not changed:
            return ""
        change.lost |= {peer for peer in attempt.reducers if peer in out and peer not in attempt.results}
        while True:
            lost, moved = moves.lost | change.lost, moves.moved | change.moved
            after = redealing.reducers_after(plan, attempt.lines, lost, moved)
            if bare := [str(chunk) for chunk, line in enumerate(after) if not line]:
                return f"nobody is left to reduce chunk{'s' if len(bare) > 1 else ''} {listed(bare)}"
            absent = {
                peer
                for line, before in zip(after, attempt.reducing, strict=True)
                for peer in line
                if peer not in before and (peer in moves.unable or self._is_lost(attempt, peer, now))
            }
            if not absent:
                break
            change.lost |= absent
        new = any(set(line) - set(before) for line, before in zip(after, attempt.reducing, strict=True))
        dead = [peer for peer in attempt.included if peer in gone and peer not in change.excluded]
        if new and moves.n_shrinks == redealing.SHRINKS_MOST - 1 and not change.excluded:
            moves.kept -= set(dead)  # the last time is when all others' rows are there, so that it is for all who go
        elif new:  # who is gone can't send its row to who has not got it
            change.excluded |= dict.fromkeys(dead, "gone before all its rows were there")
        return ""

    def _by_inquiry(
        self, attempt: Attempt, gone: Collection[PeerId], hopeful: Collection[PeerId], change: Change, now: Instant
    ) -> list[Effect]:
        """Whether the rows of senders that are gone are all there is asked of the reducers that still combine.

        Who lacks some answers when it lacks nothing else. Where a member goes every few seconds, a set that shrank for
        each of them would shrink too often; so it does for all at once.
        """
        moves = attempt.moves
        claimed_now = {sender for peer in hopeful for sender in moves.claims.get(peer, ())}
        settled = moves.kept - claimed_now
        dead = [p for p in attempt.included if p in gone and p not in settled and p not in change.excluded]
        if not dead or not hopeful:
            return []
        if change.excluded or now >= attempt.deadline_at or self._have_answered(attempt, hopeful, dead, now):
            for sender in dead:
                claimed = {peer for peer in hopeful if sender in moves.claims.get(peer, {})}
                lacking = claimed | {peer for peer in hopeful if sender in moves.answers.get(peer, ())}
                if lacking:
                    change.excluded[sender] = f"gone before all its rows were with {named(lacking)}"
        left = [sender for sender in dead if sender not in change.excluded]
        if change or not left:
            return []
        if set(left) <= set(moves.asked):
            if all(peer in moves.answers for peer in hopeful):
                moves.kept |= set(left)
            return []
        moves.asked, moves.answers = tuple(left), {}
        return [Tell(tuple(hopeful), Inquiry(attempt.plan_hash, moves.asked))]

    def _have_answered(
        self, attempt: Attempt, hopeful: Collection[PeerId], asked: Collection[PeerId], now: Instant
    ) -> bool:
        """Whether all reducers have said what they lack of these senders, or enough of them and the others have had a
        little longer."""
        moves = attempt.moves
        if not set(asked) <= set(moves.asked):
            return False
        if all(peer in moves.answers for peer in hopeful):
            return True
        spoken = {*attempt.results, *moves.answers}
        if any(sum(p in spoken for p in line) < attempt.needed(chunk) for chunk, line in enumerate(attempt.reducing)):
            return False
        if moves.answered_at is None:
            moves.answered_at = now
        return now >= moves.answered_at + self.spec.deadlines.gone_grace_s

    # -- changing it --------------------------------------------------------------------------------------------

    def _redeal(self, attempt: Attempt, gone: Collection[PeerId], change: Change, now: Instant) -> list[Effect]:
        moves, deal = attempt.moves, attempt.deal
        change.excluded = {peer: (LOST + reason)[:REASON_MOST] for peer, reason in change.excluded.items()}
        if change.excluded and moves.n_shrinks >= redealing.SHRINKS_MOST:
            return self._given_up(attempt, gone, change, f"the set has shrunk {moves.n_shrinks} times", now)
        if moves.number >= redealing.REDEALS_MOST:
            return self._given_up(attempt, gone, change, f"chunks have been dealt again {moves.number} times", now)
        left = {peer: attempt.commitments[peer][0] for peer in attempt.included if peer not in change.excluded}
        if deal is None or (reason := policy.refused(self.spec, left, deal.excluded)):
            return self._given_up(attempt, gone, change, reason, now)
        moves.added(change)
        attempt.redeal = moves.redeal(attempt.plan_hash, self.spec.deadlines.exchange_s)
        attempt.redeal_envelope = self._sealer.seal(attempt.redeal)
        attempt.deal_out()
        attempt.deadline_at = Instant(now + self.spec.deadlines.exchange_s * LEADER_SLACK)
        told = [f"redeal {moves.number} of attempt {attempt.number}"]
        told += [f"without {peer[-6:]} ({reason})" for peer, reason in sorted(change.excluded.items())]
        told += [f"{named(change.lost)} reduce no more"] if change.lost else []
        told += [f"{len(change.moved)} chunks go to the next in line"] if change.moved else []
        said = Say(listed([*told, *change.reasons], "; ")[: REASON_MOST * 4])
        everyone = {*attempt.commitments, *(entry.peer for entry in deal.bandwidths)}
        lost = [member for peer in sorted(change.lost) if (member := self.members.get(peer)) is not None]
        # Maybe nobody can connect to it any more: then it is not asked to reduce in the rounds to come.
        probes = [Probe(m.peer, m.record.grpc) for m in lost if m.connected and m.record.grpc]
        return [said, Tell(tuple(sorted(everyone)), Signed(attempt.redeal_envelope)), *probes]

    def _given_up(
        self, attempt: Attempt, gone: Collection[PeerId], change: Change, reason: str, now: Instant
    ) -> list[Effect]:
        """Nothing more can be mended here. Who is here and refuses the deal would refuse the next one too."""
        self._unable |= attempt.moves.unable
        if self._none_is_able(self._could_reduce(now)):
            return self._propose_new(None, self._why_unable(), now)
        unwilling = set(gone) & attempt.declined.keys()
        self._out_senders |= unwilling
        self._out_reducers |= unwilling | attempt.moves.unable
        lost = {*gone, *change.excluded}
        told = [f"lost {named(lost)}"] if lost else []
        told += [*change.reasons, reason, *attempt.faults.values()]
        return self._fail(f"{listed(told, '; ')}{self._claimed(attempt)}{because(attempt.declined)}", now)

    # -- what is heard ------------------------------------------------------------------------------------------

    def _heard_results(self, attempt: Attempt, peer: PeerId, results: Results, envelope: bytes) -> None:
        if (fault := attempt.take(peer, results, envelope)) and peer in attempt.dealt:
            attempt.moves.unable.add(peer)  # whatever it does, it is not what it was dealt
            attempt.faults[peer] = fault
            self._out_reducers.add(peer)

    def _heard_missing(self, attempt: Attempt, peer: PeerId, missing: Missing, now: Instant) -> None:
        moves = attempt.moves
        lacks = [item for item in missing.lacks if item.sender in attempt.included]
        if missing.asked:
            moves.answer(peer, missing.asked, lacks)
        elif missing.unable:
            moves.unable.add(peer)
            self._unable.add(peer)
            self._out_reducers.add(peer)
        else:
            dealt = set(attempt.dealt.get(peer, ()))
            moves.claim(peer, [item for item in lacks if item.chunk in dealt], now)

    def _claimed(self, attempt: Attempt) -> str:
        """For people: who lacks whose rows of which chunks."""
        told = [
            f"{reducer[-6:]} lacks chunk {min(chunks)}{f' and {len(chunks) - 1} more' if len(chunks) > 1 else ''} "
            f"of {sender[-6:]}"
            for reducer, lacks in sorted(attempt.moves.claims.items())
            for sender, chunks in sorted(lacks.items())
        ]
        return f"; {listed(told)}" if told else ""

    # -- who could reduce ---------------------------------------------------------------------------------------

    def _could_reduce(self, now: Instant) -> list[Member]:
        """Contributors and observers that can be reached and hold the state, blamed or not."""
        observers = [m for m in self.members if m.observer and self.members.holds(m.peer, self.ledger, now)]
        return [m for m in (*self._roll(now).contributors(), *observers) if m.reachable]

    def _none_is_able(self, reducers: Collection[Member]) -> bool:
        """Whether all of those who could reduce have said that they can't: another attempt would end like this one."""
        return bool(reducers) and all(member.peer in self._unable for member in reducers)

    def _why_unable(self) -> str:
        return f"nobody who could reduce is able to combine the contributions: {named(self._unable)}"
