"""A module that computes something else than the engine is refused by name, and left exactly as it was."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import parametrizations, prune
from transformers import LlamaForCausalLM

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.weights import share

MLP = "model.layers.1.mlp"
Q = "model.layers.0.self_attn.q_proj"


class LlamaRMSNorm(nn.Module):
    """Somebody's own norm, under the family's name."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x):
        return x * self.weight


class OwnLlama(LlamaForCausalLM):
    """A user's subclass, which may compute anything."""


class WiderLinear(nn.Linear):
    """A projection that is nearly a plain one."""


def set_module(model, name, make):
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, make(model.get_submodule(name)))


def add_hook(model, name, pre=False):
    module = model.get_submodule(name)
    (module.register_forward_pre_hook if pre else module.register_forward_hook)(lambda *_: None)


def own_forward(model, name):
    module = model.get_submodule(name)
    module.forward = MethodType(type(module).forward, module)


def wider(old):
    new = WiderLinear(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    return new


def cast_one(model, name, dtype):
    param = model.get_parameter(name)
    param.data = param.data.to(dtype)


REFUSED = {
    "forward hook": (lambda m: add_hook(m, MLP), f"{MLP} has a forward hook"),
    "forward pre-hook": (lambda m: add_hook(m, Q, pre=True), f"{Q} has a forward hook"),
    "hook on the module itself": (
        lambda m: m.register_forward_hook(lambda *_: None),
        "the module itself has a forward",
    ),
    "forward of its own": (lambda m: own_forward(m, MLP), f"{MLP} has a forward of its own"),
    "subclassed projection": (lambda m: set_module(m, Q, wider), f"{Q} is "),
    "own norm of the same name": (
        lambda m: set_module(m, "model.norm", lambda old: LlamaRMSNorm(old.weight)),
        "model.norm is ",
    ),
    "other activation": (
        lambda m: set_module(m, MLP + ".act_fn", lambda old: nn.GELU()),
        f"{MLP}.act_fn is torch.nn.modules.activation.GELU, not the config's 'silu'",
    ),
    "identity for a norm": (
        lambda m: set_module(m, "model.layers.0.input_layernorm", lambda old: nn.Identity()),
        "model.layers.0.input_layernorm",
    ),
    "wrapped layer": (
        lambda m: set_module(m, MLP, lambda old: nn.Sequential(old)),
        f"{MLP} is torch.nn.modules.container.Sequential",
    ),
    "extra module": (lambda m: m.add_module("value_head", nn.Linear(32, 1)), "value_head is "),
    "extra parameter": (
        lambda m: m.model.register_parameter("prompt", nn.Parameter(torch.zeros(3))),
        "model.prompt is no weight of the model",
    ),
    "new bias": (
        lambda m: setattr(m.get_submodule(Q), "bias", nn.Parameter(torch.zeros(32))),
        f"{Q}.bias is no weight of the model",
    ),
    "parametrised projection": (
        lambda m: parametrizations.weight_norm(m.get_submodule(Q)),
        f"{Q} is torch.nn.utils.parametrize.ParametrizedLinear",
    ),
    "pruned projection": (lambda m: prune.l1_unstructured(m.get_submodule(Q), "weight", 0.5), Q),
    "fewer layers": (
        lambda m: m.model.layers.__delitem__(1),
        "model.layers.1.input_layernorm.weight is missing",
    ),
    "other shape": (
        lambda m: m.resize_token_embeddings(100),
        "model.embed_tokens.weight has shape [100, 32], not [96, 32]",
    ),
    "one half precision parameter": (
        lambda m: cast_one(m, "model.norm.weight", torch.bfloat16),
        "model.norm.weight is torch.bfloat16, but the engine's dtype is torch.float32",
    ),
    "one meta parameter": (lambda m: m.model.norm.to("meta"), "model.norm.weight is on the meta device"),
    "freed parameter": (
        lambda m: m.model.norm.weight.untyped_storage().resize_(0),
        "model.norm.weight is without its memory",
    ),
    "parameter cut short": (
        lambda m: m.get_submodule(Q).weight.untyped_storage().resize_(32 * 32 * 4 - 1),
        f"{Q}.weight is without its memory",
    ),
    "integer parameter": (
        lambda m: setattr(
            m.model.norm, "weight", nn.Parameter(torch.ones(32, dtype=torch.int8), requires_grad=False)
        ),
        "model.norm.weight is torch.int8",
    ),
    "autocast by accelerate": (
        lambda m: Accelerator(cpu=True, mixed_precision="bf16").prepare(m),
        "the module itself has a forward of its own",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused_by_name_and_nothing_moved(tiny, why):
    """E13: every way of computing something else: named, with module and store exactly as before."""
    model = tiny.model()
    store = tiny.store(model.config)
    change, message = REFUSED[why]
    change(model)
    objects = {name: (id(param), param.data_ptr()) for name, param in model.named_parameters()}
    with pytest.raises(ConfigError) as caught:
        share(model, store, tiny.classes())
    assert message in str(caught.value) and "LlamaForCausalLM" in str(caught.value)
    assert {name: (id(param), param.data_ptr()) for name, param in model.named_parameters()} == objects
    assert store.weights == {} and store.version.epoch == 0 and not store.version.valid


def test_refusal_leaves_a_standing_agreement_standing(tiny):
    """E13: a store that shares one module refuses another and goes on with the first."""
    model = tiny.model()
    store, shared = tiny.share(model)
    held, epoch = dict(store.weights), store.version.epoch
    with pytest.raises(ConfigError):
        share(tiny.model(hidden_size=64), store, tiny.classes())
    assert store.version.epoch == epoch and store.version.valid
    assert all(store.weights[name] is tensors for name, tensors in held.items())
    shared.weights_changed()


@pytest.mark.parametrize(
    "make",
    [
        lambda tiny: OwnLlama(tiny.config()),
        lambda tiny: tiny.model("Qwen3"),
        lambda tiny: tiny.model().model,
        lambda tiny: nn.Linear(4, 4),
    ],
    ids=["subclass", "other family", "without head", "no model"],
)
def test_another_class_is_refused(tiny, make):
    """E13: only the exact class that the engine's decoder mirrors is taken."""
    with pytest.raises(ConfigError, match="must be exactly a transformers LlamaForCausalLM"):
        share(make(tiny), tiny.store(tiny.config()), tiny.classes())


def test_a_class_whose_forward_was_patched_is_refused(tiny, monkeypatch):
    """E13: kernels patched into the class change what every instance computes."""
    model = tiny.model()
    original = type(model.model.norm).forward

    def forward(self, hidden_states):
        return original(self, hidden_states)

    monkeypatch.setattr(type(model.model.norm), "forward", forward)
    with pytest.raises(ConfigError, match=r"input_layernorm has its class's forward replaced"):
        share(model, tiny.store(model.config), tiny.classes())


def test_a_sharded_parameter_is_refused(tiny):
    """E13: FSDP2 keeps a shard here; the rest is elsewhere."""
    model = tiny.model()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        norm = model.model.norm
        whole = norm.weight
        norm.weight = nn.Parameter(distribute_tensor(whole.detach(), mesh))
        with pytest.raises(ConfigError, match=r"model\.norm\.weight is a DTensor"):
            share(model, tiny.store(model.config), tiny.classes())
        norm.weight = whole
        fully_shard(norm, mesh=mesh)
        with pytest.raises(ConfigError, match=r"model\.norm is .*FSDPLlamaRMSNorm"):
            share(model, tiny.store(model.config), tiny.classes())
    finally:
        torch.distributed.destroy_process_group()


def test_many_faults_are_counted(tiny):
    """The message stays short: the first few, and how many more."""
    model = tiny.model().to(torch.float64)
    with pytest.raises(ConfigError, match="and 18 more") as caught:
        share(model, tiny.store(model.config), tiny.classes())
    assert len(str(caught.value)) < 600


ACCEPTED = {
    "train mode": lambda m: m.train(),
    "frozen": lambda m: m.requires_grad_(False),
    "full backward hook": lambda m: m.model.layers[0].register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda m: m.model.layers[0].register_full_backward_pre_hook(lambda *_: None),
    "gradient hook": lambda m: m.model.norm.weight.register_hook(lambda grad: grad),
    "state dict hook": lambda m: m.register_state_dict_post_hook(lambda *_: None),
    "hidden states recorded": lambda m: m(input_ids=torch.arange(4)[None], output_hidden_states=True),
    "inputs marked for autograd": lambda m: m.enable_input_require_grads(),
    "prepared by accelerate": lambda m: Accelerator(cpu=True).prepare(m, torch.optim.AdamW(m.parameters())),
    "gradients there": lambda m: m(
        input_ids=torch.arange(4)[None], labels=torch.arange(4)[None]
    ).loss.backward(),
}


@pytest.mark.parametrize("why", ACCEPTED)
def test_what_leaves_forward_values_alone_is_accepted(tiny, why):
    """E13: backward hooks, modes, frozen weights, transformers' recording hooks, fp32 `prepare`: fine."""
    model = tiny.model()
    ACCEPTED[why](model)
    if why in ("hidden states recorded", "inputs marked for autograd"):
        assert any(module._forward_hooks for module in model.modules())  # else nothing is tested here
    store, shared = tiny.share(model)
    shared.weights_changed()
    assert tiny.same_bits(tiny.held(store), dict(model.named_parameters()))
