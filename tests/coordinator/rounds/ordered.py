"""Orders as a driver hands them to the deciding code: opened, without a signature to check."""

from __future__ import annotations

from typing import Any

from protos.messages import Order, PeerId
from protos.orders import Kind, OpenedOrder
from protos.runspec import RunSpec
from tests.coordinator.rounds.cases import RUN, SPEC


def ordered(
    number: int,
    kind: Kind,
    *,
    peer: PeerId = PeerId(""),  # noqa: B008 - a NewType of str
    round_: int = 0,
    head: bytes = b"",
    spec: RunSpec | None = None,
    reason: str = "",
    run: PeerId = RUN,
) -> OpenedOrder:
    """An order; `head` is what a rollback goes back to, `spec` what an amendment brings."""
    content = b"envelope of a RunSpec" if spec is not None else head
    order = Order(run, number, str(kind), peer, round_, content, reason)
    return OpenedOrder(f"order {number} {kind} {peer} {round_} {reason}".encode(), order, run, spec)


def amended(spec: RunSpec = SPEC, **sections: dict[str, Any]) -> RunSpec:
    """The next revision, with these settings changed: `amended(work={"h": 2})`."""
    content = spec.model_dump(mode="json")
    for section, changes in sections.items():
        content[section] |= changes
    content["revision"] += 1
    return RunSpec.model_validate(content)
