"""Which texts a data set is made from: a file, a folder, or the interpreter's own standard library."""

from __future__ import annotations

import os
import platform
import sysconfig
from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STDLIB = "stdlib"
SLICE_BYTES = 2**24
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})


class CorpusError(ValueError):
    """A corpus that can't be read: says which and why."""


@dataclass(frozen=True, slots=True)
class Text:
    """One document: its name is its path below the corpus, with slashes, and decides its side of the split."""

    name: str
    path: Path

    def slices(self) -> Iterator[bytes]:
        """The file's bytes, at most `SLICE_BYTES` at a time."""
        with self.path.open("rb") as file:
            yield from iter(lambda: file.read(SLICE_BYTES), b"")

    def is_text(self) -> bool:
        """Whether it is UTF-8 without NUL bytes."""
        decoder = getincrementaldecoder("utf-8")()
        try:
            for part in self.slices():
                if "\0" in decoder.decode(part):
                    return False
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts in a fixed order, and what they are, for people."""

    source: str
    texts: tuple[Text, ...]


def find(source: str) -> Corpus:
    """The corpus at a path, or the standard library for `stdlib`; raises CorpusError."""
    if source == STDLIB:
        return standard_library()
    path = Path(source)
    if path.is_file():
        return Corpus(path.name, (Text(path.name, path),))
    if path.is_dir():
        return _checked(
            Corpus(
                path.resolve().name,
                tuple(_walk(path, suffix="", skip=frozenset({"__pycache__"}))),
            ),
            path,
        )
    raise CorpusError(f"{source} is neither a file nor a folder of text")


def standard_library() -> Corpus:
    """The source of the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    name = f"python standard library {platform.python_version()}"
    return _checked(Corpus(name, tuple(_walk(root, suffix=".py", skip=_SKIPPED_FOLDERS))), root)


def _walk(root: Path, *, suffix: str, skip: frozenset[str]) -> list[Text]:
    """Regular files below a folder in the order of their names' bytes; neither hidden ones nor links to folders."""
    texts: list[Text] = []

    def refuse(error: OSError) -> None:
        raise CorpusError(f"{error.filename} can't be read: {error.strerror}") from error

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                texts.append(Text(path.relative_to(root).as_posix(), path))
    return sorted(texts, key=lambda text: os.fsencode(text.name))


def _checked(corpus: Corpus, root: Path) -> Corpus:
    if not corpus.texts:
        raise CorpusError(f"no text files below {root}")
    return corpus
