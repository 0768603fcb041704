"""Why a sample ends, token by token."""

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_rl.core.output import final_text
from tokenspeed_rl.core.request import Request
from tokenspeed_rl.core.stop import check_stop
from tokenspeed_rl.core.text import decode
from tokenspeed_rl.sampling_params import SamplingParams

EOS = 1


def run(request: Request, tokens: list[int], tokenizer: Any) -> Request:
    """Draw `tokens` until one of them ends the request."""
    for token in tokens:
        request.record(token, "1")
        request.finish_reason = check_stop(request, tokenizer)
        if request.finish_reason is not None:
            break
    return request


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields).validate()


def test_any_of_several_stop_ids_ends_it(new_request: Callable[..., Request]) -> None:
    """F10: whichever id comes, it is named, and is the last of the output; ids in the prompt end nothing."""
    for token in (EOS, 7):
        done = run(new_request([EOS, 7], stop_ids=frozenset({EOS, 7})), [5, token, 5], None)
        assert done.finish_reason == {"type": "stop", "matched": token}
        assert done.output_ids == [5, token]


def test_length_ends_it(new_request: Callable[..., Request]) -> None:
    """F11: at `max_new_tokens`, with the length; a stop id that comes as the last token is still named."""
    full = run(new_request([3], max_new_tokens=2), [5, 6, 7], None)
    assert full.finish_reason == {"type": "length", "length": 2}
    last = run(new_request([3], max_new_tokens=2, stop_ids=frozenset({EOS})), [5, EOS], None)
    assert last.finish_reason == {"type": "stop", "matched": EOS}


@given(data=st.data())
def test_stop_strings_end_it_with_the_token_that_completes_one(
    new_request: Callable[..., Request], tokenizer: Any, data: st.DataObject
) -> None:
    """F10: across token borders, characters of several tokens included; the text ends before the stop string,
    the ids with the token that completed it."""
    string = data.draw(st.text(st.sampled_from("ab 漢😁"), min_size=1, max_size=12))
    start = data.draw(st.integers(0, len(string) - 1))
    stop = string[start : data.draw(st.integers(start + 1, len(string)))]
    ids = tokenizer(string)["input_ids"]
    first = next(n for n in range(1, len(ids) + 1) if stop in decode(tokenizer, ids[:n], True))
    done = run(new_request([3], params=params(stop=stop), max_new_tokens=99), ids, tokenizer)
    assert done.finish_reason == {"type": "stop", "matched": stop}
    assert done.output_ids == ids[:first]
    assert final_text(done, tokenizer) == string[: string.index(stop)]
    done.params = params(stop=stop, no_stop_trim=True)
    assert final_text(done, tokenizer) == decode(tokenizer, ids[:first], True)


def test_overlapping_stop_strings(new_request: Callable[..., Request], tokenizer: Any) -> None:
    """F10: the one that begins first counts, of those the longest; one inside another ends it earlier."""

    def matched(string: str, *stops: str) -> tuple[object, str]:
        ids = tokenizer(string)["input_ids"]
        done = run(new_request([3], params=params(stop=list(stops)), max_new_tokens=99), ids, tokenizer)
        assert done.finish_reason is not None
        return done.finish_reason["matched"], final_text(done, tokenizer)

    assert matched("xabcd", "abcd", "bc") == ("bc", "xa")
    assert matched("xthe", "xthe", "the", "he") == ("xthe", "")  # "the" is one token: all three end there
    assert matched("xthe", "xt", "xth") == ("xth", "")
    assert matched("aaab", "aab") == ("aab", "a")


def test_a_stop_id_goes_before_a_stop_string(new_request: Callable[..., Request], tokenizer: Any) -> None:
    """F10: where one token does both, the id is named; the text is without that token."""
    [a, b] = tokenizer("ab")["input_ids"]
    done = run(new_request([3], params=params(stop="ab"), stop_ids=frozenset({b})), [a, b], tokenizer)
    assert done.finish_reason == {"type": "stop", "matched": b}
    assert final_text(done, tokenizer) == "a"


def test_stop_strings_wait_for_the_least_length(new_request: Callable[..., Request], tokenizer: Any) -> None:
    """F10: one completed before `min_new_tokens` doesn't end the request, then or later; the next does."""
    ids = tokenizer("ab ab ab")["input_ids"]
    for least, length, text in ((2, 2, ""), (3, 5, "ab "), (4, 5, "ab "), (6, 8, "ab ab ")):
        asked = params(stop="ab", min_new_tokens=least)
        done = run(new_request([3], params=asked, max_new_tokens=99), ids, tokenizer)
        assert (done.output_ids, final_text(done, tokenizer)) == (ids[:length], text)


def test_special_tokens_are_no_text_to_match(new_request: Callable[..., Request], tokenizer: Any) -> None:
    """F10: skipped special tokens stand in no stop string's way; shown, they can be one."""
    [a, b] = tokenizer("ab")["input_ids"]
    skipped = run(new_request([3], params=params(stop="ab")), [a, 0, b], tokenizer)
    assert skipped.finish_reason == {"type": "stop", "matched": "ab"}
    shown = run(new_request([3], params=params(stop="<s>", skip_special_tokens=False)), [a, 0, b], tokenizer)
    assert shown.output_ids == [a, 0] and final_text(shown, tokenizer) == "a"
