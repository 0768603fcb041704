"""From a request as given to the samples that are queued, or a refusal that says why."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_rl.core.intake import Intake
from tokenspeed_rl.core.request import Request
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.requests import GenerateReqInput
from tokenspeed_rl.sampling_params import SamplingParams

VOCAB, CONTEXT, EOS = 320, 16, (1, 5)


class NoTokens:
    """A tokenizer for which some texts are nothing, and some cannot be encoded."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        text.encode()  # raises on a lone surrogate
        return {"input_ids": [] if text.isspace() else [VOCAB]}


def intake(tokenizer: Any = None, seed: int = 0) -> Intake:
    return Intake.create(
        vocab_size=VOCAB,
        context=CONTEXT,
        eos_ids=EOS,
        tokenizer=tokenizer,
        seed=seed,
        has_experts=True,
        adapters=lambda: ("b", "a"),
    )


def prepare(tokenizer: Any = None, *, capacity: int = 1000, **fields: Any) -> list[Request]:
    return intake(tokenizer).prepare(GenerateReqInput(**fields), capacity=capacity, publish=never)


def never(request: Request) -> None:
    raise AssertionError("nobody is told of a request that isn't running")


ids = list(range(2, 10))
BAD: dict[str, dict[str, Any]] = {
    "no prompt": {},
    "two prompts": {"text": "a", "input_ids": ids},
    "no ids": {"input_ids": []},
    "no prompts": {"input_ids": [[]]},
    "one empty of two": {"input_ids": [ids, []]},
    "empty text": {"text": ""},
    "text without tokens": {"text": " ", "tokenizer": NoTokens()},
    "text that can't be encoded": {"text": "\ud800", "tokenizer": NoTokens()},
    "a tokenizer of another model": {"text": "a", "tokenizer": NoTokens()},
    "text without a tokenizer": {"text": "a"},
    "id past the vocabulary": {"input_ids": [2, VOCAB]},
    "negative id": {"input_ids": [-1]},
    "id that is none": {"input_ids": [2, 2.5]},
    "stop id past the vocabulary": {"input_ids": ids, "sampling_params": {"stop_token_ids": [VOCAB]}},
    "watched id past the vocabulary": {
        "input_ids": ids,
        "return_logprob": True,
        "token_ids_logprob": [VOCAB],
    },
    "biased id past the vocabulary": {"input_ids": ids, "sampling_params": {"logit_bias": {VOCAB: 1.0}}},
    "stop string without a tokenizer": {"input_ids": ids, "sampling_params": {"stop": "a"}},
    "logprobs from past the prompt": {"input_ids": ids, "return_logprob": True, "logprob_start_len": 8},
    "bad sampling value": {"input_ids": ids, "sampling_params": {"top_p": 0.0}},
    "unknown sampling field": {"input_ids": ids, "sampling_params": {"temprature": 1.0}},
    "prompt past the context": {"input_ids": [2] * (CONTEXT + 1)},
    "prompt past the capacity": {"input_ids": ids, "capacity": 7},
    "prompt and output past the capacity": {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 5},
        "capacity": 12,
    },
    "adapter that isn't there": {"input_ids": ids, "lora": "c"},
    "adapter that is no name": {"input_ids": ids, "lora": ["a"]},
    "repeated rid": {"input_ids": [ids, ids], "rid": ["a", "a"]},
    "unknown session": {"input_ids": ids, "session_params": {"id": "s"}},
    "session id that is none": {"input_ids": ids, "session_params": {"id": ["s"]}},
}


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD.keys())
def test_bad_requests_are_refused_whole(fields: dict[str, Any]) -> None:
    """Bad input: the error says what, got and fix, and no sample of the call exists, also where only one
    prompt of many is bad."""
    with pytest.raises(RequestError) as error:
        prepare(**fields)
    assert error.value.what and error.value.fix


LIMITS = [  # prompt, max_new_tokens, capacity, tokens that may come (None: refused)
    (CONTEXT - 1, None, 64, 1),
    (CONTEXT - 1, 0, 64, 0),
    (CONTEXT - 1, 1, 64, 1),
    (CONTEXT - 1, 9, 64, 1),
    (CONTEXT - 1, 10**9, 64, None),
    (CONTEXT - 1, 10**9, 10**10, 1),
    (CONTEXT, None, 64, None),
    (CONTEXT, 0, 64, 0),
    (CONTEXT, 1, 64, None),
    (CONTEXT, 10**9, 10**10, None),
    (CONTEXT + 1, None, 64, None),
    (CONTEXT + 1, 0, 64, None),
    (CONTEXT + 1, 1, 64, None),
    (4, None, 10, 6),
    (4, 6, 10, 6),
    (4, 7, 10, None),
    (9, None, 10, 1),
    (10, None, 10, None),
    (10, 0, 10, 0),
    (11, 0, 10, None),
    (4, None, 64, CONTEXT - 4),
]


@pytest.mark.parametrize(("prompt", "wanted", "capacity", "room"), LIMITS)
def test_room_for_output(prompt: int, wanted: int | None, capacity: int, room: int | None) -> None:
    """F11: up to the context and the capacity, never past them; where not a token fits, and where an explicit
    length exceeds the capacity, the request is refused; scoring needs no room."""
    fields = {"input_ids": [2] * prompt, "sampling_params": {"max_new_tokens": wanted}}
    if room is None:
        with pytest.raises(RequestError, match=str(prompt)):
            prepare(**fields, capacity=capacity)
    else:
        [request] = prepare(**fields, capacity=capacity)
        assert request.max_new_tokens == room


@given(
    prompt=st.integers(1, 40),
    wanted=st.none() | st.integers(0, 40),
    capacity=st.integers(0, 40),
    n=st.integers(1, 3),
)
def test_what_is_accepted_fits(prompt: int, wanted: int | None, capacity: int, n: int) -> None:
    """F11: an accepted request can always run to its end alone, and it isn't an empty success."""
    params = {"max_new_tokens": wanted, "n": n}
    try:
        requests = prepare(input_ids=[2] * prompt, sampling_params=params, capacity=capacity)
    except RequestError:
        assert prompt + (1 if wanted is None else wanted) > capacity or prompt + (wanted != 0) > CONTEXT
        return
    for request in requests:
        assert prompt + request.max_new_tokens <= min(capacity, CONTEXT)
        assert request.max_new_tokens > 0 or wanted == 0


PARAMS = SamplingParams(
    n=3,
    max_new_tokens=7,
    min_new_tokens=1,
    temperature=0.7,
    top_p=0.9,
    top_k=3,
    min_p=0.1,
    frequency_penalty=0.1,
    presence_penalty=0.2,
    repetition_penalty=1.1,
    stop=("x",),
    stop_token_ids=(9,),
    ignore_eos=True,
    skip_special_tokens=False,
    no_stop_trim=True,
    logit_bias={4: 1.0},
    seed=5,
    stream_interval=2,
)
ARRIVES: dict[str, tuple[Any, Callable[[Request], Any], Any]] = {
    # field: what is given, where it must be in each sample, as what
    "text": ("ab the", lambda r: r.tokens[: r.prompt_len], None),
    "input_ids": ([7, 8, 9], lambda r: r.tokens, [7, 8, 9]),
    "sampling_params": (PARAMS, lambda r: r.params, PARAMS),
    "rid": ("mine", lambda r: r.rid, "mine"),
    "return_logprob": (True, lambda r: r.wants.logprob, True),
    "logprob_start_len": (2, lambda r: r.wants.prompt_start, 2),
    "top_logprobs_num": (4, lambda r: r.wants.top, 4),
    "token_ids_logprob": ([5, 6], lambda r: r.wants.token_ids, (5, 6)),
    "logprob_kinds": (["raw", "processed"], lambda r: r.wants.kinds, ("raw", "processed")),
    "return_text_in_logprobs": (True, lambda r: r.wants.text, True),
    "return_sampling_mask": (True, lambda r: r.wants.sampling_mask, True),
    "return_hidden_states": (True, lambda r: r.wants.hidden_states, True),
    "return_routed_experts": (True, lambda r: r.wants.routed_experts, True),
    "priority": (3, lambda r: r.priority, 3),
    "lora": ("a", lambda r: r.lora, "a"),
}
OF_THE_CALL = {"stream"}
"""How results are handed over, whatever the samples are."""
OF_ONE_SAMPLE = {"session_params"}
"""Tested below."""


def test_every_field_reaches_every_sample(tokenizer: Any) -> None:
    """F8: by reflection, so that a new field can't be forgotten: with n > 1 each sample has all that was
    asked, or it is refused; every field of SamplingParams differs from its default here."""
    names = {field.name for field in dataclasses.fields(GenerateReqInput)}
    assert names == set(ARRIVES) | OF_THE_CALL | OF_ONE_SAMPLE
    for field in dataclasses.fields(SamplingParams):
        assert getattr(PARAMS, field.name) != field.default, f"{field.name} proves nothing at its default"

    given = {name: value for name, (value, _, _) in ARRIVES.items() if name != "text"}
    samples = prepare(tokenizer, **given)
    assert [sample.index for sample in samples] == [0, 1, 2]
    for sample in samples:
        assert sample.finish_reason is None and sample.output_len == 0
        for name in given:
            _, get, expected = ARRIVES[name]
            assert get(sample) == expected, name
        assert (sample.max_new_tokens, sample.stop_ids) == (7, {9})

    text, get, _ = ARRIVES["text"]
    for sample in prepare(tokenizer, text=text, sampling_params={"n": 2}):
        assert get(sample) == tokenizer(text)["input_ids"]


def test_prompts_come_before_samples_and_share_nothing() -> None:
    """Results are prompt-major, samples adjacent; one sample's tokens, spans and logprobs are its own."""
    requests = prepare(input_ids=[[2, 3], [4]], sampling_params=[{"n": 2}, {"n": 1}], rid=["a", "b"])
    assert [(r.rid, r.prompt_index, r.index) for r in requests] == [("a", 0, 0), ("a", 0, 1), ("b", 1, 0)]
    assert [r.arrival for r in requests] == [0, 1, 2]
    first, second, _ = requests
    first.record(9, "1")
    first.logprobs.setdefault("raw", []).append(0.0)
    assert second.tokens == [2, 3] and second.spans == [] and second.logprobs == {}


def test_ids_of_a_padded_vocabulary_are_prompts_too(tokenizer: Any) -> None:
    """F15: an id that the tokenizer doesn't have, but the model does, may stand in the next turn's prompt."""
    assert len(tokenizer) <= 300 < VOCAB
    [request] = prepare(tokenizer, input_ids=[300, VOCAB - 1])
    assert request.tokens == [300, VOCAB - 1]


def test_eos_and_stop_ids() -> None:
    """F10: all EOS ids of the model, and those asked for; `ignore_eos` takes away the former only. All are
    banned before `min_new_tokens`."""
    for ignore, expected in ((False, {1, 5, 7}), (True, {7})):
        [request] = prepare(input_ids=ids, sampling_params={"stop_token_ids": [7], "ignore_eos": ignore})
        assert request.stop_ids == set(request.banned_ids) == expected


def test_seeds_of_samples() -> None:
    """F4: samples differ; the same prompt twice differs unless it has a seed of its own; an engine with the
    same seed repeats the whole sequence."""

    def keys(door: Intake, **params: Any) -> list[int]:
        obj = GenerateReqInput(input_ids=ids, sampling_params=params)
        return [request.draw_seed for request in door.prepare(obj, capacity=99, publish=never)]

    one, two, other = intake(seed=3), intake(seed=3), intake(seed=4)
    drawn = keys(one, n=8), keys(one, n=8)
    assert len({*drawn[0], *drawn[1]}) == 16
    assert (keys(two, n=8), keys(two, n=8)) == drawn
    assert not {*keys(other, n=8)} & {*drawn[0]}
    assert keys(one, n=8, seed=6) == keys(other, n=8, seed=6) and len({*keys(one, n=8, seed=6)}) == 8
    assert keys(one, n=2, seed=6) == keys(one, n=8, seed=6)[:2], "a child doesn't depend on n"


def test_numbers_are_unique_over_threads() -> None:
    """G1, G2: requests made in many threads at once never share an arrival or a draw."""
    door = intake()

    obj = GenerateReqInput(input_ids=ids, sampling_params={"n": 2})

    def submit(_: int) -> list[Request]:
        return door.prepare(obj, capacity=99, publish=never)

    with ThreadPoolExecutor(8) as pool:
        requests = [request for made in pool.map(submit, range(200)) for request in made]
    assert len({r.arrival for r in requests}) == len({r.draw_seed for r in requests}) == 400
