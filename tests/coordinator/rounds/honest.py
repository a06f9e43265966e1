"""An honest round of three: its ledger, evidence and body, and the hashes of its results."""

from __future__ import annotations

from coordinator.rounds import proposing
from tests.coordinator.rounds.cases import SPEC, body_of, evidence_of, seated

LEDGER = seated(3)
EVIDENCE = evidence_of(LEDGER, 3)
BODY = body_of(LEDGER, EVIDENCE)
HASHES = proposing.result_hashes(EVIDENCE, SPEC)
