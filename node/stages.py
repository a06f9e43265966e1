"""What the data path's stages have cost: bytes, seconds of work, and bytes copied, each measured where it happens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from threading import Lock

NAMES = ("encode", "hash", "send", "receive", "check", "combine", "serve", "fetch", "decode")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage's sums. Seconds are of work or of waiting in this stage, and those of several threads add up."""

    n_bytes: int = 0
    seconds: float = 0.0
    copied_bytes: int = 0

    @property
    def copies(self) -> float:
        """How often a byte was copied in this stage by code of ours: gRPC's and the kernel's copies come on top."""
        return self.copied_bytes / self.n_bytes if self.n_bytes else 0.0


@dataclass(slots=True)
class Stages:
    """The sums of all stages. May be added to from any thread."""

    _sums: dict[str, Stage] = field(default_factory=lambda: dict.fromkeys(NAMES, Stage()))
    _lock: Lock = field(default_factory=Lock)

    def add(self, name: str, n_bytes: int, seconds: float = 0.0, *, copied_bytes: int = 0) -> None:
        """Count some work of a stage. Raises KeyError for a stage that there is not."""
        with self._lock:
            old = self._sums[name]
            self._sums[name] = Stage(old.n_bytes + n_bytes, old.seconds + seconds, old.copied_bytes + copied_bytes)

    def timed(self, name: str, n_bytes: int, *, copied_bytes: int = 0) -> _Timed:
        """Count the block as work of a stage, if it succeeds."""
        return _Timed(self, name, n_bytes, copied_bytes)

    def sums(self) -> dict[str, Stage]:
        """The sums so far, stage by stage in the order of the path."""
        with self._lock:
            return dict(self._sums)

    def since(self, before: dict[str, Stage]) -> dict[str, Stage]:
        """What was added to earlier sums."""
        return {
            name: Stage(
                now.n_bytes - before[name].n_bytes,
                now.seconds - before[name].seconds,
                now.copied_bytes - before[name].copied_bytes,
            )
            for name, now in self.sums().items()
        }


class _Timed:
    """`Stages.timed`; a class, for a generator takes several times as long, and each message enters some."""

    __slots__ = ("_began", "_copied_bytes", "_n_bytes", "_name", "_stages")

    def __init__(self, stages: Stages, name: str, n_bytes: int, copied_bytes: int) -> None:
        self._stages, self._name, self._n_bytes, self._copied_bytes = stages, name, n_bytes, copied_bytes

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            seconds = time.perf_counter() - self._began
            self._stages.add(self._name, self._n_bytes, seconds, copied_bytes=self._copied_bytes)
