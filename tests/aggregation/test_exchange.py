"""One member's side of an exchange, and several sides joined by a network that breaks, doubles and reorders rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation.chunks import deal
from aggregation.exchange import (
    LACKS_MOST,
    CheckRow,
    CombineChunk,
    Combined,
    CombineFailed,
    Exchange,
    ExchangeEffect,
    Expired,
    GiveReceipt,
    Receipted,
    RefuseRow,
    ReportMissing,
    ReportResults,
    RowArrived,
    RowBroken,
    RowChecked,
    SendRows,
    Unable,
    deal_seed,
    set_hash,
)

PLAN = bytes([9]) * 32
ROW_BYTES = [100, 100, 60]


def roots_of(senders: list[str]) -> dict[str, bytes]:
    return {sender: sender.encode().ljust(32, b".") for sender in senders}


def exchange(me: str, senders: list[str], line: list[tuple[str, ...]], replicas: int = 1) -> Exchange:
    weights = {sender: float(number + 1) for number, sender in enumerate(senders)}
    row_bytes = [ROW_BYTES[chunk % 3] for chunk in range(len(line))]
    return Exchange(me, PLAN, 0, roots_of(senders), weights, line, row_bytes, replicas)


def arrive(one: Exchange, sender: str, chunk: int, fault: str = "") -> list[ExchangeEffect]:
    """A row comes whole and is checked."""
    assert one.admit(sender, chunk, ROW_BYTES[chunk % 3]) == ""
    assert one.handle(RowArrived(sender, chunk)) == [CheckRow(sender, chunk)]
    return one.handle(RowChecked(sender, chunk, fault))


# -- one side --------------------------------------------------------------------------------------------------------


def test_a_sender_offers_each_chunk_to_its_reducer() -> None:
    one = exchange("a", ["a", "b"], [("b", "a"), ("a", "b"), ("b", "a")])
    assert one.begin() == [SendRows("a", (1,)), SendRows("b", (0, 2))]
    assert one.unreceipted() == {"a": (1,), "b": (0, 2)}
    assert one.handle(Receipted("b", (0,))) == []
    assert one.handle(Receipted("b", (0, 2, 7))) == []
    assert one.handle(Receipted("nobody", (1,))) == []
    assert one.unreceipted() == {"a": (1,)}


def test_replicas_get_the_same_chunk() -> None:
    one = exchange("a", ["a"], [("b", "c", "d"), ("c", "d", "b")], replicas=2)
    assert one.begin() == [SendRows("b", (0,)), SendRows("c", (0, 1)), SendRows("d", (1,))]


def test_who_is_not_included_sends_nothing() -> None:
    assert exchange("c", ["a", "b"], [("a",), ("b",), ("c",)]).begin() == []


def test_a_chunk_is_combined_when_all_its_rows_are_held() -> None:
    one = exchange("r", ["a", "b"], [("r",), ("x",), ("r",)])
    assert arrive(one, "b", 0) == [GiveReceipt("b", 0)]
    assert arrive(one, "a", 0) == [GiveReceipt("a", 0), CombineChunk(0, ("a", "b"), (1.0, 2.0))]
    assert one.handle(Combined(0, b"zero", 1.0)) == []
    arrive(one, "a", 2)
    assert arrive(one, "b", 2)[1] == CombineChunk(2, ("a", "b"), (1.0, 2.0))
    done = one.handle(Combined(2, b"two", 2.0))
    assert done == [
        ReportResults(set_hash(PLAN, 0, roots_of(["a", "b"])), (Combined(0, b"zero", 1.0), Combined(2, b"two", 2.0)))
    ]
    assert one.report_again() == done
    assert one.handle(Expired()) == []


@pytest.mark.parametrize(
    ("sender", "chunk", "n_bytes", "why"),
    [
        ("z", 0, 100, "not in the included set"),
        ("a", 1, 100, "not dealt to this reducer"),
        ("a", 99, 100, "not dealt to this reducer"),
        ("a", -1, 100, "not dealt to this reducer"),
        ("a", 0, 99, "has 100 bytes, not 99"),
        ("a", 0, 2**40, "has 100 bytes, not 1099511627776"),
    ],
)
def test_what_is_not_let_in(sender: str, chunk: int, n_bytes: int, why: str) -> None:
    one = exchange("r", ["a", "b"], [("r",), ("x",), ("r",)])
    assert why in one.admit(sender, chunk, n_bytes)
    assert one.handle(RowArrived(sender, chunk)) == []
    assert one.lacks() == ((0, "a"), (0, "b"), (2, "a"), (2, "b"))


def test_a_row_comes_once_at_a_time() -> None:
    one = exchange("r", ["a"], [("r",)])
    assert one.admit("a", 0, 100) == ""
    assert one.admit("a", 0, 100) == "already arriving"
    one.handle(RowArrived("a", 0))
    assert one.admit("a", 0, 100) == "already arriving"
    assert not one.holds("a", 0)
    one.handle(RowChecked("a", 0, ""))
    assert one.admit("a", 0, 100) == "duplicate"
    assert one.holds("a", 0)


def test_a_broken_row_may_come_again() -> None:
    one = exchange("r", ["a"], [("r",)])
    assert one.admit("a", 0, 100) == ""
    assert one.handle(RowBroken("a", 0)) == []
    assert one.handle(RowArrived("a", 0)) == []
    assert arrive(one, "a", 0)[0] == GiveReceipt("a", 0)
    assert one.handle(RowBroken("a", 0)) == []
    assert one.holds("a", 0)


def test_a_wrong_row_is_refused_and_named_as_missing() -> None:
    one = exchange("r", ["a", "b"], [("r",)])
    arrive(one, "b", 0)
    assert arrive(one, "a", 0, "another norm") == [RefuseRow("a", 0, "another norm")]
    assert one.handle(Expired()) == [ReportMissing(((0, "a"),))]
    assert one.report_again() == [ReportMissing(((0, "a"),))]
    assert arrive(one, "a", 0)[1] == CombineChunk(0, ("a", "b"), (1.0, 2.0))


def test_late_and_unknown_events_change_nothing() -> None:
    one = exchange("r", ["a"], [("r",)])
    for event in (RowArrived("a", 0), RowChecked("a", 0, ""), Combined(0, b"", 1.0), CombineFailed(0, "?")):
        assert one.handle(event) == []
    arrive(one, "a", 0)
    assert one.handle(RowChecked("a", 0, "too late")) == []
    assert one.handle(Combined(5, b"", 1.0)) == []
    assert len(one.handle(Combined(0, b"first", 1.0))) == 1
    assert one.handle(Combined(0, b"second", 1.0)) == []


def test_who_can_not_combine_says_so() -> None:
    one = exchange("r", ["a"], [("r",)])
    arrive(one, "a", 0)
    assert one.handle(CombineFailed(0, "no memory")) == [ReportMissing((), unable=True)]
    assert one.handle(Expired()) == [ReportMissing((), unable=True)]
    assert one.report_again() == [ReportMissing((), unable=True)]


def test_who_can_not_take_rows_in_blames_no_sender() -> None:
    one = exchange("r", ["a"], [("r",)])
    assert one.admit("a", 0, ROW_BYTES[0]) == ""
    assert one.handle(RowBroken("a", 0)) == []
    assert one.handle(Unable()) == [ReportMissing((), unable=True)]
    assert one.handle(Unable()) == []  # it is said once, however often the sender tries
    assert one.handle(Expired()) == [ReportMissing((), unable=True)]


def test_while_it_combines_nothing_is_missing() -> None:
    one = exchange("r", ["a"], [("r",)])
    arrive(one, "a", 0)
    assert one.handle(Expired()) == []
    assert one.report_again() == []


def test_a_claim_names_every_sender_and_not_too_many_rows() -> None:
    senders = [f"s{number:04d}" for number in range(300)]
    one = exchange("r", senders, [("r",)] * 20)
    (claim,) = one.handle(Expired())
    assert isinstance(claim, ReportMissing)
    assert len(claim.lacks) == len(set(claim.lacks)) == LACKS_MOST < 300 * 20
    assert {sender for _, sender in claim.lacks} == set(senders)


def test_for_people() -> None:
    one = exchange("a", ["a", "b"], [("a",), ("b",)])
    one.begin()
    assert one.waiting_for() == "2 chunks from a, b"
    arrive(one, "a", 0)
    arrive(one, "b", 0)
    assert one.waiting_for() == "receipts from a, b"
    one.handle(Receipted("a", (0,)))
    one.handle(Receipted("b", (1,)))
    assert one.waiting_for() == ""
    many = exchange("a", [f"peer{number:02d}" for number in range(20)], [("a",)])
    assert many.waiting_for().endswith("peer07, and 12 more")


def test_names_of_sets_and_seeds() -> None:
    roots = roots_of(["a", "b"])
    names = {set_hash(PLAN, 0, roots), set_hash(PLAN, 1, roots), set_hash(bytes(32), 0, roots)}
    names |= {set_hash(PLAN, 0, roots_of(["a"])), set_hash(PLAN, 0, roots | {"b": bytes(32)})}
    assert len(names) == 5
    assert deal_seed(PLAN, roots) != deal_seed(PLAN, roots | {"b": bytes(32)})
    assert deal_seed(PLAN, roots) == deal_seed(PLAN, dict(reversed(roots.items())))


# -- all sides -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Side:
    exchange: Exchange
    pending: dict[tuple[str, int], None] = field(default_factory=dict)
    claims: list[ReportMissing] = field(default_factory=list)
    reports: list[ReportResults] = field(default_factory=list)
    combined: dict[int, tuple[str, ...]] = field(default_factory=dict)
    wrong: dict[tuple[str, int], int] = field(default_factory=dict)


@dataclass(slots=True)
class Joined:
    """Exchanges of all members of one attempt; what is on its way is a bag from which anything comes next."""

    sides: dict[str, Side]
    rng: Random
    broken: float
    refused: float
    dead: set[str]
    bag: list[tuple[str, object]] = field(default_factory=list)

    def run(self) -> None:
        for me, side in self.sides.items():
            self.carry_out(me, side.exchange.begin())
        for _ in range(20_000):
            if not self.bag:
                return
            position = self.rng.randrange(len(self.bag))
            self.bag[position], self.bag[-1] = self.bag[-1], self.bag[position]
            me, what = self.bag.pop()
            if me not in self.dead:
                self.happen(me, what)
        raise AssertionError("the exchange does not come to rest")

    def happen(self, me: str, what: object) -> None:
        side = self.sides[me]
        match what:
            case ("row", str(sender), int(chunk)):
                if side.exchange.holds(sender, chunk):
                    self.bag.append((sender, Receipted(me, (chunk,))))
                elif not side.exchange.admit(sender, chunk, ROW_BYTES[chunk % 3]):
                    event = RowBroken if self.rng.random() < self.broken else RowArrived
                    self.carry_out(me, side.exchange.handle(event(sender, chunk)))
            case ("send", str(reducer), int(chunk)):
                if (reducer, chunk) in side.pending:
                    self.bag.append((reducer, ("row", me, chunk)))
                    if reducer not in self.dead:
                        self.bag.append((me, ("send", reducer, chunk)))
            case Receipted(reducer, (chunk,)):
                side.pending.pop((reducer, chunk), None)
                self.carry_out(me, side.exchange.handle(Receipted(reducer, (chunk,))))
            case _:
                self.carry_out(me, side.exchange.handle(what))  # type: ignore[arg-type]

    def carry_out(self, me: str, effects: list[ExchangeEffect]) -> None:
        side = self.sides[me]
        for effect in effects:
            match effect:
                case SendRows(reducer, chunks):
                    for chunk in chunks:
                        side.pending[(reducer, chunk)] = None
                        self.bag.append((me, ("send", reducer, chunk)))
                case CheckRow(sender, chunk):
                    tries = side.wrong.get((sender, chunk), 0)
                    wrong = tries < 2 and self.rng.random() < self.refused
                    side.wrong[(sender, chunk)] = tries + 1
                    self.bag.append((me, RowChecked(sender, chunk, "wrong" if wrong else "")))
                case GiveReceipt(sender, chunk):
                    self.bag.append((sender, Receipted(me, (chunk,))))
                case CombineChunk(chunk, senders):
                    assert chunk not in side.combined, "combined twice"
                    side.combined[chunk] = senders
                    self.bag.append((me, Combined(chunk, b"%d of %d" % (chunk, len(senders)), 1.0)))
                case ReportResults():
                    side.reports.append(effect)
                case ReportMissing():
                    side.claims.append(effect)
                case RefuseRow():
                    pass


def join(n: int, n_chunks: int, replicas: int, seed: int, dead: set[str], broken: float, refused: float) -> Joined:
    names = [f"m{number}" for number in range(n)]
    seed_bytes = deal_seed(PLAN, roots_of(names))
    line = [tuple(peers) for peers in deal(seed_bytes, n_chunks, names, [0.0] * n)]
    sides = {me: Side(exchange(me, names, line, replicas)) for me in names}
    return Joined(sides, Random(seed), broken, refused, dead)


@given(st.sampled_from([1, 2, 3, 7]), st.integers(1, 12), st.integers(1, 3), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_every_chunk_is_combined_once_by_each_of_its_reducers(n: int, n_chunks: int, replicas: int, seed: int) -> None:
    joined = join(n, n_chunks, replicas, seed, set(), broken=0.2, refused=0.2)
    joined.run()
    names = tuple(sorted(joined.sides))
    n_combined = [0] * n_chunks
    for side in joined.sides.values():
        assert side.claims == []
        assert len(side.reports) == (1 if side.combined else 0)
        assert side.pending == {}
        assert side.exchange.unreceipted() == {}
        assert side.exchange.lacks() == ()
        for chunk, senders in side.combined.items():
            assert senders == names
            n_combined[chunk] += 1
        if side.reports:
            assert [item.chunk for item in side.reports[0].results] == sorted(side.combined)
    assert n_combined == [min(replicas, n)] * n_chunks
    assert len({side.reports[0].set_hash for side in joined.sides.values() if side.reports}) == 1


@given(st.sampled_from([2, 3, 7]), st.integers(1, 12), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_who_lacks_a_dead_senders_rows_says_exactly_those(n: int, n_chunks: int, seed: int) -> None:
    joined = join(n, n_chunks, 1, seed, {"m0"}, broken=0.2, refused=0.0)
    joined.run()
    for me, side in joined.sides.items():
        if me in joined.dead:
            continue
        assert side.reports == []
        joined.carry_out(me, side.exchange.handle(Expired()))
        mine = sorted({chunk for chunk, _ in side.exchange.lacks()})
        assert [claim.lacks for claim in side.claims] == ([tuple((chunk, "m0") for chunk in mine)] if mine else [])
        assert all(reducer == "m0" for reducer in side.exchange.unreceipted())
