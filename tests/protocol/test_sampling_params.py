"""SamplingParams: every value is honoured or refused, before anything is queued."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_rl import SamplingParams
from tokenspeed_rl.errors import RequestError

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n", v) for v in (0, -1, 1.0, True, "2", None)],
        *[("max_new_tokens", v) for v in (-1, 2.5, False, "8")],
        *[("min_new_tokens", v) for v in (-1, None, 1.5)],
        *[("temperature", v) for v in (-0.1, NAN, INF, "1", True, None, 1j)],
        *[("top_p", v) for v in (0, 0.0, -1, 1.001, NAN, None)],
        *[("top_k", v) for v in (-2, 1.0, NAN, "all", True)],
        *[("min_p", v) for v in (-0.1, 1.1, NAN, None)],
        *[("frequency_penalty", v) for v in (NAN, INF, "0", None)],
        *[("presence_penalty", v) for v in (NAN, -INF, False)],
        *[("repetition_penalty", v) for v in (0, -1, NAN, INF, None)],
        *[("stop", v) for v in ("", [""], ["a", 3], 3, [None], b"x")],
        *[("stop_token_ids", v) for v in ([-1], [256], [1.0], [True], "12", 5, [None])],
        *[(name, 1) for name in ("ignore_eos", "skip_special_tokens", "no_stop_trim")],
        *[("logit_bias", v) for v in ([1], {256: 1.0}, {-1: 1.0}, {1: NAN}, {1: INF}, {"x": 1.0}, {1: "2"})],
        *[("logit_bias", v) for v in ({1.5: 0.0}, {True: 0.0}, {1: True}, {1: 0.0, "1": 0.0})],
        *[("seed", v) for v in (-1, 2**64, 1.0, "7", True)],
        *[("stream_interval", v) for v in (0, -1, 1.5, None)],
    ],
)
def test_refuses_by_name(name: str, value: Any) -> None:
    """What can't be honoured is refused with its field's name; bools, strings and NaN are no numbers."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value}).validate(vocab_size=256)
    assert name in str(caught.value) and caught.value.fix


def test_defaults_and_edges_are_valid() -> None:
    """The limits belong to the range: greedy, top-k off, scoring only, ids up to the padded vocabulary."""
    assert SamplingParams().validate(vocab_size=1).max_new_tokens is None
    edges: dict[str, Any] = {
        "max_new_tokens": 0,
        "temperature": 0,
        "top_p": 1,
        "top_k": 0,
        "min_p": 1,
        "stop_token_ids": [0, 255],
        "seed": 2**64 - 1,
        "logit_bias": {"0": -math.inf, 255: 1},
    }
    valid = SamplingParams(**edges).validate(vocab_size=256)
    assert (valid.temperature, valid.stop_token_ids, valid.stop) == (0.0, (0, 255), ())
    assert valid.logit_bias == {0: -math.inf, 255: 1.0}


def test_length_limits_are_compared() -> None:
    """min_new_tokens may equal max_new_tokens, not exceed it."""
    SamplingParams(min_new_tokens=3, max_new_tokens=3).validate()
    with pytest.raises(RequestError, match="min_new_tokens"):
        SamplingParams(min_new_tokens=4, max_new_tokens=3).validate()


def test_stop_strings_need_a_tokenizer() -> None:
    """Without one they could never match: refused, not ignored."""
    assert SamplingParams(stop="\n\n").validate().stop == ("\n\n",)
    with pytest.raises(RequestError, match="tokenizer"):
        SamplingParams(stop=["a"]).validate(has_tokenizer=False)


def test_max_tokens_is_an_alias() -> None:
    """`max_tokens` works as keyword, dict key and attribute; with `max_new_tokens` it must agree."""
    assert (
        SamplingParams(max_tokens=7)
        == SamplingParams(max_new_tokens=7)
        == SamplingParams.from_dict({"max_tokens": 7})
    )
    assert SamplingParams(max_new_tokens=7).max_tokens == 7
    assert dataclasses.replace(SamplingParams(max_tokens=7), max_new_tokens=9).max_new_tokens == 9
    with pytest.raises(RequestError, match="alias"):
        SamplingParams(max_tokens=7, max_new_tokens=8)


def test_unknown_names_get_a_hint() -> None:
    """A typo is refused with the name that was meant, in a dict and as a keyword."""
    with pytest.raises(RequestError, match=r"'temprature'.*'temperature'"):
        SamplingParams.from_dict({"temprature": 1.0})
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(max_tokns=3)


def test_coerce() -> None:
    """Requests take SamplingParams, a dict or nothing, and refuse the rest."""
    params = SamplingParams(n=2)
    assert SamplingParams.coerce(params) is params
    assert SamplingParams.coerce({"n": 2}) == params and SamplingParams.coerce(None) == SamplingParams()
    with pytest.raises(RequestError, match="sampling_params"):
        SamplingParams.coerce(["n"])


def test_numpy_numbers_become_python_numbers() -> None:
    """Values out of numpy arrays work, and what leaves is plain int and float."""
    valid = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), seed=np.uint32(3), stop_token_ids=np.array([4, 5])
    ).validate()
    assert [type(v) for v in (valid.n, valid.temperature, valid.seed)] == [int, float, int]
    assert valid.stop_token_ids == (4, 5)


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=2),
    st.lists(st.one_of(st.integers(-2, 300), st.text(max_size=1)), max_size=2),
    st.dictionaries(st.integers(-2, 300), st.floats(), max_size=2),
)


@given(st.dictionaries(st.sampled_from(FIELDS), anything, max_size=3))
def test_any_value_is_honoured_or_refused(values: dict[str, Any]) -> None:
    """No input makes anything but a RequestError; what is valid is normalised for good and stays valid."""
    before = SamplingParams(**values)
    try:
        valid = before.validate(vocab_size=256)
    except RequestError:
        return
    assert valid.validate(vocab_size=256) == valid
    assert before == SamplingParams(**values)
    assert 0 < valid.top_p <= 1 and 0 <= valid.min_p <= 1 and valid.n >= 1 and valid.temperature >= 0
