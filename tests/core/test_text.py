"""Text of tokens as they come, and stop strings in it."""

from itertools import accumulate, pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse, Metaspace
from tokenizers.models import BPE
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from tokenspeed_rl.core.text import (
    REPLACEMENT,
    IncrementalText,
    decode,
    find_stop,
    without_partial_stop,
)

VOCAB = 320
"""More than the tokenizer has: a padded vocabulary."""
all_ids = st.lists(st.integers(0, VOCAB - 1), max_size=24)
texts = st.text(st.sampled_from("ab é漢字😀😁👩‍🚀\n"), max_size=12)
pieces = st.lists(st.text("ab", min_size=0, max_size=3), max_size=8)
stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def cut(ids: list[int], places: list[int]) -> list[list[int]]:
    """`ids` in pieces, cut at `places`."""
    ends = sorted({place % (len(ids) + 1) for place in places} | {0, len(ids)})
    return [ids[start:end] for start, end in pairwise(ends)]


@settings(max_examples=300)
@given(ids=all_ids, skip=st.booleans(), places=st.lists(st.integers(0, 24), max_size=6))
def test_text_so_far_is_the_full_decode_less_an_unfinished_character(
    tokenizer: Any, ids: list[int], skip: bool, places: list[int]
) -> None:
    """F15: for any ids, whole or broken UTF-8, special and unknown ones among them, in pieces of any size."""
    text, seen = IncrementalText(tokenizer, skip), []
    for piece in cut(ids, places):
        seen += piece
        whole = decode(tokenizer, seen, skip).rstrip(REPLACEMENT)
        assert text.push(piece) == text.text == whole


@given(string=texts, beginning=texts)
def test_no_character_is_ever_split(tokenizer: Any, string: str, beginning: str) -> None:
    """Emoji and CJK whose bytes are spread over tokens come whole, and nothing given is taken back."""
    ids = tokenizer(beginning + string)["input_ids"]
    text = IncrementalText(tokenizer, True)
    shown = [text.push([token]) for token in ids]
    assert all(now.startswith(before) for before, now in pairwise(shown))
    assert all((beginning + string).startswith(now) for now in shown)
    assert not shown or shown[-1] == beginning + string


def test_whole_characters_are_not_held_back(tokenizer: Any) -> None:
    """F10: a token that ends within a character gives what stands before that: it may be a stop string."""
    ids = tokenizer("a 😁漢字")["input_ids"]
    assert [tokenizer.decode([token]) for token in ids[:2]] == ["a", " " + REPLACEMENT]
    text = IncrementalText(tokenizer, True)
    shown = [text.push([token]) for token in ids]
    assert shown[:2] == ["a", "a "]
    assert list(dict.fromkeys(shown)) == ["a", "a ", "a 😁", "a 😁漢", "a 😁漢字"]


@settings(max_examples=50)
@given(ids=st.lists(st.integers(0, 6), max_size=12))
def test_spaces_between_words_survive(ids: list[int]) -> None:
    """Tokenizers that drop the space before a first word drop no other one."""
    vocab = {"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3, "▁": 4, "<s>": 5}
    raw = Tokenizer(BPE(vocab, [], unk_token="<unk>"))
    raw.decoder = Metaspace()
    words = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>")
    text = IncrementalText(words, True)
    for token in ids:
        text.push([token])
    assert text.text == decode(words, ids, True)


def test_unknown_ids_are_no_text(tokenizer: Any) -> None:
    """F15: an id of the padded vocabulary decodes to "", alone, and between the bytes of a character; also
    with a tokenizer that fails on one."""
    assert decode(tokenizer, [310], False) == decode(tokenizer, [], False) == ""
    ids = tokenizer("😁")["input_ids"]
    text = IncrementalText(tokenizer, True)
    assert text.push([310]) == "" and text.push([ids[0], 310, *ids[1:]]) == "😁"
    assert decode(ByT5Tokenizer(), [100, 5000, 101], False) == "ab"


def test_ids_behind_a_gap_are_known() -> None:
    """F15: where ids leave gaps, the last ones are `len(tokenizer)` and above: they are text all the same."""
    raw = Tokenizer(BPE({"a": 0, "b": 300}, []))
    raw.decoder = Fuse()
    sparse = PreTrainedTokenizerFast(tokenizer_object=raw)
    assert len(sparse) == 2 and decode(sparse, [0, 300, 5], True) == "ab"


@settings(max_examples=300)
@given(pieces=pieces, stops=stops)
def test_stop_strings_are_found_as_soon_as_they_are_there(pieces: list[str], stops: tuple[str, ...]) -> None:
    """F10: across any borders; of several, the one that begins first, then the longest. What stood
    there before the last piece was found before."""
    since = 0
    for text in accumulate(pieces):
        found = [
            (start, -len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > since
        ]
        best = min(found, default=None)
        assert find_stop(text, stops, since) == (best and (best[0], best[2]))
        since = len(text)


@settings(max_examples=300)
@given(pieces=pieces, stops=stops)
def test_no_part_of_a_stop_string_is_shown(pieces: list[str], stops: tuple[str, ...]) -> None:
    """F10: what a stream has shown begins the final text, wherever a stop string cuts that; what is held back
    is the one ending that could become one."""
    shown, since = [""], 0
    for text in accumulate(pieces):
        hit = find_stop(text, stops, since)
        if hit is not None:
            assert all(text[: hit[0]].startswith(s) for s in shown)
            return
        now = without_partial_stop(text, stops)
        held = text[len(now) :]
        assert text == now + held and (not held or any(s.startswith(held) for s in stops))
        assert not any(s.startswith(text[at:]) for s in stops for at in range(len(now)))
        shown.append(now)
        since = len(text)
    assert without_partial_stop("ab", ()) == "ab"
