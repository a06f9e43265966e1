"""What the contributor asked of this node and a restart must not forget: that it pauses."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from node.errors import NodeError
from node.files import replace_file

FILE = "paused"


class Wishes:
    """Kept in the data folder, so that a crash or a reboot changes nothing about them."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    @property
    def paused(self) -> bool:
        """Whether the contributor paused the node and has not resumed it."""
        return self._path.exists()

    def pause(self, paused: bool) -> str:
        """Note it; what can't be noted, in words, or nothing."""
        try:
            if paused:
                replace_file(self._path, b"by the contributor\n")
            else:
                self._path.unlink(missing_ok=True)
        except (NodeError, OSError) as error:
            with suppress(OSError):
                self._path.unlink()
            return f"; a restart will forget it ({error})" if paused else f"; {self._path} could not be removed"
        return ""
