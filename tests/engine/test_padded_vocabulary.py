"""A model may have more ids than its tokenizer; such a token is one like any other, only without text."""

from __future__ import annotations

import pytest

ID, VOCAB = 300, 320


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.model(vocab_size=VOCAB)


def test_it_streams_decodes_to_nothing_and_goes_back_in(tiny, model, engine):
    """F15: id 300 of a vocabulary of 320 under a tokenizer of 256."""
    assert len(engine.client.tokenizer) == 256
    params = {"max_new_tokens": 3, "logit_bias": {ID: 1000.0}}
    messages = list(engine.generate("ab", params, stream=True, return_logprob=True))
    ids = [token for message in messages for token in message["output_ids"]]
    assert (ids, messages[-1]["text"]) == ([ID] * 3, "")
    prompt = [97, 98, *ids]
    again = engine.generate(
        input_ids=prompt,
        sampling_params={"max_new_tokens": 2, "logit_bias": {65: 1000.0}},
        return_logprob=True,
        return_text_in_logprobs=True,
        logprob_start_len=0,
        token_ids_logprob=[ID],
    )
    assert (again["output_ids"], again["text"]) == ([65, 65], "AA")
    assert [text for _, _, text in again["meta_info"]["input_token_logprobs"]] == ["a", "b", "", "", ""]
    assert tiny.gap(model, prompt, again) < 1e-4


def test_between_letters_it_leaves_the_text_whole(engine):
    """F15: text before and after such ids is decoded as if they weren't there, stop strings included."""
    forced = {"max_new_tokens": 1, "temperature": 0}
    ids = [97]
    for token in (195, ID, 169, ID, 98):
        ids += engine.generate(input_ids=ids, sampling_params={**forced, "logit_bias": {token: 1000.0}})[
            "output_ids"
        ]
    assert ids == [97, 195, ID, 169, ID, 98]
    assert engine.client.tokenizer.decode([i for i in ids if i < 256]) == "aéb"


def test_ids_past_the_models_vocabulary_are_refused(engine):
    """F15: the limit is the model's, not the tokenizer's."""
    from tokenspeed_rl.errors import RequestError

    assert engine.generate(input_ids=[VOCAB - 1], sampling_params={"max_new_tokens": 1})["output_ids"]
    with pytest.raises(RequestError, match=str(VOCAB - 1)):
        engine.generate(input_ids=[VOCAB], sampling_params={"max_new_tokens": 1})
