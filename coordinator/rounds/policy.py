"""The run's policies as pure functions of the chain and the RunSpec, so that every voter comes to the same."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from aggregation import rules
from aggregation.chunks import ChunkGrid, deal
from aggregation.codec import frame_bytes, result_codec
from aggregation.errors import RuleError
from aggregation.exchange import deal_seed
from aggregation.rules import gate
from aggregation.rules.policy import effective
from aggregation.spec import NUMERICS_VERSION, unknown_codec, unknown_rule
from coordinator.rounds import leases, rates, work
from coordinator.rounds.ledger import Ledger, round_lr
from coordinator.rounds.work import Work
from protos.messages import (
    Bandwidth,
    Commitment,
    Excluded,
    Leave,
    MemberEntry,
    PeerId,
    Promise,
    Range,
    Seat,
)
from protos.runspec import RunSpec

VOTERS_MAX = 32
MEMBER_WEIGHT = 2
COORDINATOR_WEIGHT = 1
REACHABLE_ENOUGH = 3
"""While fewer members than this can be reached, the observer reduces too."""
NORM_SQ_MOST = 1e100
"""‖·‖² of no frame comes near it: fp32 values end at 3.4e38, and a chunk has at most 2^24."""
NORM_SLACK = 1.02
"""What sums in fp32 may lengthen a vector by, and to spare; what encoding the result adds is reckoned apart."""
NO_STEPS = "no steps"
"""Why a commitment is out that claims nothing: no fault, so it takes nothing of what f allows for."""
TOO_FEW_STEPS = "too few steps"
"""Why a commitment is out that claims less than the run's `steps_min`: as little of a fault."""
MESH_BYTES_MOST = 16 * 2**20
"""What replicas = auto lets a reducer receive in a round for the sake of having every chunk reduced by everyone."""
WEIGHT_CAPS = {"open": 2.0, "invite": 8.0, "allow_list": 8.0}
"""Times the median of the tokens: where anyone may come, a high claim buys little."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What a set of contributions is combined with: the rule in force for so many, and why it is not the run's own."""

    rule: str
    f: int
    fallback: str
    degraded: str


NUMBERS_AT_ONCE = 10_000
NUMBERS_PER_S = 100.0
"""Honest leaders use a few numbers a minute; 2^31 are none too few for a round of months."""


def unknown(spec: RunSpec) -> str:
    """What a RunSpec names that this version can't compute with, and what is nearest; else an empty string.

    A RunSpec is read by whoever shows a run, too, so its own validation doesn't know rules.
    """
    if spec.numerics_version != NUMERICS_VERSION:
        return f"numerics_version is {spec.numerics_version}, this version computes with {NUMERICS_VERSION}"
    if why := unknown_rule(spec.rule.name):
        return f"rule.name is {why}"
    return f"codec.name is {why}" if (why := unknown_codec(spec.codec.name)) else ""


def grid(spec: RunSpec) -> ChunkGrid:
    return ChunkGrid(spec.model.n_values, spec.codec.chunk_values)


# -- votes -------------------------------------------------------------------------------------------------------


def weight_of(peers: Collection[PeerId], coordinator: PeerId) -> int:
    """The weight of votes of these voters: a member's 2, the coordinator's 1."""
    return sum(COORDINATOR_WEIGHT if peer == coordinator else MEMBER_WEIGHT for peer in peers)


def is_quorum(
    signers: Collection[PeerId],
    voters: Sequence[PeerId],
    coordinator: PeerId,
    left: Collection[PeerId] = (),
) -> bool:
    """Whether signers of a vote or a promise weigh more than half of the voters, less those whose LEAVE counts here.

    Any two quorums of one round share a voter, or the higher attempt knows a LEAVE that tells of the vote in the lower
    one, as long as each LEAVE counts only in attempts that its sender's last promise heeds.
    """
    present = [voter for voter in voters if voter not in left]
    return 2 * weight_of([p for p in present if p in signers], coordinator) > weight_of(present, coordinator)


def numbers_most(seconds: float) -> int:
    """Up to which number others' word moves a leader on, so long after the head of its round has come.

    It grows, and voters promise stand-ins no more than twice as much. So whoever binds voters to high numbers leaves
    room above them, which comes by itself, and nobody uses up the numbers of a round.
    """
    return NUMBERS_AT_ONCE + int(NUMBERS_PER_S * max(0.0, seconds))


def heeds(record: Promise | Leave, attempt: int, leader: PeerId) -> bool:
    """Whether a last promise leaves its voter free for an attempt: a higher number, or the same one's own leader."""
    return attempt > record.attempt or (attempt == record.attempt and leader == record.leader)


def spread_enough(
    signers: Collection[PeerId],
    voters: Sequence[PeerId],
    coordinator: PeerId,
    reachable: Collection[PeerId],
) -> bool:
    """Whether a commit's results survive its signers: two signers that others can reach, or the coordinator, or all."""
    if coordinator in signers or all(voter in signers or voter == coordinator for voter in voters):
        return True
    return sum(1 for peer in signers if peer in reachable) >= 2


def branch_key(ledger: Ledger) -> tuple[int, int, int, bytes]:
    """Of two branches of a chain the one with the larger key is followed: a rollback's, then the one with more tokens,
    then of the higher epoch, then with the lower hash.

    Tokens are those that counted, so who has no weight adds none; since the two have their past in common, comparing
    their sums compares what came since the fork.
    """
    return ledger.rollbacks, ledger.tokens, ledger.epoch, bytes(255 - byte for byte in ledger.head)


# -- contributions -----------------------------------------------------------------------------------------------


def fault_of(commitment: Commitment, seat: Seat | None, nominal_step: int, spec: RunSpec) -> str:
    """What is wrong with a commitment by itself, or an empty string. Claims beyond the lease are out, and so are sums
    of learning rates that its steps don't come to by the schedule, whose clock stood at `nominal_step`."""
    if seat is None:
        return "no seat"
    n_batches = leases.count(commitment.used)
    if n_batches < 0 or commitment.used != leases.prefix(seat.ranges, n_batches):
        return "batches outside the lease"
    if commitment.steps * seat.batch_scale > n_batches:  # fewer, where a step was skipped for a loss that is not finite
        return f"{commitment.steps} steps claimed for {n_batches} batches"
    if commitment.tokens != n_batches * spec.work.batch_tokens:
        return f"{commitment.tokens} tokens claimed for {n_batches} batches"
    if len(commitment.norms) != grid(spec).n_chunks:
        return f"{len(commitment.norms)} chunk norms instead of {grid(spec).n_chunks}"
    if not all(0 <= norm <= NORM_SQ_MOST for norm in commitment.norms):
        return "a norm that no values have"
    n_made = n_batches // max(seat.batch_scale, 1)
    least, most = rates.sums(spec.inner, nominal_step, spec.work.h, commitment.steps, n_made)
    if not 0 <= commitment.sum_lr <= most:
        return "more learning rate than its steps allow"
    return "less learning rate than its steps take" if commitment.sum_lr < least else ""


def delta_norm(commitment: Commitment) -> float:
    """‖Δ‖ as committed: the root of its chunks' ‖·‖², added in chunk order."""
    total = 0.0
    for norm in commitment.norms:
        total += norm
    return math.sqrt(total)  # correctly rounded, as a libm's power is not: every voter records the same


def excluded(commitments: Mapping[PeerId, Commitment], ledger: Ledger, spec: RunSpec) -> dict[PeerId, str]:
    """Who of these senders is out in the round after `ledger`, and why: wrong in itself, or outside the norm gate."""
    seats = {seat.peer: seat for seat in ledger.seats}
    reasons: dict[PeerId, str] = {}
    for peer in sorted(commitments):
        if fault := fault_of(commitments[peer], seats.get(peer), ledger.nominal_step, spec):
            reasons[peer] = fault
        elif commitments[peer].steps == 0:
            reasons[peer] = NO_STEPS
        elif commitments[peer].steps < work.steps_min(spec):
            reasons[peer] = TOO_FEW_STEPS
    compared = [peer for peer in sorted(commitments) if peer not in reasons]
    gated = gate.norm_gate(
        [delta_norm(commitments[peer]) for peer in compared],
        [commitments[peer].sum_lr for peer in compared],
        low=spec.rule.gate_low,
        high=spec.rule.gate_high,
    )
    reasons.update({peer: reason for peer, reason in zip(compared, gated, strict=True) if reason is not None})
    return reasons


def weights(commitments: Mapping[PeerId, Commitment], spec: RunSpec) -> dict[PeerId, float]:
    """Tokens, capped at the run's `weight_cap` times the median (mean of the two middle ones), never raised."""
    tokens = sorted(commitments[peer].tokens for peer in commitments)
    if not tokens:
        return {}
    n = len(tokens)
    times = spec.rule.weight_cap or WEIGHT_CAPS[spec.membership.admission]
    cap = times * (tokens[(n - 1) // 2] + tokens[n // 2]) / 2
    return {peer: min(float(commitments[peer].tokens), cap) for peer in sorted(commitments)}


def planned_rule(spec: RunSpec, n_senders: int) -> Applied:
    """The rule that a plan names: for so many equal contributions, none of them rejected.

    Where no rule of the line can take so many, the run's own stands for it: fewer may be included, and then one can.
    """
    return _applied(spec, (1.0,) * n_senders, 0) or Applied(spec.rule.name, 0, "", "")


def applied_rule(spec: RunSpec, included: Mapping[PeerId, Commitment], excluded: Iterable[Excluded]) -> Applied | None:
    """The rule for the contributions that a deal includes, or None where there is none, and the round is empty.

    `excluded` are the deal's: who is out for a fault or by the gate has used up some of what f allows for.
    """
    n_rejected = sum(1 for entry in excluded if entry.reason not in (NO_STEPS, TOO_FEW_STEPS))
    return _applied(spec, tuple(weights(included, spec).values()), n_rejected)


def _applied(spec: RunSpec, weights_N: Sequence[float], n_rejected: int) -> Applied | None:
    rule = spec.rule
    try:
        choice = effective(rule.name, weights_N, f_max=rule.f_max, fraction=rule.fraction, rejected=n_rejected)
    except RuleError:
        return None
    return Applied(choice.rule, choice.f, choice.fallback or "", choice.degraded or "")


def takes_degraded(spec: RunSpec) -> bool:
    """Whether rounds of one or two contributions commit: not among strangers, unless the run says so."""
    return spec.membership.admission != "open" if spec.rule.degraded is None else spec.rule.degraded


def refused(spec: RunSpec, included: Mapping[PeerId, Commitment], excluded: Iterable[Excluded]) -> str:
    """Why a round with these contributions is committed empty, or an empty string."""
    n = len(included)
    if n < 1:
        return "no contributions"
    if n < spec.membership.min_contributors:
        return f"{n} contributions, and this run needs {spec.membership.min_contributors}"
    if n <= 2 and not takes_degraded(spec):
        return f"{n} contribution{'s' if n > 1 else ''}, too few to tell who lies: rule.degraded=true would take them"
    if applied_rule(spec, included, excluded) is None:
        return unknown(spec) or f"too few contributions for {spec.rule.name}: {n}"
    return ""


def replicas(spec: RunSpec, f: int, n_senders: int, n_reducers: int) -> int:
    """How many reducers a chunk has, for a plan with this f.

    auto: in allow-list runs one, since each multiplies every uplink. In others all of them while the rows that one
    receives, every sender's whole vector, stay small; else f + 1, so that one of them is honest.
    """
    if spec.rule.replicas != "auto":
        wanted: int = spec.rule.replicas
    elif spec.membership.admission == "allow_list":
        wanted = 1
    elif n_senders * vector_bytes(spec) <= MESH_BYTES_MOST:
        wanted = n_reducers
    else:
        wanted = f + 1
    return max(1, min(wanted, n_reducers))


def vector_bytes(spec: RunSpec) -> int:
    """The bytes of one contribution, all its frames together."""
    cut, codec = grid(spec), spec.codec
    first, last = (frame_bytes(codec.name, cut.size(chunk), codec.block) for chunk in (0, cut.n_chunks - 1))
    return (cut.n_chunks - 1) * first + last


def lines(
    plan_hash: bytes,
    commitments: Mapping[PeerId, Commitment],
    bandwidths: Sequence[Bandwidth],
    n_chunks: int,
    reserves: Collection[PeerId] = (),
) -> tuple[tuple[PeerId, ...], ...]:
    """Per chunk the reducers in line, from what the commitments make of the seed.

    Those in reserve have no share: they are the last in every line, unless they are all there is.
    """
    seed = deal_seed(plan_hash, {str(peer): commitment.root for peer, commitment in commitments.items()})
    shared = [entry for entry in bandwidths if entry.peer not in reserves] or list(bandwidths)
    dealt = deal(seed, n_chunks, [entry.peer for entry in shared], [entry.kib_s for entry in shared])
    sharing = {entry.peer for entry in shared}
    last = [entry.peer for entry in bandwidths if entry.peer not in sharing]
    # Chunks with the same first reducer have the same line: it is kept once, however many chunks there are.
    distinct = {line[0]: line for line in dealt}
    whole = {first: (*(PeerId(peer) for peer in line), *last) for first, line in distinct.items()}
    return tuple(whole[line[0]] for line in dealt)


def clip_factor(spec: RunSpec, ledger: Ledger, aggregate_norm: float, members: Iterable[MemberEntry]) -> float:
    """s of the commit, an fp32 value: 1 unless the run's rule clips the aggregate.

    The run's own rule decides, also where a fallback is in force: with few contributions a jump is no likelier honest.
    """
    if not rules.clips_aggregate(spec.rule.name):
        return 1.0
    return gate.clip_factor(aggregate_norm, round_lr(members), ledger.norms)


def result_norm_limit(
    spec: RunSpec, included: Mapping[PeerId, Commitment], chunk: int, applied: Applied, centre_norm: float
) -> float:
    """The largest norm that a chunk's result may have.

    By how much a rule may lengthen the longest of the chunk's contributions, or what it starts from: a centred rule's
    is the head's results, whose norm over the whole vector (the ledger's `centre_norm`) bounds that of each chunk. And
    by how much the result's own encoding may.
    """
    longest = math.sqrt(max(commitment.norms[chunk] for commitment in included.values()))
    if rules.is_centred(applied.rule):
        longest = max(longest, centre_norm)
    relative, absolute = _rounding(spec, grid(spec).size(chunk))
    return (NORM_SLACK + relative) * rules.norm_growth(applied.rule, len(included), applied.f) * longest + absolute


def _rounding(spec: RunSpec, n_values: int) -> tuple[float, float]:
    """By how much encoding a result of so many values may lengthen it: (share of its norm, beside it)."""
    match result_codec(spec.codec.name):
        case "int8":
            # Half a step, absmax/254, for each value of a block but the one that has the step from itself.
            return math.sqrt(min(spec.codec.block, n_values) - 1) / 254, 0.0
        case "fp16":
            return 2.0**-11, math.sqrt(n_values) * 2.0**-25
    return 0.0, 0.0


# -- the next round ----------------------------------------------------------------------------------------------


def seats_for(
    ledger: Ledger,
    returned: Sequence[Range],
    asks: work.Works | Collection[PeerId],
    spec: RunSpec,
    kept: Collection[PeerId] = (),
) -> tuple[tuple[Seat, ...], tuple[Range, ...]]:
    """Seats of the next round for what is asked of whom (peers alone: H steps of one batch), and the pool that is left.

    Who has been in the run longest comes first, which settles who stays where there are more than `max_members`. The
    leases of `kept` go on, and grow to what is asked. Raises ValueError where more is asked than may be.
    """
    works = works_of(asks, ledger, kept, spec)
    pool = leases.normalise((*ledger.pool, *returned))
    cursor = ledger.cursor
    seats: list[Seat] = []
    for peer in seated_of(ledger, works, spec):
        before = ledger.seat_of(peer) if peer in kept else None
        work.check(works[peer], before, spec)
        held = before.ranges if before is not None else ()
        n_batches = works[peer].steps * works[peer].batch_scale
        lease, pool, cursor = leases.extended(held, pool, cursor, n_batches - leases.count(held))
        seats.append(Seat(peer, lease, works[peer].batch_scale))
    return tuple(sorted(seats, key=lambda seat: seat.peer)), pool


def seated_of(ledger: Ledger, peers: Collection[PeerId], spec: RunSpec) -> list[PeerId]:
    """Who of these peers gets a seat, longest in the run first: at most `max_members`."""
    order = sorted(peers, key=lambda peer: (ledger.since.get(peer, ledger.round + 1), peer))
    return order[: spec.membership.max_members]


def works_of(
    asks: work.Works | Collection[PeerId], ledger: Ledger, kept: Collection[PeerId], spec: RunSpec
) -> work.Works:
    """What is asked of whom; of peers alone H steps of one batch, or what a lease that goes on holds."""
    if isinstance(asks, Mapping):
        return asks
    held = {seat.peer: work.of(seat) for seat in ledger.seats if seat.peer in kept}
    return {peer: held.get(peer, Work(spec.work.h)) for peer in asks}


def kept_over(ledger: Ledger, peers: Collection[PeerId], spec: RunSpec) -> set[PeerId]:
    """Whose leases go on over an empty round: of who had a seat and has one again."""
    before = {seat.peer for seat in ledger.seats}
    return {peer for peer in seated_of(ledger, peers, spec) if peer in before}


def voters_for(
    ledger: Ledger,
    signed: Collection[PeerId],
    seats: Sequence[Seat],
    left: Collection[PeerId],
    coordinator: PeerId,
) -> tuple[PeerId, ...]:
    """Voters of the next round: who signed a commitment in this one, longest in the run first, and the coordinator.

    After an empty round they are as before, less who left; where that leaves nobody but the coordinator, the seated.
    """
    members = [peer for peer in (signed or ledger.voters) if peer not in left and peer != coordinator]
    if not members:
        members = [seat.peer for seat in seats]
    members.sort(key=lambda peer: (ledger.since.get(peer, ledger.round + 1), peer))
    return (*members[: VOTERS_MAX - 1], coordinator)


def returned(
    ledger: Ledger, used: Mapping[PeerId, Sequence[Range]], kept: Collection[PeerId] = ()
) -> tuple[Range, ...]:
    """What goes back to the pool: of each old seat all but the batches that counted; of who keeps it nothing."""
    left: list[Range] = []
    for seat in ledger.seats:
        if seat.peer in kept:
            continue
        left += leases.rest(seat.ranges, leases.count(used.get(seat.peer, ())))
    return leases.normalise(left)


def has_ended(ledger: Ledger, spec: RunSpec) -> str:
    """Why the run is over, or an empty string."""
    work = spec.work
    if ledger.ends_after and ledger.round >= ledger.ends_after:
        return "the operator has ended the run" + (f": {ledger.end_reason}" if ledger.end_reason else "")
    if work.end_rounds and ledger.n_committed >= work.end_rounds:
        return f"the run has reached its end of {work.end_rounds} rounds"
    if work.end_tokens and ledger.tokens >= work.end_tokens:
        return f"the run has reached its end of {work.end_tokens} tokens"
    return ""
