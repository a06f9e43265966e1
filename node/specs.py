"""The revisions of the run's settings that a node knows, as envelopes in its folder: an amendment must survive it.

specs/<revision>.bin    envelope of a RunSpec, by the run key
"""

from __future__ import annotations

import re
from pathlib import Path

from coordinator.rounds import policy
from node.files import replace_file, writing
from protos import limits
from protos.messages import PeerId
from protos.orders import OrderError, open_spec
from protos.runspec import RunSpec

_NAME = re.compile(r"[0-9]{1,16}\.bin")


class SpecsFolder:
    """Methods block for the disk."""

    def __init__(self, folder: Path, run: PeerId) -> None:
        self._folder, self._run = folder, run

    def load(self) -> dict[int, RunSpec]:
        """Those that are whole, the run's, and of this version."""
        found: dict[int, RunSpec] = {}
        try:
            paths = sorted(self._folder.iterdir())
        except OSError:
            return found
        for path in paths:
            if not _NAME.fullmatch(path.name) or path.stat().st_size > limits.ORDER_BYTES:
                continue
            try:
                spec = open_spec(path.read_bytes(), self._run)
            except (OSError, OrderError):
                continue
            if not policy.unknown(spec):
                found[spec.revision] = spec
        return found

    def keep(self, envelope: bytes, revision: int) -> None:
        """Raises DiskFull or MachineError."""
        with writing(self._folder, "the run's settings", len(envelope)):
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / f"{revision}.bin", envelope)
