"""A glance at a shared module sees every change that a closer look would judge, and costs next to nothing."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.calls import calls_of
from tokenspeed_rl.errors import TokenSpeedError
from tokenspeed_rl.weights.snapshot import ModuleSnapshot

Q = "model.layers.0.self_attn.q_proj"


class OwnLinear(nn.Linear):
    """A projection of somebody's own."""


def set_class(module, kind):
    module.__class__ = kind


def reinterpret(param):
    param.data = param.data.view(torch.int32)


def own_forward(module):
    module.forward = MethodType(type(module).forward, module)


CHANGES = {
    "hook": lambda m: m.model.layers[0].mlp.register_forward_hook(lambda *_: None),
    "pre-hook": lambda m: m.model.norm.register_forward_pre_hook(lambda *_: None),
    "hook on the root": lambda m: m.register_forward_hook(lambda *_: None),
    "forward of its own": lambda m: own_forward(m.model.layers[1]),
    "class": lambda m: set_class(m.get_submodule(Q), OwnLinear),
    "module replaced": lambda m: setattr(m.model, "norm", copy.deepcopy(m.model.norm)),
    "module added": lambda m: m.add_module("value_head", nn.Linear(32, 1)),
    "module removed": lambda m: m.model.layers.__delitem__(1),
    "list entry replaced": lambda m: m.model.layers.__setitem__(0, copy.deepcopy(m.model.layers[0])),
    "activation": lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.GELU()),
    "configured activation": lambda m: setattr(m.config, "hidden_act", "gelu"),
    "parameter replaced": lambda m: setattr(m.model.norm, "weight", nn.Parameter(torch.ones(32))),
    "parameter removed": lambda m: setattr(m.model.norm, "weight", None),
    "parameter added": lambda m: m.model.register_parameter("prompt", nn.Parameter(torch.zeros(3))),
    "bias added": lambda m: setattr(m.get_submodule(Q), "bias", nn.Parameter(torch.zeros(32))),
    "storage": lambda m: setattr(m.model.norm.weight, "data", torch.ones(32)),
    "transposed": lambda m: setattr(m.get_submodule(Q).weight, "data", m.get_submodule(Q).weight.data.t()),
    "reinterpreted": lambda m: reinterpret(m.model.norm.weight.requires_grad_(False)),
    "cast": lambda m: m.to(torch.bfloat16),
    "parametrised": lambda m: parametrizations.weight_norm(m.get_submodule(Q)),
    "pruned": lambda m: prune.l1_unstructured(m.get_submodule(Q), "weight", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(tiny, change):
    """E13: whatever was changed after sharing, the glance notices, and `weights_changed` raises by name."""
    model = tiny.model()
    store, shared = tiny.share(model)
    seen = ModuleSnapshot(model)
    assert seen.holds()
    CHANGES[change](model)
    assert not seen.holds()
    with pytest.raises(TokenSpeedError):
        shared.weights_changed()
    assert not store.version.valid


NUMBERS = {
    "changed": lambda m: setattr(m.model.norm, "variance_epsilon", 0.1),
    "a tensor": lambda m: setattr(m.model.layers[1].self_attn, "scaling", torch.ones(2)),
    "deleted": lambda m: delattr(m.model.layers[0].self_attn, "is_causal"),
    "no longer None": lambda m: setattr(m.model.embed_tokens, "max_norm", 0.1),
    "configured": lambda m: setattr(m.config, "num_hidden_layers", 1),
}


@pytest.mark.parametrize("change", NUMBERS)
def test_every_number_is_seen(tiny, change):
    """Plain attributes that a forward reads; who shared the module says whether they are right."""
    model = tiny.model()
    seen = ModuleSnapshot(model)
    model.train(not model.training)
    assert seen.holds()
    NUMBERS[change](model)
    assert not seen.holds()


def test_a_forward_replaced_on_the_class_is_seen(tiny, monkeypatch):
    """E13: a library that patches a transformers class, for all models at once, after sharing."""
    model = tiny.model()
    _, shared = tiny.share(model)
    kind = type(model.model.layers[0].mlp)
    monkeypatch.setattr(kind, "forward", lambda self, x: x)
    with pytest.raises(TokenSpeedError, match="has its class's forward replaced"):
        shared.weights_changed()


def test_training_changes_nothing_that_counts(tiny):
    """E13: steps, modes and flags go unnoticed: values are not what a snapshot is about."""
    model = tiny.model()
    tiny.share(model)
    seen = ModuleSnapshot(model)
    tiny.train_step(model, torch.optim.AdamW(model.parameters()))
    model.eval().requires_grad_(False)
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    assert seen.holds()


def test_a_harmless_change_is_judged_once(tiny):
    """What a closer look accepts becomes what is expected: the next call is a glance again."""
    model = tiny.model()
    store, shared = tiny.share(model)
    model(input_ids=torch.arange(4)[None], output_hidden_states=True)
    assert not shared._seen.holds()
    shared.weights_changed()
    assert shared._seen.holds() and store.version.valid


def test_weights_changed_is_cheap_enough_for_each_step(tiny):
    """Contract 6: after a step the whole sync of 30 layers, 272 parameters, looks at each a few times."""
    model = tiny.model(
        hidden_size=8, intermediate_size=8, num_hidden_layers=30, num_attention_heads=1, num_key_value_heads=1
    )
    _, shared = tiny.share(model)
    parameters = len(list(model.parameters()))
    assert parameters >= 272
    assert calls_of(shared.weights_changed) < 16 * parameters
