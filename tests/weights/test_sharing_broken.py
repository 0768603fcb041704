"""A shared module that was changed afterwards is noticed, by name, and can be shared again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tokenspeed_rl.errors import ConfigError, WeightsInvalidError
from tokenspeed_rl.weights import share

NORM = "model.norm.weight"
K = "model.layers.1.self_attn.k_proj.weight"


def reallocate(model, name=K):
    param = model.get_parameter(name)
    param.data = param.data.clone()


def replace_parameter(model, name=NORM):
    owner, _, attribute = name.rpartition(".")
    old = model.get_parameter(name)
    setattr(model.get_submodule(owner), attribute, nn.Parameter(old.detach().clone()))


def replace_projection(model):
    old = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = copy.deepcopy(old)


def flatten(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach().clone(), model.parameters())


def transpose(model):
    param = model.model.layers[0].self_attn.o_proj.weight
    param.data = param.data.t()  # square: same shape, address and dtype


def checkpoint_activations(model):
    """By the method's name, which transformers 5.24 changed."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


MOVES = {
    "storage re-allocated": (reallocate, K),
    "parameter replaced": (replace_parameter, NORM),
    "projection replaced": (replace_projection, "model.layers.1.mlp.up_proj"),
    "layer replaced": (
        lambda model: model.model.layers.__setitem__(0, copy.deepcopy(model.model.layers[0])),
        "model.layers.0",
    ),
    "head replaced": (lambda model: setattr(model, "lm_head", copy.deepcopy(model.lm_head)), "lm_head"),
    "load_state_dict(assign=True)": (
        lambda model: model.load_state_dict(
            {k: v.clone() for k, v in model.state_dict().items()}, assign=True
        ),
        "model.embed_tokens.weight",
    ),
    "flattened": (flatten, "model.embed_tokens.weight"),
    "shared memory": (lambda model: model.share_memory(), "model.embed_tokens.weight"),
    "transposed": (transpose, "model.layers.0.self_attn.o_proj.weight"),
    "parameter removed": (lambda model: setattr(model.model.norm, "weight", None), NORM),
    "parameter of another kind": (
        lambda model: model.model.norm._parameters.__setitem__("weight", torch.ones(32)),
        NORM,
    ),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("ask", ["check_storage", "weights_changed"])
def test_moved_storage_is_named_and_the_weights_are_invalid(tiny, move, ask):
    """E13: re-allocated, replaced, flattened, removed: the error names what, and says to share again."""
    model = tiny.model()
    store, shared = tiny.share(model)
    shared.check_storage()
    change, name = MOVES[move]
    change(model)
    with pytest.raises(WeightsInvalidError) as caught:
        getattr(shared, ask)()
    assert name in str(caught.value) and "share_weights(module) again" in str(caught.value)
    assert not store.version.valid
    with pytest.raises(WeightsInvalidError, match="share_weights"):
        store.version.require_valid()


@pytest.mark.parametrize(
    "move", [name for name in MOVES if "removed" not in name and "another kind" not in name]
)
def test_sharing_again_mends_it(tiny, move):
    """Contract 6: invalid until `share_weights` again, which sees the module as it is now, in a new epoch."""
    model = tiny.model()
    store, shared = tiny.share(model)
    MOVES[move][0](model)
    with pytest.raises(WeightsInvalidError):
        shared.check_storage()
    epoch = store.version.epoch
    again = share(model, store, tiny.classes())
    tiny.train_step(model, torch.optim.AdamW(model.parameters()))
    again.weights_changed()
    assert store.version.valid and store.version.epoch > epoch + 1
    assert tiny.same_bits(tiny.held(store), dict(model.named_parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_module_is_named_and_needs_an_engine_of_its_dtype(tiny, dtype):
    """E13: `.to(bf16)` is seen; sharing again is refused by name, as the engine's dtype is another."""
    model = tiny.model()
    store, shared = tiny.share(model)
    model.to(dtype)
    with pytest.raises(WeightsInvalidError, match=str(dtype)):
        shared.check_storage()
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight is " + str(dtype)):
        share(model, store, tiny.classes())


def test_a_module_moved_to_meta_is_named(tiny):
    """E13: offloaded parameters have no values to share."""
    model = tiny.model()
    _, shared = tiny.share(model)
    model.to("meta")
    with pytest.raises(WeightsInvalidError, match="meta"):
        shared.check_storage()


@pytest.mark.parametrize("ask", ["check_storage", "weights_changed"])
def test_freed_memory_is_noticed_wherever_the_allocator_puts_it(tiny, ask):
    """E13: a storage freed, and one cut short, which comes back at the same address as often as not: noticed,
    and until it is shared again nothing reads there."""
    model = tiny.model()
    param = model.get_parameter(NORM)
    kept = param.detach().clone()
    for nbytes in (0, param.nbytes - 1):
        store, shared = tiny.share(model)
        param.untyped_storage().resize_(0)
        param.untyped_storage().resize_(nbytes)
        with pytest.raises(WeightsInvalidError, match=NORM):
            getattr(shared, ask)()
        assert not store.version.valid
        with pytest.raises(WeightsInvalidError, match="memory of norm was freed"):
            store.checksum()
        with pytest.raises(WeightsInvalidError, match="memory of norm was freed"):
            list(store.parameters())
        with pytest.raises(ConfigError, match=f"{NORM} is without its memory"):
            share(model, store, tiny.classes())
        param.untyped_storage().resize_(param.nbytes)
        param.data.copy_(kept)
        share(model, store, tiny.classes()).check_storage()
        assert tiny.same_bits(tiny.held(store), dict(model.named_parameters()))


def test_the_size_of_a_storage_counts_at_the_same_address(tiny, monkeypatch):
    """E13: the same, where the address is sure to be the same."""
    model = tiny.model()
    store, shared = tiny.share(model)
    param, before = model.get_parameter(NORM), model.get_parameter(NORM).data_ptr()
    param.untyped_storage().resize_(param.nbytes - 1)
    monkeypatch.setattr(param, "data_ptr", lambda: before)
    for ask in (shared.check_storage, shared.weights_changed):
        with pytest.raises(WeightsInvalidError, match=NORM):
            ask()
    assert not store.version.valid


def test_an_untied_head_is_noticed(tiny):
    """E13: assigning a state dict to a tied module moves its embedding: noticed, mended by tying."""
    model = tiny.model(tie_word_embeddings=True)
    store, shared = tiny.share(model)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(WeightsInvalidError):
        shared.check_storage()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(ConfigError, match=r"lm_head\.weight is a parameter of its own"):
        share(model, store, tiny.classes())
    model.tie_weights()
    share(model, store, tiny.classes()).check_storage()


@pytest.mark.parametrize(
    "harmless",
    [
        lambda model: model.float(),
        lambda model: model.to("cpu"),
        lambda model: model.eval(),
        lambda model: model.requires_grad_(False),
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: copy.deepcopy(model),
        checkpoint_activations,
        lambda model: model(input_ids=torch.arange(8).view(1, 8), output_hidden_states=True),
        lambda model: model.generate(torch.arange(8).view(1, 8), max_new_tokens=2, do_sample=False),
    ],
)
def test_what_a_trainer_does_every_day_breaks_nothing(tiny, harmless):
    """E13: no-op casts, modes, flags, copies, hidden states and generate() go unpunished."""
    model = tiny.model()
    store, shared = tiny.share(model)
    harmless(model)
    shared.check_storage()
    shared.weights_changed()
    assert store.version.valid


def test_a_hook_added_later_is_raised_by_weights_changed_until_removed(tiny):
    """E13: a forward hook makes the module another function: named, invalid; without it all is well."""
    model = tiny.model()
    store, shared = tiny.share(model)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp has a forward hook"):
        shared.weights_changed()
    assert not store.version.valid
    handle.remove()
    shared.weights_changed()
    assert store.version.valid


def test_an_optimizer_on_a_stream_of_its_own_is_waited_for(tiny, monkeypatch):
    """E13: new values are in force once everything that writes them on the device is through."""
    model = tiny.model()
    store, shared = tiny.share(model)
    waited = []
    monkeypatch.setattr(store, "settle", lambda: waited.append(store.version.epoch))
    epoch = store.version.epoch
    shared.weights_changed()
    assert waited == [epoch] and store.version.epoch == epoch + 1


def test_a_device_that_fails_commits_nothing(tiny, monkeypatch):
    """E13: where the wait fails, the version is the one before."""
    model = tiny.model()
    store, shared = tiny.share(model)
    version = (store.version.epoch, store.version.label)

    def fail():
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(store, "settle", fail)
    with pytest.raises(RuntimeError, match="is gone"):
        shared.weights_changed("new")
    assert (store.version.epoch, store.version.label) == version
