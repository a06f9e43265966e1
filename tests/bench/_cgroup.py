"""A control group with a memory limit, for showing that something fits: page cache counts too, and is reclaimed."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from types import TracebackType

ROOT = Path("/sys/fs/cgroup")


class NoCgroup(RuntimeError):
    """This machine or this user can't limit memory by a control group: says why."""


class MemoryGroup:
    """A control group of at most so many bytes, version 1 or 2; it goes with the block, once its processes have."""

    def __init__(self, limit_bytes: int) -> None:
        one, two = ROOT / "memory", ROOT / "cgroup.controllers"
        name = f"barnraise-{uuid.uuid4().hex[:12]}"
        if one.is_dir():
            self._folder, limit, self._peak, self._swap = (
                one / name, "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.memsw.limit_in_bytes",
            )  # fmt: skip
        elif two.exists() and "memory" in two.read_text().split():
            self._folder, limit, self._peak, self._swap = ROOT / name, "memory.max", "memory.peak", "memory.swap.max"
        else:
            raise NoCgroup("no memory controller is mounted at /sys/fs/cgroup")
        try:
            self._folder.mkdir()
            (self._folder / limit).write_text(str(limit_bytes))
        except OSError as error:
            raise NoCgroup(f"{self._folder}: {error.strerror or error} (root is needed)") from error
        swap = self._folder / self._swap
        if swap.exists():  # where there is swap, it would hide what doesn't fit
            swap.write_text("0" if self._swap == "memory.swap.max" else str(limit_bytes))

    def add_me(self) -> None:
        """Put the calling process into the group, with all that it will start."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def procs(self) -> Path:
        """The file that takes a process id."""
        return self._folder / "cgroup.procs"

    @property
    def peak_bytes(self) -> int:
        """The most that was charged to the group so far, page cache included."""
        return int((self._folder / self._peak).read_text())

    def anonymous_bytes(self) -> int:
        """What is charged now and can't be reclaimed by dropping file pages."""
        words = dict(line.split() for line in (self._folder / "memory.stat").read_text().splitlines())
        return int(words.get("total_rss", words.get("anon", "0")))

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.rmdir()
