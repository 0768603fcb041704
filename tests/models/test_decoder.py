"""The decoder computes what transformers does, for every family and option, however a context is cut up."""

import itertools

import pytest
import torch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPES = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn, scaled attention": {**YARN, "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2},
    "llama3": LLAMA3,
}
OPTIONS = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with attention bias": ("llama", {"attention_bias": True}),
    "llama with mlp bias": ("llama", {"mlp_bias": True}),
    "llama without a head_dim": ("llama", {"head_dim": None}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "mistral, window": ("mistral", {"sliding_window": 7}),
    "mistral, window 1": ("mistral", {"sliding_window": 1}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2, window in the last layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2, window switched off": ("qwen2", {"use_sliding_window": False, "sliding_window": 5}),
    "qwen3, window by layer type": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3, gelu": ("qwen3", {"hidden_act": "gelu"}),
    "llama, tanh gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, new gelu": ("llama", {"hidden_act": "gelu_new"}),
    "llama, relu": ("llama", {"hidden_act": "relu"}),
    "one layer": ("qwen2", {"num_hidden_layers": 1}),
}
HEADS = {  # query heads, key heads, head dim
    "multi-head": (4, 4, 16),
    "multi-query": (6, 1, 16),
    "group 3": (9, 3, 8),
    "group 6": (12, 2, 8),
    "group 7": (7, 1, 8),
    "head dim 80": (2, 1, 80),
    "head dim 96": (2, 2, 96),
    "heads wider than the model": (8, 2, 32),
}
LENGTH = 60


def tokens(seed, length=LENGTH):
    return torch.randint(1, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(model, ids):
    """Logprobs of every next token, by a full recompute without a cache."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)


def assert_equal(logits, logprobs, atol=1e-5):
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.log_softmax(-1), logprobs, rtol=0, atol=atol)


def check(model, paged):
    """A prompt in two chunks, then token by token, beside a second one that is prefilled meanwhile."""
    first, second = tokens(1), tokens(2, 9)
    a, b = paged.add(), paged.add()
    parts = [paged.step({}, {a: first[:23]}), paged.step({}, {a: first[23:41]})]
    mixed = paged.step({a: first[41]}, {b: second[:6]})
    parts.append(mixed[:1])
    others = [mixed[1:]]
    for number, token in enumerate(first[42:]):
        step = paged.step({a: token, b: second[6 + number]} if number < 3 else {a: token}, {})
        parts.append(step[:1])
        others += [step[1:]] if number < 3 else []
    assert_equal(torch.cat(parts), expected(model, first))
    assert_equal(torch.cat(others), expected(model, second))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tied, make_model, page):
    """Every family, tied or not: fused and in parts, logprobs equal transformers' recompute."""
    model = make_model(family, tie_word_embeddings=tied)
    for fused in (True, False):
        check(model, page(model, fused=fused))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, make_model, page):
    """Biases, windows, activations, layer types: each computes what transformers computes."""
    family, options = OPTIONS[name]
    model = make_model(family, **options)
    check(model, page(model))


@pytest.mark.parametrize("name", HEADS)
def test_heads(name, make_model, page):
    """Any ratio of query to key heads, and any head dim."""
    heads, kv_heads, dim = HEADS[name]
    hidden = 48 if 48 % heads == 0 else 8 * heads
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    model = make_model("qwen3", hidden_size=hidden, **sizes)
    check(model, page(model))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ropes(family, rope, make_model, page):
    """Every rope variant, scaling of attention included."""
    model = make_model(family, rope_parameters={"rope_theta": 10000.0, **ROPES[rope]})
    check(model, page(model))


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_page_sizes(page_size, make_model, page):
    """The page size changes nothing."""
    model = make_model("llama")
    check(model, page(model, page_size=page_size, pages=-(-LENGTH // page_size) + 10))


@pytest.mark.parametrize("chunk", [1, 2, 7, 59, 60])
def test_every_chunk_size(chunk, make_model, page):
    """F9: logprobs of a prompt don't depend on how it is cut into chunks."""
    model, ids = make_model("qwen2"), tokens(3)
    paged = page(model)
    request = paged.add()
    parts = [paged.step({}, {request: ids[start : start + chunk]}) for start in range(0, LENGTH, chunk)]
    assert_equal(torch.cat(parts), expected(model, ids))


def test_alone_and_in_a_batch(make_model, page):
    """F12: a request's logprobs alone, and among 20 others of all lengths, agree to 1e-5."""
    model = make_model("qwen3")
    prompts = [tokens(seed, 3 + 2 * seed) for seed in range(21)]
    paged = page(model, pages=200)
    requests = [paged.add() for _ in prompts]
    paged.step({}, {r: p[:-1] for r, p in zip(requests, prompts, strict=True)})
    together = paged.step({r: p[-1] for r, p in zip(requests, prompts, strict=True)}, {})
    for row, prompt in enumerate(prompts):
        alone = page(model)
        logits = alone.step({}, {alone.add(): prompt})[-1]
        assert_equal(together[row], logits.log_softmax(-1))


def test_requests_may_share_pages_written_in_the_same_step(make_model, page):
    """Two chunks of one context in one step: the second reads the pages that the first writes."""
    model, ids = make_model("llama"), tokens(4, 24)
    paged = page(model, page_size=8)
    first, second = paged.add(), paged.add()
    paged.pages[second] = pages = [paged._free.pop(), paged._free.pop()]
    paged.pages[first], paged.lens[second] = pages[:1], 8
    logits = paged.step({}, {first: ids[:8], second: ids[8:]})
    assert_equal(logits, expected(model, ids))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_that_share_a_prefix(family, make_model, page, monkeypatch):
    """Decode rows told of their shared pages compute what they would alone."""
    monkeypatch.setattr("tokenspeed_rl_kernels.cpu.paged_decode.LEAST_SPARED_BYTES", 0)
    model = make_model(family, **({"sliding_window": 6} if family == "mistral" else {}))
    prefix = tokens(5, 4)
    prompts = [prefix + tokens(seed, seed) for seed in (6, 7, 9)] + [tokens(10, 5)]
    paged = page(model)
    requests = [paged.add() for _ in prompts]
    paged.step({}, {requests[0]: prompts[0][:-1]})
    for request, prompt in zip(requests[1:], prompts[1:], strict=True):
        shared = prompt[:4] == prefix
        paged.pages[request], paged.lens[request] = (paged.pages[requests[0]][:1], 4) if shared else ([], 0)
        paged.step({}, {request: prompt[4 if shared else 0 : -1]})
    last = {request: prompt[-1] for request, prompt in zip(requests, prompts, strict=True)}
    logits = paged.step(last, {}, shared=[requests[:3]])
    for row, prompt in enumerate(prompts):
        assert_equal(logits[row], expected(model, prompt)[-1])


def test_an_empty_step(make_model, page):
    """No tokens at all give no hidden states and no logits."""
    assert page(make_model("llama")).step({}, {}).shape == (0, 101)


def test_tokens_that_are_not_written(make_model, page):
    """A negative slot leaves the cache as it is: padding rows may ride along."""
    paged = page(make_model("llama"))
    a = paged.add()
    paged.step({}, {a: tokens(1, 5)})
    before = [cache.clone() for cache in (*paged.kv.k, *paged.kv.v)]
    step = paged.decoder.forward

    def unwritten(batch, kv):
        batch.slots.fill_(-1)
        return step(batch, kv)

    paged.decoder.forward = unwritten
    paged.step({a: 3}, {})
    for cache, old in zip((*paged.kv.k, *paged.kv.v), before, strict=True):
        assert torch.equal(cache.nan_to_num(nan=-9.0), old.nan_to_num(nan=-9.0))


def test_weights_are_looked_up_at_each_forward(make_model, page):
    """E13: weights written in place, or replaced in the mapping, count from the next forward on."""
    model, other = make_model("llama"), make_model("llama", initializer_range=0.2)
    paged, ids = page(model), tokens(7)
    paged.step({}, {paged.add(): ids})
    for name, parts in page(other).decoder._weights.items():
        for part, new in zip(paged.decoder._weights[name], parts, strict=True):
            part.copy_(new)
    assert_equal(paged.step({}, {paged.add(): ids}), expected(other, ids))
    replaced = {
        name: parts for name, parts in page(make_model("llama"), fused=False).decoder._weights.items()
    }
    paged.decoder._weights.update(replaced)
    assert_equal(paged.step({}, {paged.add(): ids[:20]}), expected(make_model("llama"), ids[:20]))


def test_positions_beyond_the_model_are_refused(make_model, page):
    """A position past the model's last raises instead of wrapping; the last one works."""
    paged = page(make_model("llama", max_position_embeddings=8))
    request = paged.add()
    paged.step({}, {request: tokens(1, 8)})
    with pytest.raises(ValueError, match="position 8 asked for: the model has 8"):
        paged.step({request: 1}, {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, make_model, page):
    """In half precision the engine is no further from float32 than transformers is in the same dtype."""
    exact, model, ids = make_model("qwen3"), make_model("qwen3").to(dtype), tokens(8)
    paged = page(model)
    ours = paged.step({}, {paged.add(): ids}).log_softmax(-1)
    reference = expected(exact, ids)
    errors = [float((logprobs - reference).abs().mean()) for logprobs in (ours, expected(model, ids))]
    assert errors[0] <= 1.2 * errors[1]


def test_greedy_continuation_equals_generate(make_model, page):
    """Greedy ids equal transformers' `generate`, token for token."""
    for family in FAMILIES:
        model, prompt = make_model(family), tokens(9, 12)
        with torch.no_grad():
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0].tolist()
        paged = page(model)
        request = paged.add()
        token = int(paged.step({}, {request: prompt})[-1].argmax())
        ours = [token]
        for _ in itertools.repeat(None, 29):
            token = int(paged.step({request: token}, {})[0].argmax())
            ours.append(token)
        assert ours == ids[12:]
