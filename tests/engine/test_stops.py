"""A sample ends for the right reason, with the right text, and keeps the token that ended it."""

from __future__ import annotations

import json

import pytest

from tokenspeed_rl import Engine

EOS = [100, 110]  # "d" and "n"
DEFAULTS = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
GREEDY = {"temperature": 0, "max_new_tokens": 30}


@pytest.fixture(scope="module")
def directory(tiny, tmp_path_factory):
    """A model that counts, with two EOS ids and sampling defaults in its generation_config.json."""
    path = tmp_path_factory.mktemp("counting")
    tiny.successor().save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, **DEFAULTS}))
    return path


@pytest.fixture(scope="module")
def counting(directory):
    with Engine(directory, device="cpu", max_total_tokens=4096) as engine:
        yield engine


def ends(result):
    meta = result["meta_info"]
    assert len(result["output_ids"]) == meta["completion_tokens"]
    return result["text"], result["output_ids"], meta["finish_reason"]


@pytest.mark.parametrize(("prompt", "eos"), [("a", 100), ("i", 110)])
def test_each_eos_id_of_the_generation_config_ends_a_sample(counting, prompt, eos):
    """F10: either id ends it, is the last of `output_ids`, has its logprob, and is not in the text."""
    result = counting.generate(prompt, GREEDY, return_logprob=True)
    expected = list(range(ord(prompt) + 1, eos + 1))
    assert ends(result) == ("".join(map(chr, expected[:-1])), expected, {"type": "stop", "matched": eos})
    assert [token for _, token, _ in result["meta_info"]["output_token_logprobs"]] == expected


def test_the_eos_id_of_a_config_and_of_a_live_model_count(tiny, make_engine):
    """F10: without a generation_config.json the ids come from the config, or the live model's own."""
    model = tiny.successor(eos_token_id=103)
    model.generation_config.eos_token_id = [101]
    engine = make_engine(model)
    assert engine.generate(input_ids=[97], sampling_params=GREEDY)["output_ids"] == [98, 99, 100, 101]
    assert engine.generate(input_ids=[101], sampling_params=GREEDY)["output_ids"] == [102, 103]


def test_sampling_defaults_of_the_generation_config_do_not_apply(tiny, make_engine, tmp_path):
    """F10: a request that says nothing is drawn at temperature 1, from everything, without penalties."""
    model = tiny.model()
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, **DEFAULTS}))
    prompt = tiny.prompt(10)
    results = make_engine(tmp_path).generate(
        input_ids=prompt,
        sampling_params={"n": 20, "max_new_tokens": 20},
        return_logprob=True,
        logprob_kinds=["raw", "sampling", "processed"],
        return_sampling_mask=True,
    )
    for result in results:
        meta = result["meta_info"]
        assert meta["output_token_logprobs"] == meta["output_token_logprobs_raw"]
        assert meta["output_token_logprobs"] == meta["output_token_logprobs_processed"]
        assert meta["sampling_mask"] == [list(range(256))] * len(result["output_ids"])
        assert tiny.gap(model, prompt, result) < 1e-4


def test_ignore_eos_goes_on_but_stop_ids_still_stop(counting):
    """F10: `ignore_eos` concerns the model's ids alone."""
    on = counting.generate("a", {**GREEDY, "max_new_tokens": 20, "ignore_eos": True})
    assert ends(on) == ("bcdefghijklmnopqrstu", list(range(98, 118)), {"type": "length", "length": 20})
    stopped = counting.generate("a", {**GREEDY, "ignore_eos": True, "stop_token_ids": [108, 105]})
    assert ends(stopped) == ("bcdefgh", list(range(98, 106)), {"type": "stop", "matched": 105})


def test_stop_ids_come_beside_the_eos_ids(counting):
    """F10: whichever comes first ends the sample, an EOS id that is also a stop id included."""
    stopped = counting.generate("a", {**GREEDY, "stop_token_ids": [99, 100]})
    assert ends(stopped) == ("b", [98, 99], {"type": "stop", "matched": 99})
    stopped = counting.generate("a", {**GREEDY, "stop_token_ids": [100, 105], "ignore_eos": True})
    assert ends(stopped)[2] == {"type": "stop", "matched": 100}


def test_before_min_new_tokens_nothing_ends_it(counting):
    """F10: EOS and stop ids are not drawn, and stop strings don't end it, until so many tokens are there."""
    params = {**GREEDY, "min_new_tokens": 5, "stop_token_ids": [98]}
    result = counting.generate("a", params, return_logprob=True, logprob_kinds=["processed"])
    ids = result["output_ids"]
    assert len(ids) >= 5 and not set(ids[:4]) & {98, *EOS}
    assert all(value < 0.1 for value, _, _ in result["meta_info"]["output_token_logprobs_processed"])
    params = {**GREEDY, "min_new_tokens": 6, "stop": ["h", "j"], "ignore_eos": True}
    assert ends(counting.generate("d", params))[1:] == (
        list(range(101, 107)),
        {"type": "stop", "matched": "j"},
    )


def test_a_stop_id_as_the_last_allowed_token_is_a_stop(counting):
    """F10: what ends in the same token as the length says why it really ended."""
    assert ends(counting.generate("a", {**GREEDY, "max_new_tokens": 3}))[2]["type"] == "stop"
    assert ends(counting.generate("a", {**GREEDY, "max_new_tokens": 2}))[2] == {"type": "length", "length": 2}
    assert ends(counting.generate("e", {**GREEDY, "max_new_tokens": 3, "stop": "fgh"}))[2]["type"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "matched", "text", "last"),
    [
        ("ghi", "ghi", "f", "i"),
        (["zz", "hij"], "hij", "fg", "j"),
        (["hij", "gh"], "gh", "f", "h"),
        (["ij", "hij"], "hij", "fg", "j"),
        ("f", "f", "", "f"),
        (["zz", "fgj"], None, "fghijklm", "n"),
    ],
    ids=str,
)
def test_stop_strings_match_across_token_borders(counting, stream, stop, matched, text, last):
    """F10: the string is cut from the text, its tokens stay in the ids; several strings, the first to
    appear."""
    result = counting.generate("e", {**GREEDY, "stop": stop}, stream=stream)
    if stream:
        messages = list(result)
        ids = [token for message in messages for token in message["output_ids"]]
        assert all(text.startswith(message["text"]) for message in messages)
        result = {**messages[-1], "output_ids": ids}
    reason = {"type": "stop", "matched": 110 if matched is None else matched}
    assert ends(result) == (text, list(range(ord("f"), ord(last) + 1)), reason)


def test_no_stop_trim_leaves_what_ended_it_in_the_text(counting):
    """F10: the stop string, the stop id or the EOS id stays in `text`."""
    params = {**GREEDY, "no_stop_trim": True}
    assert counting.generate("e", {**params, "stop": "ghi"})["text"] == "fghi"
    assert counting.generate("e", {**params, "stop_token_ids": [104]})["text"] == "fgh"
    assert counting.generate("a", params)["text"] == "bcd"


def test_a_stop_string_inside_and_across_long_tokens(tiny, make_engine):
    """F10: tokens of several characters, the string in the middle of one, over two, and over three."""
    names = {101: "one two", 102: "thr", 103: "e", 104: "e four"}
    engine = make_engine(tiny.successor(), tokenizer=tiny.tokenizer(names=names))
    for stop, text, count in (
        ("e tw", "on", 1),
        ("wot", "one t", 2),
        ("three f", "one two", 4),
        ("our", "one twothree f", 4),
    ):
        result = engine.generate(input_ids=[100], sampling_params={**GREEDY, "stop": stop})
        reason = {"type": "stop", "matched": stop}
        assert ends(result) == (text, list(range(101, 101 + count)), reason)


def test_a_stop_string_of_characters_that_take_several_tokens(tiny, make_engine):
    """F10: half a character matches nothing; the whole one does."""
    order = dict(zip("aé→b".encode(), "é→bc".encode(), strict=True))
    engine = make_engine(tiny.successor(lambda t: order.get(t, 0)), tokenizer=tiny.tokenizer())
    text, ids, reason = ends(engine.generate("a", {**GREEDY, "stop": ["→b"]}))
    assert (text, reason["matched"]) == ("é", "→b")
    assert bytes(ids) == "é→b".encode()
