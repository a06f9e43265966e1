"""An exchange whose deal changes while rows travel: by hand, and many sides with everything in any order."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation.chunks import deal
from aggregation.exchange import (
    CheckRow,
    CombineChunk,
    Combined,
    CombineFailed,
    DropRow,
    Exchange,
    ExchangeEffect,
    Expired,
    GiveReceipt,
    Inquired,
    Receipted,
    Redealt,
    RefuseRow,
    ReportMissing,
    ReportResults,
    RowArrived,
    RowBroken,
    RowChecked,
    SendRows,
    Stalled,
    StopRows,
    deal_seed,
    reducers_of,
    set_hash,
)
from tests.aggregation.test_exchange import PLAN, ROW_BYTES, arrive, exchange, roots_of

Dealt = tuple[tuple[str, ...], ...]


def redealt(number: int, senders: list[str], reducers: Dealt, set_number: int = 0) -> Redealt:
    return Redealt(number, set_number, {sender: float(len(sender)) for sender in senders}, reducers)


# -- who reduces ------------------------------------------------------------------------------------------------------

LINES = (("a", "b", "c", "d"), ("b", "c", "d", "a"))


@pytest.mark.parametrize(
    ("replicas", "enough", "lost", "moved", "dealt"),
    [
        (1, 1, (), (), (("a",), ("b",))),
        (1, 1, ("a",), (), (("b",), ("b",))),
        (1, 1, (), ((1, "b"),), (("a",), ("c",))),
        (1, 1, ("a", "b", "c"), (), (("d",), ("d",))),
        (2, 2, ("b",), (), (("a", "c"), ("c", "d"))),
        (3, 2, ("b",), (), (("a", "c"), ("c", "d"))),
        (4, 2, ("b", "c"), (), (("a", "d"), ("d", "a"))),
        (4, 2, ("a", "b", "c"), ((0, "d"),), ((), ("d",))),
        (2, 1, ("b",), (), (("a",), ("c",))),
    ],
)
def test_who_reduces_each_chunk(
    replicas: int, enough: int, lost: tuple[str, ...], moved: tuple[tuple[int, str], ...], dealt: Dealt
) -> None:
    assert reducers_of(LINES, replicas, enough, lost, moved) == dealt


@given(st.integers(1, 6), st.integers(1, 4), st.data())
@settings(max_examples=60, deadline=None)
def test_nobody_loses_a_chunk_but_who_is_out(n: int, replicas: int, data: st.DataObject) -> None:
    names = [f"m{number}" for number in range(n)]
    lines = deal(bytes(32), 5, names, [0.0] * n)
    enough = data.draw(st.integers(1, replicas))
    lost: set[str] = set()
    moved: set[tuple[int, str]] = set()
    before = reducers_of(lines, replicas, enough)
    for _ in range(4):
        lost |= set(data.draw(st.lists(st.sampled_from(names), max_size=2)))
        moved |= set(data.draw(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(names)), max_size=2)))
        after = reducers_of(lines, replicas, enough, lost, moved)
        for chunk in range(5):
            out = {peer for peer in names if peer in lost or (chunk, peer) in moved}
            assert set(before[chunk]) - out <= set(after[chunk])
            assert not out & set(after[chunk])
            assert len(after[chunk]) >= min(enough, n - len(out))
        before = after


# -- one side ---------------------------------------------------------------------------------------------------------


def test_a_sender_offers_moved_chunks_to_their_new_reducers_and_stops_at_the_old() -> None:
    one = exchange("a", ["a", "b"], [("b", "c"), ("c", "b"), ("b", "c")])
    one.begin()
    one.handle(Receipted("b", (0,)))
    assert one.handle(redealt(1, ["a", "b"], (("c",), ("c",), ("b",)))) == [SendRows("c", (0,))]
    assert one.handle(redealt(2, ["a", "b"], (("c",), ("c",), ("c",)))) == [StopRows("b", (2,)), SendRows("c", (2,))]
    assert one.unreceipted() == {"c": (1, 0, 2)}
    assert not one.is_receipted()
    one.handle(Receipted("c", (0, 1, 2)))
    assert one.is_receipted()


def test_who_is_out_stops_sending_and_knows_whether_all_its_rows_were_there() -> None:
    one = exchange("a", ["a", "b"], [("b",), ("c",)])
    one.begin()
    one.handle(Receipted("b", (0,)))
    assert one.handle(redealt(1, ["b"], (("b",), ("c",)), 1)) == [StopRows("c", (1,))]
    assert one.unreceipted() == {}
    assert not one.is_receipted()
    one.handle(Receipted("c", (1,)))
    assert one.is_receipted()


def test_an_old_word_or_the_same_again_changes_nothing() -> None:
    one = exchange("a", ["a", "b"], [("b", "c")])
    one.begin()
    assert one.handle(redealt(2, ["a", "b"], (("c",),))) == [StopRows("b", (0,)), SendRows("c", (0,))]
    for number in (1, 2, 0):
        assert one.handle(redealt(number, ["b"], (("b",),), number)) == []
    assert one.unreceipted() == {"c": (0,)}


def test_a_redeal_instead_of_the_beginning_sends_to_who_reduces_now() -> None:
    one = exchange("a", ["a", "b"], [("b", "c")])
    assert one.handle(redealt(1, ["a", "b"], (("c",),))) == [SendRows("c", (0,))]


def test_what_was_combined_of_a_larger_set_is_combined_again_and_not_reported() -> None:
    one = exchange("r", ["a", "b", "c"], [("r",), ("r",)])
    for sender in ("a", "b", "c"):
        arrive(one, sender, 0)
    arrive(one, "a", 1)
    arrive(one, "b", 1)
    one.handle(Combined(0, b"three", 1.0))
    assert one.handle(redealt(1, ["a", "b"], (("r",), ("r",)), 1)) == [
        DropRow("c", 0),
        CombineChunk(0, ("a", "b"), (1.0, 1.0), 1),
        CombineChunk(1, ("a", "b"), (1.0, 1.0), 1),
    ]
    assert one.handle(Combined(0, b"three again", 1.0, 0)) == []
    assert one.handle(CombineFailed(1, "of the old set", 0)) == []
    assert one.handle(Combined(1, b"one", 1.0, 1)) == []
    name = set_hash(PLAN, 1, roots_of(["a", "b"]))
    done = one.handle(Combined(0, b"zero", 1.0, 1))
    assert done == [ReportResults(name, (Combined(0, b"zero", 1.0, 1), Combined(1, b"one", 1.0, 1)))]
    assert one.report_again() == done


def test_a_row_of_who_is_out_is_dropped_wherever_it_is() -> None:
    one = exchange("r", ["a", "b"], [("r",), ("r",), ("r",)])
    assert one.admit("b", 0, ROW_BYTES[0]) == ""
    assert one.admit("b", 1, ROW_BYTES[1]) == ""
    one.handle(RowArrived("b", 1))
    arrive(one, "b", 2)
    effects = one.handle(redealt(1, ["a"], (("r",), ("r",), ("r",)), 1))
    assert effects == [DropRow("b", 0), DropRow("b", 1), DropRow("b", 2)]
    for event in (RowArrived("b", 0), RowBroken("b", 0), RowChecked("b", 1, ""), RowChecked("b", 1, "wrong")):
        assert one.handle(event) == []
    assert "not in the included set" in one.admit("b", 0, ROW_BYTES[0])
    assert arrive(one, "a", 2) == [GiveReceipt("a", 2), CombineChunk(2, ("a",), (1.0,), 1)]


def test_who_gains_a_chunk_reports_again_and_who_loses_one_without_it() -> None:
    one = exchange("r", ["a"], [("r",), ("x",)])
    arrive(one, "a", 0)
    assert len(one.handle(Combined(0, b"zero", 1.0))) == 1
    assert one.handle(redealt(1, ["a"], (("r",), ("r",)))) == []
    assert one.lacks() == ((1, "a"),)
    arrive(one, "a", 1)
    (report,) = one.handle(Combined(1, b"one", 1.0))
    assert isinstance(report, ReportResults)
    assert [item.chunk for item in report.results] == [0, 1]
    dropped, again = one.handle(redealt(2, ["a"], (("x",), ("r",))))
    assert dropped == DropRow("a", 0)
    assert isinstance(again, ReportResults)
    assert [item.chunk for item in again.results] == [1]
    assert again.set_hash == report.set_hash
    assert one.handle(redealt(3, ["a"], (("y",), ("r",)))) == []  # nothing that is its own has changed


def test_who_reduces_nothing_any_more_reports_nothing() -> None:
    one = exchange("r", ["a"], [("r",)])
    assert one.handle(redealt(1, ["a"], (("x",),))) == []
    assert one.handle(Expired()) == []
    assert one.report_again() == []


def test_an_inquiry_is_answered_at_once_and_again() -> None:
    one = exchange("r", ["a", "b"], [("r",), ("r",)])
    arrive(one, "a", 0)
    arrive(one, "a", 1)
    assert one.handle(Inquired(("a",))) == [ReportMissing((), ("a",))]
    assert one.handle(Inquired(("b", "z"))) == [ReportMissing(((0, "b"), (1, "b")), ("b", "z"))]
    assert one.handle(Inquired(("a", "b"))) == [ReportMissing(((0, "b"), (1, "b")), ("a", "b"))]


def test_who_lacks_rows_of_who_is_gone_says_so_when_it_lacks_no_others() -> None:
    one = exchange("r", ["a", "b", "c"], [("r",), ("r",)])
    arrive(one, "a", 0)
    assert one.handle(Inquired(("a",))) == []
    arrive(one, "b", 0)
    arrive(one, "b", 1)
    assert one.handle(Inquired(("a", "b"))) == []  # another is gone: the newest question is the one to answer
    assert not any(isinstance(effect, ReportMissing) for effect in arrive(one, "c", 0))
    assert arrive(one, "c", 1)[-1] == ReportMissing(((1, "a"),), ("a", "b"))


def test_who_lacks_others_rows_too_answers_once_those_of_who_is_gone_have_come() -> None:
    one = exchange("r", ["a", "b"], [("r",), ("r",)])
    arrive(one, "a", 0)
    assert one.handle(Inquired(("a",))) == []
    assert arrive(one, "a", 1)[-1] == ReportMissing((), ("a",))


def test_an_inquiry_is_forgotten_with_its_set() -> None:
    one = exchange("r", ["a", "b", "c"], [("r",)])
    assert one.handle(Inquired(("a",))) == []
    one.handle(redealt(1, ["b", "c"], (("r",),)))
    assert not any(isinstance(effect, ReportMissing) for effect in arrive(one, "b", 0) + arrive(one, "c", 0))


def test_an_answer_waits_for_a_row_that_is_being_checked() -> None:
    for fault, lacks in (("", ()), ("wrong", ((0, "a"),))):
        one = exchange("r", ["a", "b"], [("r",), ("x",)])
        arrive(one, "b", 0)
        assert one.admit("a", 0, ROW_BYTES[0]) == ""
        one.handle(RowArrived("a", 0))
        assert one.handle(Inquired(("a",))) == []
        assert one.handle(RowChecked("a", 0, fault))[-1] == ReportMissing(lacks, ("a",))


def test_a_row_that_is_on_its_way_is_not_there() -> None:
    one = exchange("r", ["a", "b"], [("r",)])
    arrive(one, "b", 0)
    assert one.admit("a", 0, ROW_BYTES[0]) == ""
    assert one.handle(Inquired(("a",))) == [ReportMissing(((0, "a"),), ("a",))]


def test_who_has_stalled_is_named_once_and_anew_after_a_redeal() -> None:
    one = exchange("r", ["a", "b"], [("r",)])
    assert one.handle(Stalled(("a",))) == [ReportMissing(((0, "a"),))]
    assert one.handle(Stalled(("a",))) == []
    assert one.handle(Stalled(("a", "b"))) == [ReportMissing(((0, "b"),))]
    assert one.report_again() == [ReportMissing(((0, "a"), (0, "b")))]
    one.handle(redealt(1, ["a"], (("r",),), 1))
    assert one.report_again() == []
    assert one.handle(Stalled(("a", "b"))) == [ReportMissing(((0, "a"),))]


# -- all sides --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Side:
    exchange: Exchange
    pending: dict[tuple[str, int], None] = field(default_factory=dict)
    began: bool = False
    reports: list[ReportResults] = field(default_factory=list)
    held: set[tuple[str, int]] = field(default_factory=set)


class World:
    """All members of one attempt and a leader that deals again at random; a bag from which anything comes next.

    What is told may come doubled and out of order; a dead member does nothing any more.
    """

    def __init__(self, n: int, n_chunks: int, replicas: int, seed: int) -> None:
        self.rng = Random(seed)
        self.names = [f"m{number}" for number in range(n)]
        self.lines = deal(deal_seed(PLAN, roots_of(self.names)), n_chunks, self.names, [0.0] * n)
        self.replicas, self.enough = replicas, self.rng.randint(1, replicas)
        self.sides = {me: Side(exchange(me, self.names, list(self.lines), replicas)) for me in self.names}
        self.sets = {0: tuple(self.names)}  # by number
        self.last: Redealt | None = None
        self.lost: set[str] = set()
        self.moved: set[tuple[int, str]] = set()
        self.dead: set[str] = set()
        self.bag: list[tuple[str, object]] = [(me, "begin") for me in self.names]

    def deal_again(self) -> None:
        """Someone dies, or a chunk is taken away, or a sender is put out; nothing that leaves a chunk to nobody."""
        last = self.last or redealt(0, self.names, reducers_of(self.lines, self.replicas, self.enough))
        senders, lost, moved, dead = list(last.weights), set(self.lost), set(self.moved), set(self.dead)
        kind, who = self.rng.choice(["dies", "moves", "out"]), self.rng.choice(self.names)
        if kind == "moves":
            moved.add((self.rng.randrange(len(self.lines)), who))
        elif who in senders and len(senders) > 1:
            senders.remove(who)
            if kind == "dies":
                dead.add(who)
                lost.add(who)
        reducers = reducers_of(self.lines, self.replicas, self.enough, lost, moved)
        if not all(reducers) or dead >= set(senders):
            return
        self.lost, self.moved, self.dead = lost, moved, dead
        number = last.number + 1
        set_number = number if len(senders) < len(last.weights) else last.set_number
        self.sets[set_number] = tuple(senders)
        self.last = redealt(number, senders, reducers, set_number)
        for me in self.names:
            self.bag += [(me, self.last)] * self.rng.randint(1, 2)

    def run(self, n_redeals: int) -> None:
        for _ in range(50_000):
            if n_redeals and self.rng.random() < 0.05:
                self.deal_again()
                n_redeals -= 1
            if not self.bag:
                if not n_redeals:
                    return
                continue
            position = self.rng.randrange(len(self.bag))
            self.bag[position], self.bag[-1] = self.bag[-1], self.bag[position]
            me, what = self.bag.pop()
            if me not in self.dead:
                self.happen(me, what)
        raise AssertionError("the exchange does not come to rest")

    def happen(self, me: str, what: object) -> None:
        side = self.sides[me]
        match what:
            case "begin":
                side.began = True
                self.carry_out(me, side.exchange.begin())
            case Redealt() if not side.began:
                self.bag.append((me, what))  # the session keeps it until the deal is there
            case ("row", str(sender), int(chunk)):
                if (sender, chunk) in side.held:
                    self.bag.append((sender, Receipted(me, (chunk,))))
                elif not side.exchange.admit(sender, chunk, ROW_BYTES[chunk % 3]):
                    event = RowBroken if self.rng.random() < 0.2 else RowArrived
                    self.bag.append((me, event(sender, chunk)))
            case ("send", str(reducer), int(chunk)):
                if (reducer, chunk) in side.pending and reducer not in self.dead:
                    self.bag += [(reducer, ("row", me, chunk)), (me, what)]
            case Receipted(reducer, (chunk,)):
                side.pending.pop((reducer, chunk), None)
                self.carry_out(me, side.exchange.handle(what))
            case _:
                self.carry_out(me, side.exchange.handle(what))  # type: ignore[arg-type]

    def carry_out(self, me: str, effects: list[ExchangeEffect]) -> None:
        side = self.sides[me]
        for effect in effects:
            match effect:
                case SendRows(reducer, chunks):
                    for chunk in chunks:
                        assert (reducer, chunk) not in side.pending, "offered twice"
                        side.pending[(reducer, chunk)] = None
                        self.bag.append((me, ("send", reducer, chunk)))
                case StopRows(reducer, chunks):
                    for chunk in chunks:
                        side.pending.pop((reducer, chunk), None)
                case CheckRow(sender, chunk):
                    self.bag.append((me, RowChecked(sender, chunk, "wrong" if self.rng.random() < 0.1 else "")))
                case GiveReceipt(sender, chunk):
                    assert (sender, chunk) not in side.held, "counted twice"
                    side.held.add((sender, chunk))
                    self.bag.append((sender, Receipted(me, (chunk,))))
                case DropRow(sender, chunk):
                    side.held.discard((sender, chunk))
                case CombineChunk(chunk, senders, _, set_number):
                    assert senders == self.sets[set_number], "a set that was never dealt"
                    assert all((sender, chunk) in side.held for sender in senders), "a row that isn't there"
                    hash_ = repr((chunk, senders)).encode()
                    self.bag.append((me, Combined(chunk, hash_, 1.0, set_number)))
                case ReportResults():
                    side.reports.append(effect)
                case RefuseRow() | ReportMissing():
                    pass


@given(
    st.sampled_from([1, 2, 3, 7]), st.integers(1, 8), st.integers(1, 3), st.integers(0, 2**32), st.integers(0, 6)
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_whatever_changes_all_end_with_results_of_the_last_set_on_all_chunks(
    n: int, n_chunks: int, replicas: int, seed: int, n_redeals: int
) -> None:
    world = World(n, n_chunks, replicas, seed)
    world.run(n_redeals)
    last = world.last
    senders = sorted(last.weights) if last else world.names
    reducers = last.reducers if last else tuple(line[:replicas] for line in world.lines)
    name = set_hash(PLAN, last.set_number if last else 0, roots_of(senders))
    for me, side in world.sides.items():
        if me in world.dead:
            continue
        mine = [chunk for chunk, peers in enumerate(reducers) if me in peers]
        assert side.exchange.lacks() == ()
        assert not side.pending
        if not mine:
            continue
        report = side.reports[-1]
        assert report.set_hash == name
        assert [item.chunk for item in report.results] == mine
        for item in report.results:
            assert item.hash == repr((item.chunk, tuple(senders))).encode()
        assert side.exchange.report_again() == [report]
        assert len({(each.set_hash, each.results) for each in side.reports}) == len(side.reports), "said twice"
