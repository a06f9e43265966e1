"""What may be ordered, and by whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.messages import Order, PeerId
from protos.orders import Kind, OrderError, open_order, open_spec, seal_order, seal_spec
from protos.runspec import RunSpec, amendment_faults, changed_keys, tunable_keys
from protos.signing import Identity, Purpose, seal
from protos.wire import encode
from tests.sim.options import sim_spec

RUN = Identity.from_private_bytes(b"r" * 32)
COORDINATOR = Identity.from_private_bytes(b"c" * 32)
STRANGER = Identity.from_private_bytes(b"s" * 32)
NOBODY = PeerId("")
SPEC = sim_spec(n_chunks=1)
NEXT = SPEC.model_copy(update={"revision": 2})


def order(kind: Kind, **changes: Any) -> Order:
    peer = STRANGER.peer if kind is Kind.EVICT else NOBODY
    content = {Kind.AMEND: seal_spec(RUN, NEXT), Kind.ROLLBACK: bytes(32)}.get(kind, b"")
    return replace(Order(RUN.peer, 1, str(kind), peer, 0, content, "why"), **changes)


def opened(raw: bytes) -> Order:
    return open_order(raw, run=RUN.peer, coordinator=COORDINATOR.peer).order


@pytest.mark.parametrize("kind", list(Kind))
def test_the_run_key_may_order_everything(kind: Kind) -> None:
    found = open_order(seal_order(RUN, order(kind)), run=RUN.peer, coordinator=COORDINATOR.peer)
    assert (found.order, found.signer) == (order(kind), RUN.peer)
    assert found.spec == (NEXT if kind is Kind.AMEND else None)


@pytest.mark.parametrize("kind", [Kind.PAUSE, Kind.RESUME, Kind.EVICT])
def test_the_coordinator_may_order_what_can_be_taken_back(kind: Kind) -> None:
    assert opened(seal_order(COORDINATOR, order(kind))) == order(kind)


@pytest.mark.parametrize("kind", [Kind.END, Kind.AMEND, Kind.ROLLBACK])
def test_the_rest_needs_the_run_key(kind: Kind) -> None:
    with pytest.raises(OrderError, match="run key alone"):
        seal_order(COORDINATOR, order(kind))
    forged = seal(COORDINATOR, Purpose.ORDER, RUN.peer, encode(order(kind)))
    with pytest.raises(OrderError, match=f"may not order {kind}"):
        opened(forged)


def test_nobody_else_may_order_anything() -> None:
    with pytest.raises(OrderError, match="may not order pause"):
        opened(seal(STRANGER, Purpose.ORDER, RUN.peer, encode(order(Kind.PAUSE))))


def test_an_order_is_for_its_run_and_purpose() -> None:
    other = order(Kind.PAUSE, run=STRANGER.peer)
    with pytest.raises(OrderError):
        opened(seal(RUN, Purpose.ORDER, STRANGER.peer, encode(other)))
    with pytest.raises(OrderError, match="for run"):
        opened(seal(RUN, Purpose.ORDER, RUN.peer, encode(other)))
    with pytest.raises(OrderError, match="envelope for"):
        opened(seal(RUN, Purpose.VOTE, RUN.peer, encode(order(Kind.PAUSE))))


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        (Kind.PAUSE, {"number": 0}, "numbered from 1"),
        (Kind.PAUSE, {"kind": "dance"}, "no order of this version"),
        (Kind.PAUSE, {"peer": STRANGER.peer}, "names no peer"),
        (Kind.EVICT, {"peer": NOBODY}, "no peer id"),
        (Kind.EVICT, {"round": 3}, "names no round"),
        (Kind.END, {"spec": b"x"}, "carries no RunSpec"),
        (Kind.ROLLBACK, {"spec": b"short"}, "hash of the commit"),
        (Kind.AMEND, {"spec": b"rubbish"}, "the RunSpec"),
        (Kind.AMEND, {"spec": seal_spec(COORDINATOR, NEXT)}, "the RunSpec"),
    ],
)
def test_fields_that_do_not_fit(kind: Kind, changes: dict[str, Any], why: str) -> None:
    wrong = replace(order(kind), **changes)
    with pytest.raises(OrderError, match=why):
        seal_order(RUN, wrong)
    with pytest.raises(OrderError, match=why):
        opened(seal(RUN, Purpose.ORDER, RUN.peer, encode(wrong)))


@given(st.binary(max_size=300))
def test_any_other_bytes_are_no_order(raw: bytes) -> None:
    with pytest.raises(OrderError):
        opened(raw)


# -- amendments --------------------------------------------------------------------------------------------------


def changed(key: str, value: Any) -> RunSpec:
    content = SPEC.model_dump(mode="json")
    section, _, name = key.partition(".")
    if name:
        content[section][name] = value
    else:
        content[section] = value
    return RunSpec.model_validate(content | {"revision": 2})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("inner.lr", 0.5),
        ("inner.decay_start", 40),
        ("outer.momentum", 0.1),
        ("work.h", 2),
        ("work.end_rounds", 9),
        ("rule.name", "median"),
        ("rule.replicas", 2),
        ("deadlines.vote_s", 7.0),
        ("membership.min_contributors", 2),
        ("evaluation.every_rounds", 0),
    ],
)
def test_what_may_change(key: str, value: Any) -> None:
    after = changed(key, value)
    assert key in tunable_keys()
    assert key in changed_keys(SPEC, after)
    assert amendment_faults(SPEC, after) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 9),
        ("name", "other"),
        ("numerics_version", 9),
        ("inner.beta2", 0.5),
        ("inner.optimiser", "sgd"),
        ("codec.name", "fp32"),
        ("work.batch_tokens", 2 * SPEC.work.batch_tokens),
        ("data.root", "a" * 64),
        ("model.layout_digest", "a" * 64),
        ("membership.admission", "invite"),
        ("deadlines.no_progress_s", 1.5),
    ],
)
def test_what_may_not(key: str, value: Any) -> None:
    faults = amendment_faults(SPEC, changed(key, value))
    assert faults == [f"{key} can't change while the run goes on"]
    assert key not in tunable_keys()


def test_revisions_follow_each_other() -> None:
    assert "revision 3 doesn't follow revision 1" in amendment_faults(SPEC, SPEC.model_copy(update={"revision": 3}))
    with pytest.raises(OrderError):
        open_spec(seal_spec(STRANGER, SPEC), RUN.peer)


def test_the_rate_falls_where_a_decay_is_ordered() -> None:
    inner = SPEC.inner.model_copy(update={"warmup_steps": 0, "decay_start": 10, "decay_steps": 4})
    assert [inner.warmed(step) for step in (0, 9, 10, 12, 14, 99)] == [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert SPEC.inner.model_copy(update={"warmup_steps": 4}).warmed(1) == 0.5
