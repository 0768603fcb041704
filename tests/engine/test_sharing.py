"""A live module and an engine on the same weights: the trainer trains, and the engine sees it."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from tokenspeed_rl.errors import ConfigError, EngineStateError, WeightsInvalidError, WeightUpdateError
from tokenspeed_rl.requests import GenerateReqInput
from tokenspeed_rl.weights import checksum, flatten

K = "model.layers.1.self_attn.k_proj.weight"
PARAMS = {"n": 2, "max_new_tokens": 8}


def ask(tiny, model, engine, prompt):
    """Samples of the warm prompt, exact under the module's weights of now; returns their cached tokens."""
    results = engine.generate(input_ids=prompt, sampling_params=PARAMS, return_logprob=True)
    for result in results:
        assert tiny.gap(model, prompt, result) < 1e-4
    return results[0]["meta_info"]["cached_tokens"]


def train_step(model, optimizer):
    ids = torch.arange(60).view(4, 15) * 7 % 256
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


@torch.no_grad()
def write_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.25)


def load_state_dict(model):
    model.load_state_dict({name: tensor * 0.75 for name, tensor in model.state_dict().items()})


@torch.no_grad()
def copy_rows(model):
    model.get_parameter(K)[3:9].copy_(torch.ones(6, 64))


def vector_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=True)
    train_step(model, optimizer)


WRITES = {
    "data": write_data,
    "load_state_dict": load_state_dict,
    "rows": copy_rows,
    "foreach SGD": vector_step,
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_a_watched_optimizer_needs_nothing_else(tiny, make_engine, tied, options):
    """E13: after every AdamW step the engine computes with the new weights, and nothing cached is used, until
    the handle is removed."""
    model = tiny.model(tie_word_embeddings=tied)
    engine, prompt = make_engine(model, page_size=4), tiny.prompt(30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    handle = engine.watch(optimizer)
    for step in range(3):
        assert ask(tiny, model, engine, prompt) == 0
        assert ask(tiny, model, engine, prompt) == 28
        train_step(model, optimizer)
        assert tiny.state(engine)["weight_version"] == str(step + 1)
    handle.remove()
    train_step(model, optimizer)
    assert tiny.state(engine)["weight_version"] == "3"


@pytest.mark.parametrize("write", WRITES)
def test_a_write_in_place_is_seen_after_weights_changed(tiny, make_engine, write):
    """E13: `.data`, `load_state_dict`, rows, an optimiser nobody watches."""
    model = tiny.model("qwen3")
    engine, prompt = make_engine(model, page_size=4), tiny.prompt(30)
    ask(tiny, model, engine, prompt)
    before = engine.weights_checksum()
    WRITES[write](model)
    receipt = engine.weights_changed("now")
    assert (receipt.kind, receipt.bytes, receipt.version) == ("shared", 0, "now")
    assert len(receipt.loaded) == len(dict(model.named_parameters()))
    assert ask(tiny, model, engine, prompt) == 0
    assert before != engine.weights_checksum() == checksum(model.named_parameters())


def reallocate(model):
    parameter = model.get_parameter(K)
    parameter.data = parameter.data.clone()


def replace_projection(model):
    model.model.layers[0].mlp.up_proj = copy.deepcopy(model.model.layers[0].mlp.up_proj)


def replace_parameter(model):
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())


BREAKS = {
    "re-allocated": (reallocate, K),
    "cast": (lambda model: model.to(torch.bfloat16), "bfloat16"),
    "projection": (replace_projection, "model.layers.0.mlp.up_proj"),
    "parameter": (replace_parameter, "model.norm.weight"),
}


@pytest.mark.parametrize("first", ["generate", "stream", "weights_changed"])
@pytest.mark.parametrize("why", BREAKS)
def test_moved_storage_raises_by_name_and_stays_invalid(tiny, make_engine, why, first):
    """E13: whoever asks first is told which parameter; nothing runs on stale memory afterwards, until the
    module is shared again."""
    model = tiny.model()
    engine, prompt = make_engine(model, page_size=4), tiny.prompt(30)
    ask(tiny, model, engine, prompt)
    act, name = BREAKS[why]
    act(model)
    calls = {
        "generate": lambda: engine.generate(input_ids=prompt, sampling_params=PARAMS),
        "stream": lambda: engine.generate(input_ids=prompt, sampling_params=PARAMS, stream=True),
        "weights_changed": engine.weights_changed,
    }
    for call in (first, *calls):
        with pytest.raises(WeightsInvalidError, match=name):
            calls[call]()
    for call in (engine.weights_checksum, engine.named_parameters):
        with pytest.raises(WeightsInvalidError, match=name):
            call()
    assert tiny.state(engine)["validity"].startswith("invalid")
    assert engine.get_load()[0].num_reqs == 0
    if why == "cast":
        with pytest.raises(ConfigError, match="bfloat16"):
            engine.share_weights(model)
        model = tiny.model(seed=1)
    engine.share_weights(model)
    assert tiny.state(engine)["validity"] == "valid"
    assert ask(tiny, model, engine, prompt) == 0


def test_a_live_request_waits_while_the_weights_are_invalid(tiny, make_engine):
    """E13: found out in the middle of its output, it neither goes on with stale weights nor dies, and ends
    exactly under those that come."""
    model = tiny.model()
    engine, prompt, other = make_engine(model, page_size=4), tiny.prompt(20), tiny.model(seed=1)

    def break_and_mend():
        reallocate(model)
        with pytest.raises(WeightsInvalidError, match=K):
            engine.weights_changed()
        steps = tiny.state(engine)["steps"]
        with pytest.raises(WeightsInvalidError, match=K):
            engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
        assert tiny.state(engine)["steps"] <= steps + 1  # the one that was going on
        return engine.share_weights(other)

    mended = tiny.after_step(engine, 5, break_and_mend)
    result = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 15}, return_logprob=True)
    assert mended.result(20).version == "1"
    assert [tuple(span.values()) for span in result["meta_info"]["weight_versions"]] == [
        ("default", 0, 5),
        ("1", 5, 15),
    ]
    refs = tiny.ref_logprobs(other, [*prompt, *result["output_ids"]])[len(prompt) - 1 :]
    values = [value for value, _, _ in result["meta_info"]["output_token_logprobs"]]
    assert values[5:] == pytest.approx(refs[5:], abs=1e-4)


def test_a_hook_is_raised_by_name_until_it_is_removed(tiny, make_engine):
    """E13: a module that computes something else than the engine does is noticed at `weights_changed`."""
    model = tiny.model()
    engine, prompt = make_engine(model, page_size=4), tiny.prompt(30)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp"):
        engine.weights_changed()
    obj = GenerateReqInput(input_ids=prompt)
    blocking = (
        lambda: engine.generate(input_ids=prompt),
        lambda: engine.llm.generate(obj),
        lambda: engine.llm.generate_stream(obj),
    )
    for call in blocking:
        with pytest.raises(WeightsInvalidError, match=r"model\.layers\.1\.mlp"):
            call()
    handle.remove()
    engine.weights_changed()
    assert ask(tiny, model, engine, prompt) == 0


@pytest.mark.parametrize("add", ["hook", "projection", "half"])
def test_a_refused_module_is_left_as_it_was(tiny, make_engine, add):
    """E13: at construction by name, nothing moved; an engine that shares another module goes on with that."""
    good, bad = tiny.model(), tiny.model(seed=1)
    engine, prompt = make_engine(good), tiny.prompt(20)
    if add == "hook":
        bad.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda *_: None)
    elif add == "projection":
        bad.model.layers[0].mlp.down_proj = nn.Sequential(bad.model.layers[0].mlp.down_proj)
    else:
        bad.model.layers[0].mlp.down_proj.half()
    addresses = {name: parameter.data_ptr() for name, parameter in bad.named_parameters()}
    name = r"layers\.0\.self_attn\.q_proj" if add == "hook" else r"layers\.0\.mlp\.down_proj"
    for call in (make_engine, engine.share_weights):
        with pytest.raises(ConfigError, match=name):
            call(bad)
    assert {name: parameter.data_ptr() for name, parameter in bad.named_parameters()} == addresses
    assert tiny.state(engine)["validity"] == "valid"
    ask(tiny, good, engine, prompt)


def test_training_is_bitwise_what_it_is_without_an_engine(tiny, make_engine):
    """E13: generating between the steps, shutting down and deleting the engine in the middle: the module
    trains on exactly as its twin, and its memory outlives the engine."""
    model, twin = tiny.model("qwen3"), tiny.model("qwen3")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, twin)]
    model.train(), twin.train()
    engine = make_engine(model)
    engine.watch(optimizers[0])  # it must not matter to the optimiser that the engine ends
    frozen = [parameter.requires_grad_(False) for m in (model, twin) for parameter in [m.model.norm.weight]]
    for _ in range(3):
        engine.generate(input_ids=tiny.prompt(9), sampling_params={"max_new_tokens": 4})
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            train_step(each, optimizer)
    assert model.training and not any(parameter.requires_grad for parameter in frozen)
    engine.shutdown()
    del engine
    gc.collect()
    for _ in range(2):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            train_step(each, optimizer)
    for (name, mine), (_, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        if mine.grad is not None:
            assert torch.equal(mine.grad, theirs.grad), name


def test_what_the_engine_returns_is_ordinary(tiny, make_engine):
    """Architecture, manners: no inference-mode tensors, no graph of the engine's own: autograd works on all
    of it, whatever mode the caller is in."""
    model = tiny.model()
    with torch.inference_mode():
        engine = make_engine(model)
        engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 2})
    with torch.enable_grad():
        for name, tensor in engine.named_parameters():
            assert not tensor.is_inference() and tensor.grad_fn is None
            assert tensor.data_ptr() == model.get_parameter(name).data_ptr()
            weight = torch.ones_like(tensor, requires_grad=True)
            (weight * tensor).sum().backward()
            assert torch.equal(weight.grad, tensor)
    train_step(model, torch.optim.AdamW(model.parameters()))
    engine.weights_changed()
    ask(tiny, model, engine, tiny.prompt(9))


def test_freed_storages_are_errors_and_end_no_process(tiny, make_engine):
    """E2, E13: FSDP frees the storage of a parameter that it has sharded: whatever reads weights refuses it,
    and the engine goes on once it is back."""
    model, prompt = tiny.model(), tiny.prompt(9)
    norm = model.model.norm.weight
    kept, nbytes = norm.detach().clone(), norm.nbytes
    norm.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is without its memory"):
        make_engine(model)
    with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight is without its memory"):
        make_engine(model.config).update_weights_from_tensor(model.named_parameters())
    with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight is without its memory"):
        flatten(model.named_parameters())
    norm.untyped_storage().resize_(nbytes)
    norm.data.copy_(kept)
    engine = make_engine(model)
    ask(tiny, model, engine, prompt)
    norm.untyped_storage().resize_(0)
    for read in (
        lambda: engine.generate(input_ids=prompt),
        engine.weights_changed,
        engine.weights_checksum,
        lambda: engine.get_weights_by_name("model.norm.weight"),
        lambda: dict(engine.named_parameters()),
    ):
        with pytest.raises(WeightsInvalidError):
            read()
    norm.untyped_storage().resize_(nbytes)
    norm.data.copy_(kept)
    engine.share_weights(model)
    ask(tiny, model, engine, prompt)


def test_two_engines_on_one_module(tiny, make_engine):
    """E13, G9: each is told of the step by itself; the end of one leaves the other and the module alone."""
    model, prompt = tiny.model(), tiny.prompt(30)
    engines = [make_engine(model, page_size=size) for size in (4, 16)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for engine in engines:
        engine.watch(optimizer)
    for _ in range(2):
        for engine in engines:
            assert ask(tiny, model, engine, prompt) == 0
        train_step(model, optimizer)
    engines[0].shutdown()
    assert ask(tiny, model, engines[1], prompt) == 0
    write_data(model)
    engines[1].weights_changed()
    assert ask(tiny, model, engines[1], prompt) == 0


def test_without_a_shared_module_there_is_nothing_to_announce(tiny, make_engine):
    """E13: `weights_changed` on an engine that owns its weights says what to do first."""
    engine = make_engine(tiny.config())
    with pytest.raises(EngineStateError, match="share_weights"):
        engine.weights_changed()
    assert engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})["output_ids"]


def test_accelerate_restores_into_a_shared_module(tiny, make_engine, tmp_path):
    """E13: `load_state` brings module, optimiser and engine back to where they were saved."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    accelerator = Accelerator(cpu=True)
    model = tiny.model("qwen2")
    engine, prompt = make_engine(model, page_size=4), tiny.prompt(30)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    engine.watch(optimizer)
    train_step(prepared, optimizer)
    saved = engine.weights_checksum()
    accelerator.save_state(tmp_path)
    train_step(prepared, optimizer)
    assert engine.weights_checksum() != saved
    accelerator.load_state(tmp_path)
    engine.weights_changed()
    assert engine.weights_checksum() == saved
    assert ask(tiny, model, engine, prompt) == 0
    AcceleratorState._reset_state(reset_partial_state=True)


def test_weights_are_read_by_any_of_their_names(tiny, make_engine):
    """Contract 6: fused names, ties and wrappers' prefixes are understood where a weight is read, too."""
    model = tiny.model("qwen3", tie_word_embeddings=True)
    engine = make_engine(model)
    attention = model.model.layers[0].self_attn
    parts = [getattr(attention, f"{name}_proj").weight for name in "qkv"]
    fused = engine.get_weights_by_name("model.layers.0.self_attn.qkv_proj.weight", 10_000)
    assert torch.equal(torch.tensor(fused), torch.cat([part.detach() for part in parts]))
    embedding = model.model.embed_tokens.weight.detach()[:3]
    for name in ("lm_head.weight", "module.model.embed_tokens.weight"):
        assert torch.equal(torch.tensor(engine.get_weights_by_name(name, 3)), embedding)
