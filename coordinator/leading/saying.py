"""What a leader says where somebody else had a hand in the words: on one line, and not over and over."""

from __future__ import annotations

from collections.abc import Hashable

OTHERS_MOST = 8
"""Refusals of one round that are said of those whose word doesn't count in it."""


def one_line(text: str) -> str:
    """The text with whatever would end its line, or change how it is shown, as an escape: others write into it."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class Sayings:
    """What has been said in the round that runs: each thing once."""

    def __init__(self) -> None:
        self._round = (-1, -1)
        self._said: set[Hashable] = set()
        self._n_others = 0

    def once(self, what: Hashable, round_: tuple[int, int]) -> bool:
        """Whether it is to be said: nobody has, in this epoch and round. `what` is one of few things."""
        if self._round != round_:
            self._round, self._n_others = round_, 0
            self._said.clear()
        if what in self._said:
            return False
        self._said.add(what)
        return True

    def words_of(self, peer: Hashable, round_: tuple[int, int], *, counts: bool) -> bool:
        """Whether what a peer says, a refusal, is to be said; `counts`: it has a seat or a vote in this round.

        Once: it may say so again, in other words, as often as its line lets it.
        """
        if not counts:
            self.once("another round may have begun", round_)
            if self._n_others >= OTHERS_MOST:
                return False
        is_new = self.once(("words", peer), round_)
        self._n_others += is_new and not counts
        return is_new
