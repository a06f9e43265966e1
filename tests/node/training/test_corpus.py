from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from node.training import corpus
from node.training.corpus import CorpusError, Text, find


def test_a_file_is_a_corpus_of_one_text(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("words")
    found = find(str(tmp_path / "a.md"))
    assert (found.source, [text.name for text in found.texts]) == ("a.md", ["a.md"])


def test_a_folder_gives_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c.txt", "B.txt", ".hidden", ".git/config", "__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("words")
    (tmp_path / "link").symlink_to(tmp_path / "a", target_is_directory=True)
    found = find(str(tmp_path))
    assert [text.name for text in found.texts] == ["B.txt", "a/b/c.txt", "a/z.txt", "b.txt"]
    assert found.source == tmp_path.name


def test_the_standard_library_comes_without_tests_and_other_packages() -> None:
    names = [text.name for text in find("stdlib").texts]
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert names == sorted(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert all(name.endswith(".py") for name in names)
    assert (Path(sysconfig.get_paths()["stdlib"]) / names[0]).is_file()


def test_what_is_not_there_and_what_is_empty_are_said(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="neither a file nor a folder"):
        find(str(tmp_path / "nothing"))
    with pytest.raises(CorpusError, match="no text files"):
        find(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "is_text"),
    [
        (b"", True),
        (b"words\n", True),
        ("é 漢字".encode(), True),
        (b"\xff\xfe", False),
        (b"a\0b", False),
        (b"ab\xc3", False),
    ],
)
def test_text_is_utf_8_without_nul(tmp_path: Path, content: bytes, is_text: bool) -> None:
    (tmp_path / "file").write_bytes(content)
    assert Text("file", tmp_path / "file").is_text() is is_text


def test_a_character_across_two_slices_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "SLICE_BYTES", 3)
    (tmp_path / "file").write_bytes("ab漢字".encode())
    text = Text("file", tmp_path / "file")
    assert text.is_text()
    assert b"".join(text.slices()) == "ab漢字".encode()
    assert max(map(len, text.slices())) == 3
