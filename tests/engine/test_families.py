"""Every family, however its weights come, computes what transformers computes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VARIANTS = {
    "one head for all": {"num_key_value_heads": 1},
    "a head of its own each": {"num_key_value_heads": 4},
    "odd head dim": {"head_dim": 20},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}
GREEDY = {"temperature": 0, "max_new_tokens": 24}


def generated(model, prompt, count=24):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0].tolist()[len(prompt) :]


def check(tiny, model, engine):
    """Logprobs of samples to 1e-4, and greedy ids as `generate` gives them, in one batch."""
    prompts = [tiny.prompt(length, seed=length) for length in (1, 17, 40)]
    params = {"n": 2, "max_new_tokens": 24}
    for kind, options in (("sampled", params), ("greedy", GREEDY)):
        results = engine.generate(input_ids=prompts, sampling_params=options, return_logprob=True)
        each = [prompt for prompt in prompts for _ in range(options.get("n", 1))]
        for prompt, result in zip(each, results, strict=True):
            assert tiny.gap(model, prompt, result) < 1e-4
            if kind == "greedy":
                assert result["output_ids"] == generated(model, prompt)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("source", ["live", "directory"])
def test_live_and_from_a_directory(tiny, make_engine, tmp_path, family, tied, source):
    """Issue 2, item 5: engine logprobs == transformers, and greedy ids == its `generate`."""
    model = tiny.model(family, tie_word_embeddings=tied)
    if source == "directory":
        model.save_pretrained(tmp_path)
    check(tiny, model, make_engine(model if source == "live" else tmp_path))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_from_a_config(tiny, make_engine, family, tied):
    """Issue 2, item 5: seeded random weights: the same for the same seed, and what they are computed as is
    what transformers computes with them."""
    config = tiny.config(family, tie_word_embeddings=tied)
    engine = make_engine(config, seed=3)
    weights = dict(engine.named_parameters())
    model = AutoModelForCausalLM.from_config(config).eval()
    faults = model.load_state_dict(weights, strict=False)
    assert faults.unexpected_keys == [] and set(faults.missing_keys) <= (
        {"lm_head.weight"} if tied else set()
    )
    check(tiny, model, engine)
    assert engine.weights_checksum() == make_engine(config, seed=3).weights_checksum()
    assert engine.weights_checksum() != make_engine(config, seed=4).weights_checksum()


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_and_positions_of_all_kinds(tiny, make_engine, variant):
    """Issue 2, item 5: GQA of any ratio, any head dim, scaled rope, past the original context."""
    model = tiny.model("llama", **VARIANTS[variant])
    check(tiny, model, make_engine(model))


@pytest.mark.parametrize("shards", ["50KB", "10GB"])
def test_saved_in_one_file_or_many(tiny, make_engine, tmp_path, shards):
    """Issue 2, item 5: a sharded directory is the same model."""
    model = tiny.model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "50KB")
    engine = make_engine(tmp_path)
    check(tiny, model, engine)
    saved = dict(model.named_parameters())
    for name, tensor in engine.named_parameters():
        assert torch.equal(tensor, saved.pop(name))
    assert not saved


def test_half_precision_follows_its_own_model(tiny, make_engine, tmp_path):
    """Contract 7: `dtype="auto"` is the directory's own; asked for float32 it is cast once, and exact."""
    model = tiny.model("qwen2").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    half, whole = make_engine(tmp_path), make_engine(tmp_path, dtype="float32")
    assert {tensor.dtype for _, tensor in half.named_parameters()} == {torch.bfloat16}
    prompt = tiny.prompt(30)
    params = {"max_new_tokens": 10}
    result = half.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert 1e-4 < tiny.gap(reference, prompt, result) < 0.1
    result = whole.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
    assert tiny.gap(reference, prompt, result) < 1e-4


def test_a_cast_module_is_followed_in_its_rounded_rotation(tiny, make_engine):
    """Contract 6: `.to(bfloat16)` rounds the rotary frequencies too; the engine rotates as the module."""
    model = tiny.model("qwen3", head_dim=64, max_position_embeddings=2048).to(torch.bfloat16)
    prompt = tiny.prompt(1500)
    params = {"max_new_tokens": 0}

    def gap() -> float:
        result = make_engine(model).generate(
            input_ids=prompt, sampling_params=params, return_logprob=True, logprob_start_len=0
        )
        found = [value for value, *_ in result["meta_info"]["input_token_logprobs"][1:]]
        pairs = zip(found, tiny.ref_logprobs(model, prompt), strict=True)
        return sum(abs(one - other) for one, other in pairs) / len(found)

    followed = gap()
    model.float()  # the rotation stays rounded, and the values are float32 from here on
    assert gap() < 1e-4
    fresh = type(model)(model.config)
    model.model.rotary_emb = fresh.model.rotary_emb
    assert gap() < 1e-4 < followed
