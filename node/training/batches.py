"""Reads the packed shards that the agent fetched: a leased batch, or the validation sequences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from node.training.schedule import locate
from node.training.shards import TRAIN_FILE, VAL_FILE, DataError, Shards, n_evaluated_sequences
from protos.runspec import RunSpec

Ids = NDArray[np.int64]


class Batches:
    """The training data of a run, by the run's batch numbers. A shard is mapped when it is first read."""

    def __init__(self, spec: RunSpec, data_dir: Path) -> None:
        self._spec = spec
        self._dir = data_dir
        self._shards = Shards.of(spec.data)
        self._train: NDArray[np.unsignedinteger] | None = None

    def amend(self, spec: RunSpec) -> None:
        """Other settings are in force; the data are the same."""
        self._spec = spec

    def batch(self, index: int) -> Ids:
        """(B, L) tokens of the batch with this number, counted on over all passes.

        Raises DataError where the shard has another size, or its pieces here were never fetched.
        """
        _, stored = locate(index, self._spec.n_batches, self._spec.data.seed)
        if self._train is None:
            self._train = self._map(TRAIN_FILE)
        n_sequences = self._spec.batch_sequences
        ids_BL = self._train[stored * n_sequences : (stored + 1) * n_sequences].astype(np.int64)
        if not ids_BL.any(axis=1).all():
            # The agent makes the file at its full size and fills in pieces; no text gives a sequence of zeros.
            raise DataError(f"batch {index} lies in a piece of {TRAIN_FILE} that has not been fetched")
        return ids_BL

    def evaluation(self) -> Iterator[Ids]:
        """(B, L) validation sequences from the first on, as many as a run evaluates; the last batch may be shorter."""
        val = self._map(VAL_FILE)[: n_evaluated_sequences(self._spec)]
        for start in range(0, len(val), self._spec.batch_sequences):
            ids_BL = val[start : start + self._spec.batch_sequences].astype(np.int64)
            if not ids_BL.any(axis=1).all():
                raise DataError(f"{VAL_FILE} has not been fetched whole")
            yield ids_BL

    def _map(self, file: str) -> NDArray[np.unsignedinteger]:
        """(S, L) all sequences of a shard."""
        path, n_bytes = self._dir / file, self._shards.file_bytes(file)
        try:
            if path.stat().st_size != n_bytes:
                raise DataError(f"{path} has {path.stat().st_size} bytes, the run's has {n_bytes}")
            tokens = np.memmap(path, f"<u{self._spec.data.token_bytes}", "r")
        except OSError as error:
            raise DataError(f"{path} can't be mapped: {error.strerror or error}") from error
        return np.asarray(tokens).reshape(-1, self._spec.data.sequence_length)
