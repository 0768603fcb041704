"""Turns of a session against the engine: each is what the whole sequence from scratch would give."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from tests.lifecycle.conversation import Conversation
from tests.lifecycle.rollouts import (
    EXACT,
    WAIT,
    ask,
    frozen_gap,
    labels,
    owner,
    pause_at,
    push,
    reason,
    span_gap,
    take,
)
from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import RequestError

PAGE = 4


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8, "top_k": 50, "seed": 3}])
def test_three_turns(make_engine: Any, model: Any, params: Any, caching: bool) -> None:
    """Issue 4: three turns draw the ids, with the logprobs, of a new engine that is given the whole sequence
    each time; former turns' full pages come out of the prefix cache, or are computed again without one."""
    sizes = {"page_size": PAGE, "chunked_prefill_size": 8}
    engine = make_engine(model, enable_prefix_caching=caching, **sizes)
    fresh = make_engine(model, enable_prefix_caching=False, **sizes)
    talk = Conversation(engine, model)
    for number, length in enumerate((13, 1, 22)):
        former = len(talk.tokens)
        whole = [*talk.tokens, *Tiny.prompt(length, seed=number)]
        meta = (result := talk.turn(whole[former:], max_new_tokens=10, **params))["meta_info"]
        expected = take(fresh, ask(fresh, whole, max_new_tokens=10, **params))
        assert result["output_ids"] == expected["output_ids"]
        computed = max(0, former - 1)  # the last token of a turn is drawn, not computed
        assert meta["cached_tokens"] == (computed // PAGE * PAGE if caching else 0)
    engine.close_session(talk.id)
    Tiny.all_back(engine)


FORGETS: dict[str, Any] = {
    "update": lambda e, m: push(e, m, "W1"),
    "update without a flush": lambda e, m: push(e, m, "W1", flush_cache=False),
    "flush": lambda e, m: e.flush_cache(),
    "release": lambda e, m: [e.release_memory_occupation("kv_cache"), e.resume_memory_occupation()],
    "release of weights": lambda e, m: [e.release_memory_occupation(), e.resume_memory_occupation()],
    "asleep and updated": lambda e, m: [
        e.release_memory_occupation("kv_cache"),
        push(e, m, "W1"),
        e.resume_memory_occupation(),
    ],
}


@pytest.mark.parametrize("name", FORGETS)
def test_kv_is_dropped_and_tokens_are_not(make_engine: Any, models: Any, name: str) -> None:
    """B7, A11: after an update, a release or a flush a turn finds none of its KV in the cache, and goes on
    from all tokens of the session, exact under the weights that are there."""
    engine = owner(make_engine, models["W0"], weights_backup="cpu")
    talk = Conversation(engine, models["W0"])
    talk.turn(Tiny.prompt(20))
    assert talk.turn([1])["meta_info"]["cached_tokens"] > 0
    FORGETS[name](engine, models["W1"])
    assert Tiny.state(engine)["sessions"]["tokens"] == len(talk.tokens) == 33
    talk.model = models["W1" if "update" in name else "W0"]
    assert talk.turn([2])["meta_info"]["cached_tokens"] == 0
    assert talk.turn([3])["meta_info"]["cached_tokens"] > 0


def test_weights_changed_drops_kv(make_engine: Any) -> None:
    """B7 with shared weights: after an optimiser's step a turn is exact under the new weights, computed
    whole."""
    model = Tiny.model(seed=5)
    talk = Conversation(make_engine(model, page_size=PAGE), model)
    talk.turn(Tiny.prompt(20))
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
        model.model.layers[0].self_attn.k_proj.weight.neg_()
    talk.engine.weights_changed()
    assert talk.turn([1])["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize("mode", [None, "keep", "retract"])
def test_an_update_in_the_midst_of_a_turn(
    make_engine: Any, models: Any, pool: Any, step_gate: type[StepGate], mode: str | None
) -> None:
    """D3: the spans of a turn are over its own output, split at the update; the next turn has one span, of
    the new weights, and reads no KV that the old ones had a part in."""
    engine = owner(make_engine, models["W0"])
    talk = Conversation(engine, models["W0"])
    talk.turn(Tiny.prompt(9))
    new = Tiny.prompt(7, seed=1)
    with step_gate(engine) as gate:
        stream = talk.ask(new, max_new_tokens=8)
        if mode is None:
            gate.step(2)
            gate.wait()
            update = pool.submit(push, engine, models["W1"], "W1")
            gate.serve(update.done)  # else the turn may be over before its first command
        else:
            pause_at(engine, gate, pool, mode, steps=3)
            update = pool.submit(push, engine, models["W1"], "W1")
            update.result(WAIT)
            engine.resume()
        gate.open()
        update.result(WAIT)
        result = take(engine, stream)
    whole, split = [*talk.tokens, *new], labels(result)[0][2]
    assert labels(result) == [("W0", 0, split), ("W1", split, 8)] and 0 < split < 8
    if mode == "keep":
        done = len(whole) + split - 1
        assert frozen_gap(whole, result, (models["W0"], done), (models["W1"], -1)) < EXACT
    else:
        assert span_gap(models, whole, result) < EXACT
    talk.tokens, talk.model = [*whole, *result["output_ids"]], models["W1"]
    computed = len(talk.tokens) - 1
    after = talk.turn([5])
    assert labels(after) == [("W1", 0, 6)]
    assert after["meta_info"]["cached_tokens"] == (0 if mode == "keep" else computed // PAGE * PAGE)


def test_a_live_turn_sleeps(make_engine: Any, models: Any, pool: Any, step_gate: type[StepGate]) -> None:
    """B7: memory is released with a turn in flight, which then goes on to its end, and counts."""
    engine = owner(make_engine, models["W0"], weights_backup="cpu")
    talk = Conversation(engine, models["W0"])
    talk.turn(Tiny.prompt(9))
    with step_gate(engine) as gate:
        stream = talk.ask([1, 2], max_new_tokens=8)
        pause_at(engine, gate, pool, "keep", steps=3)
        engine.release_memory_occupation()
        assert Tiny.state(engine)["sessions"] == {"count": 1, "tokens": 15, "live": 1}
        engine.resume_memory_occupation()
        gate.open()
        engine.resume()
        talk.heard([1, 2], take(engine, stream))
    talk.turn([3])


def test_turns_in_a_small_pool(make_engine: Any, model: Any) -> None:
    """C3: turns of two sessions that don't fit side by side are retracted and exact, and sessions hold no
    page that the other one needs."""
    engine = make_engine(model, page_size=PAGE, max_total_tokens=64)
    talks = [Conversation(engine, model), Conversation(engine, model)]
    for new in ([1, 2, 3], [4, 5], [6]):
        with Tiny.held(engine):
            streams = [talk.ask(new, max_new_tokens=15) for talk in talks]
        for talk, result in zip(talks, take(engine, *streams), strict=True):
            talk.heard(new, result)
    assert Tiny.state(engine)["num_retractions"] > 0


def test_two_sessions_that_begin_alike(make_engine: Any, model: Any) -> None:
    """Issue 4: a session finds the prefix that another one has computed, and goes its own way."""
    engine = make_engine(model, page_size=PAGE)
    one, two = Conversation(engine, model), Conversation(engine, model)
    prompt = Tiny.prompt(21)
    assert one.turn(prompt)["meta_info"]["cached_tokens"] == 0
    assert two.turn(prompt)["meta_info"]["cached_tokens"] == 20
    one.turn([1, 2])
    two.turn([3])
    assert one.tokens[21:] != two.tokens[21:]
    streams = [talk.ask([7], temperature=0) for talk in (one, two)]  # in one batch
    for talk, result in zip((one, two), take(engine, *streams), strict=True):
        talk.heard([7], result)


def test_prompt_logprobs_count_from_the_first_token(make_engine: Any, model: Any) -> None:
    """Contract 7: `logprob_start_len` is a position in the session."""
    talk = Conversation(make_engine(model, page_size=PAGE), model)
    talk.turn(Tiny.prompt(14))
    fields = {"logprob_start_len": 9}
    triples = talk.turn([1, 2, 3], fields, max_new_tokens=2)["meta_info"]["input_token_logprobs"]
    prompt = talk.tokens[:-2]
    assert [token for _, token, _ in triples] == prompt[9:] and triples[0][0] is None
    expected = Tiny.ref_logprobs(model, prompt)[9:]
    assert [value for value, _, _ in triples[1:]] == pytest.approx(expected, abs=EXACT)


def test_a_turn_that_only_scores_appends_its_input(make_engine: Any, model: Any) -> None:
    """Contract 4, 7: `max_new_tokens=0` is a turn without output: what was scored is there in the next."""
    talk = Conversation(make_engine(model, page_size=PAGE), model)
    for new in ([1, 2, 3, 4, 5], [6, 7]):
        assert talk.turn(new, max_new_tokens=0)["output_ids"] == []
    talk.turn([8])
    assert talk.tokens[:8] == [1, 2, 3, 4, 5, 6, 7, 8] and len(talk.tokens) == 14


def test_the_token_that_ends_a_turn_stays(counter: Engine, counting: Any) -> None:
    """Contract 4, 7: a session keeps `output_ids` whole: stop tokens, and what a stop string was cut from."""
    talk = Conversation(counter, counting)
    first = talk.turn([65], temperature=0, stop_token_ids=[68])
    second = talk.turn([97], temperature=0, stop="d")
    assert [r["text"] for r in (first, second)] == ["BC", "bc"]
    assert talk.tokens == list(b"ABCDabcd")
    assert talk.turn([120], max_new_tokens=2, temperature=0)["output_ids"] == list(b"yz")
    counter.close_session(talk.id)


def test_text_is_tokenised_without_special_tokens_in_the_middle(make_engine: Any, model: Any) -> None:
    """Token in, token out: only the first text of a session gets a BOS; a turn that was lost is not the
    first one."""
    tokenizer = Tiny.tokenizer(names={1: "<s>"})
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert tokenizer("ab")["input_ids"] == [1, 97, 98]
    engine = make_engine(model, tokenizer=tokenizer)
    session = engine.open_session(100)
    turn: dict[str, Any] = {"sampling_params": {"max_new_tokens": 0}, "session_params": {"id": session}}
    with pytest.raises(RequestError):
        engine.generate("ab", sampling_params={"max_new_tokens": 200}, session_params={"id": session})
    scored = {**turn, "return_logprob": True, "logprob_start_len": 0}
    assert [engine.generate("ab", **turn)["meta_info"]["prompt_tokens"] for _ in range(2)] == [3, 5]
    triples = engine.generate("c", **scored)["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in triples] == [1, 97, 98, 97, 98, 99]


def test_capacity(make_engine: Any, model: Any) -> None:
    """Contract 7: a turn whose prompt and explicit `max_new_tokens` exceed the capacity is refused with what,
    got and fix; without the latter it ends in `length` there, and then no token fits any more."""
    talk = Conversation(make_engine(model), model, capacity=20)
    with pytest.raises(RequestError, match=r"0 of 20 tokens.*11 new ones and max_new_tokens=10") as caught:
        talk.ask([1] * 11, max_new_tokens=10)
    assert "capacity_of_str_len" in (caught.value.fix or "")
    talk.turn([1] * 11, max_new_tokens=3)
    result = talk.turn([2], max_new_tokens=None)
    assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert len(talk.tokens) == 20
    for params in ({"max_new_tokens": None}, {"max_new_tokens": 0}):
        with pytest.raises(RequestError, match=r"20 of 20 tokens.* 1 new"):
            talk.ask([3], **params)
    full = Conversation(talk.engine, model, capacity=3)
    full.turn([1, 2, 3], max_new_tokens=0)


def test_the_context_ends_a_turn_before_a_larger_capacity(make_engine: Any, model: Any) -> None:
    """Contract 4: a session may be opened larger than the context, and the context is reached as ever."""
    talk = Conversation(make_engine(model, max_model_len=30), model, capacity=10**6)
    talk.turn([1] * 10)
    assert talk.turn([2], max_new_tokens=40)["meta_info"]["completion_tokens"] == 30 - 17
    with pytest.raises(RequestError, match="context of 30"):
        talk.ask([3])


def test_one_live_turn(counter: Engine) -> None:
    """Contract 7: several prompts or samples, and a session that is not open, are refused before anything is
    queued; a list of one prompt gives a list."""
    session = counter.open_session(50)
    turn = {"session_params": {"id": session}}
    for prompts, n in (([5], 2), ([[5], [6]], 1)):
        with pytest.raises(RequestError, match="one live turn") as caught:
            counter.generate(input_ids=prompts, sampling_params={"n": n}, **turn)
        assert caught.value.got and caught.value.fix
    for name in ("nobody", None, ["s"]):
        with pytest.raises(RequestError, match="no session of this id"):
            counter.generate(input_ids=[5], session_params={"id": name})
    assert counter.get_load()[0].num_reqs == 0
    [result] = counter.generate(
        input_ids=[[5]], sampling_params={"max_new_tokens": 2, "temperature": 0}, **turn
    )
    assert (result["output_ids"], reason(result)) == ([6, 7], "length")
    assert Tiny.state(counter)["sessions"] == {"count": 1, "tokens": 3, "live": 0}
    counter.close_session(session)


def test_logits_that_are_not_finite(make_engine: Any) -> None:
    """F7: such a turn ends as `abort`, and the session is as before it."""
    model = Tiny.model(seed=4)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = math.nan
    talk = Conversation(make_engine(model), model)
    bias = {"logit_bias": {7: -math.inf}}
    talk.turn([1, 2, 3], **bias)
    result = take(talk.engine, talk.ask([7], **bias))
    assert reason(result) == "abort" and "finite" in result["meta_info"]["finish_reason"]["message"]
    talk.turn([4], **bias)
