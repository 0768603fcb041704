"""Tokens to text, piece by piece: a character is never split and an unknown id is no text."""

from collections.abc import Sequence
from typing import Any

LONGEST_CHARACTER = 8
"""Tokens; UTF-8 takes at most four bytes."""
REPLACEMENT = "�"


def decode(tokenizer: Any, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Text of `ids`; ids the tokenizer doesn't have (a padded vocabulary's) give nothing."""
    if not getattr(tokenizer, "is_fast", False):  # those fail on such ids, or make something up
        size = len(tokenizer)
        ids = [i for i in ids if i < size]
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    return text


class IncrementalText:
    """Text of a growing token sequence.

    Tokenizers decode a piece differently by what stands before it, so each new piece is what a decode that
    begins at an already printed token has more than it had. An incomplete character at its end is held back.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._anchor = 0
        self._read = 0
        self._shown = 0
        """Characters of the text from the anchor on that are in `text`."""

    def push(self, ids: Sequence[int]) -> str:
        """Append tokens; returns the text so far, whole characters only."""
        for token in ids:
            self._ids.append(token)
            now = decode(self._tokenizer, self._ids[self._anchor :], self._skip)
            # More tokens than a character can take will not become one any more.
            undecided = len(self._ids) - self._read <= LONGEST_CHARACTER
            whole = now.rstrip(REPLACEMENT) if undecided else now
            if len(whole) > self._shown:
                self.text += whole[self._shown :]
                self._shown = len(whole)
                if whole == now:
                    self._anchor, self._read = self._read, len(self._ids)
                    self._shown = len(decode(self._tokenizer, self._ids[self._anchor :], self._skip))
        return self.text


def find_stop(text: str, stops: Sequence[str], since: int) -> tuple[int, str] | None:
    """Where the earliest stop string ending after `since` begins, and which it is; the longest of those at
    one place."""
    hits = []
    for stop in stops:
        start = text.find(stop, max(0, since - len(stop) + 1))
        if start >= 0:
            hits.append((start, -len(stop), stop))
    if not hits:
        return None
    start, _, stop = min(hits)
    return start, stop


def without_partial_stop(text: str, stops: Sequence[str]) -> str:
    """`text` less an ending that may yet become a stop string."""
    longest = max((len(stop) for stop in stops), default=1)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops if len(stop) > size):
            return text[:-size]
    return text
