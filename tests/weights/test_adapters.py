"""LoRA adapters of a PEFT module: aliased beside the base, refused where the engine would compute otherwise,
and followed through all that a trainer does with them."""

from __future__ import annotations

from types import MethodType

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.calls import calls_of
from tokenspeed_rl.errors import ConfigError, WeightsInvalidError, WeightUpdateError
from tokenspeed_rl.weights import checksum, share, unwrap
from tokenspeed_rl.weights.mapping import NameMap
from tokenspeed_rl.weights.update import WeightUpdate

Q = "model.layers.0.self_attn.q_proj"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def config(**fields):
    return LoraConfig(
        **{"r": 2, "lora_alpha": 3, "target_modules": ALL, "init_lora_weights": False, **fields}
    )


def adapted(model, **fields):
    """`model` with an adapter "x" of rank 2 on all projections."""
    return get_peft_model(model, config(**fields), adapter_name="x")


def layer_of(module):
    return unwrap(module).get_submodule(Q)


@pytest.fixture
def pair(tiny):
    """A PEFT module with the adapters "x" (everywhere) and "y" (rank 4 on three projections), shared."""
    module = adapted(tiny.model())
    module.add_adapter("y", config(r=4, target_modules=["k_proj", "o_proj", "down_proj"]))
    store, shared = tiny.share(module, unwrap(module))
    return module, store, shared


def lies_in(module, store):
    """Every low-rank pair that the store reads is a pair of the module's parameters, in the same memory."""
    params = {name.removeprefix("base_model.model."): param for name, param in module.named_parameters()}
    found = {name for name in params if ".lora_" in name}
    for name, adapter in store.adapters.items():
        for part in adapter.parts:
            for kind, tensor in (("lora_A", part.down), ("lora_B", part.up)):
                key = f"{part.module}.{kind}.{name}.weight"
                assert tensor.data_ptr() == params[key].data_ptr() and tensor.shape == params[key].shape
                found.remove(key)
    return not found


def test_base_and_adapters_are_the_modules_own(tiny, pair):
    """H13: base weights move into fused slots bit for bit, as of a plain module; adapters stay where they
    were; nothing is held twice, and training goes on in place."""
    module, store, shared = pair
    fresh = adapted(tiny.model())
    assert tiny.same_bits(tiny.held(store), tiny.held(tiny.share(fresh, unwrap(fresh))[0]))
    assert lies_in(module, store) and all(len(tensors) == 1 for tensors in store.weights.values())
    base = unwrap(module)
    for part, place in (("q_proj", 0), ("k_proj", 32), ("v_proj", 48)):
        weight = base.get_parameter(f"model.layers.0.self_attn.{part}.base_layer.weight")
        assert weight.data_ptr() == store.weights["layers.0.qkv.weight"][0][place].data_ptr()
        assert weight.untyped_storage().nbytes() == weight.nbytes
    assert shared.receipt.bytes == 0
    assert store.adapters["x"].ranks == [2] and store.adapters["y"].ranks == [4]
    assert [p.start for p in store.adapters["x"].slots["layers.0.qkv.weight"]] == [0, 32, 48]
    assert [p.start for p in store.adapters["y"].slots["layers.1.qkv.weight"]] == [32]
    before = {name: tensor.clone() for name, tensor in store.parameters()}
    module.set_adapter("x")
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.1)
    tiny.train_step(base, optimizer)
    shared.weights_changed()
    changed = {name for name, tensor in store.parameters() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".x." in name} and lies_in(module, store)


def test_names_and_checksum_are_the_trainers(pair):
    """Contract 6: base weights go by their Hugging Face names, adapters by PEFT's; both digest the same."""
    module, store, shared = pair
    names = [name for name, _ in store.parameters()]
    assert names[: len(store.names.hf_names)] == store.names.hf_names
    assert len(names) == len(dict(module.named_parameters())) == len(shared.receipt.loaded)
    assert f"{Q}.lora_A.x.weight" in names and f"{Q}.weight" in names
    digest = store.checksum()
    assert digest == checksum(module.named_parameters()) == checksum(module.state_dict())
    assert digest == checksum(unwrap(module).named_parameters())
    for name, param in module.named_parameters():
        [found] = store.find(name)
        assert found.data_ptr() == param.data_ptr() and found.shape == param.shape
    with torch.no_grad():
        layer_of(module).lora_B["x"].weight[0, 0] += 1
    assert store.checksum() == checksum(module.named_parameters()) != digest


def test_a_peft_state_is_no_update_of_an_engines_own_weights(tiny):
    """Contract 6: its base names are understood; its adapters are refused, not dropped silently."""
    module = adapted(tiny.model())
    names = NameMap(tiny.slots(tiny.config()))
    base = [name for name, _ in module.named_parameters() if "lora_" not in name]
    assert all(names.resolve(name) is not None for name in base)
    store = tiny.store(tiny.config())
    store.allocate()
    update = WeightUpdate(store, kind="tensor", label=None, partial=False, atomic=False)
    with pytest.raises(WeightUpdateError, match="28 unknown"):
        update.check_whole(list(module.named_parameters()))


def rename_class(module, home, name):
    module.__class__ = type(name, (type(module),), {"__module__": home})


def mix_dtypes(layer):
    layer.lora_B["x"].weight.data = layer.lora_B["x"].weight.data.to(torch.bfloat16)


def parameter_scaling(layer):
    layer.scaling["x"] = torch.ones(2)


def own_forward(layer):
    layer.forward = MethodType(type(layer).forward, layer)


REFUSED = {
    "merged": (lambda m: adapted(m), lambda p: p.merge_adapter(), f"{Q} has x merged into its weight"),
    "DoRA": (lambda m: adapted(m, use_dora=True), None, f"{Q} has 'x' as a DoraLinearVariant"),
    "activated LoRA": (
        lambda m: adapted(m, alora_invocation_tokens=[1]),
        None,
        f"{Q} has 'x' as a ALoraLinearVariant",
    ),
    "biased": (lambda m: adapted(m, lora_bias=True), None, f"{Q}.lora_B.x has a bias (lora_bias)"),
    "embedding": (
        lambda m: adapted(m, target_modules=["embed_tokens"]),
        None,
        "model.embed_tokens is peft.tuners.lora.layer.Embedding",
    ),
    "head": (
        lambda m: adapted(m, target_modules=["q_proj", "lm_head"]),
        None,
        "lm_head has adapters, which the engine knows on q, k, v, o, gate, up, down projections",
    ),
    "modules_to_save": (
        lambda m: adapted(m, modules_to_save=["lm_head"]),
        None,
        "lm_head is peft.utils.other.ModulesToSaveWrapper",
    ),
    "trained tokens": (
        lambda m: adapted(m, trainable_token_indices=[1, 2]),
        None,
        "model.embed_tokens is peft.utils.other.TrainableTokensWrapper",
    ),
    "single parameters": (
        lambda m: adapted(m, target_modules=[], target_parameters=["q_proj.weight"]),
        None,
        f"{Q} is peft.tuners.lora.layer.ParamWrapper",
    ),
    "quantised base": (
        lambda m: adapted(m),
        lambda p: rename_class(layer_of(p).base_layer, "bitsandbytes.nn.modules", "Linear4bit"),
        f"{Q}.base_layer is bitsandbytes.nn.modules.Linear4bit",
    ),
    "quantised LoRA": (
        lambda m: adapted(m),
        lambda p: rename_class(layer_of(p), "peft.tuners.lora.bnb", "Linear4bit"),
        f"{Q} is peft.tuners.lora.bnb.Linear4bit",
    ),
    "two dtypes": (
        lambda m: adapted(m),
        lambda p: mix_dtypes(layer_of(p)),
        f"{Q} has 'x' in torch.float32 and torch.bfloat16",
    ),
    "learned scaling": (
        lambda m: adapted(m),
        lambda p: parameter_scaling(layer_of(p)),
        f"{Q} has a Tensor as the scaling of 'x'",
    ),
    "wrong shape": (
        lambda m: adapted(m),
        lambda p: setattr(layer_of(p).lora_A["x"], "weight", nn.Parameter(torch.zeros(3, 32))),
        f"{Q} has 'x' in shapes [3, 32] and [32, 2]",
    ),
    "half an adapter": (
        lambda m: adapted(m),
        lambda p: layer_of(p).lora_B.pop("x"),
        f"{Q} has a lora_A without its lora_B",
    ),
    "integer adapter": (
        lambda m: adapted(m),
        lambda p: [
            setattr(pair["x"], "weight", nn.Parameter(pair["x"].weight.data.int(), requires_grad=False))
            for pair in (layer_of(p).lora_A, layer_of(p).lora_B)
        ],
        f"{Q}.lora_A.x.weight is torch.int32",
    ),
    "freed adapter": (
        lambda m: adapted(m),
        lambda p: layer_of(p).lora_A["x"].weight.untyped_storage().resize_(0),
        f"{Q}.lora_A.x.weight is without its memory",
    ),
    "meta adapter": (
        lambda m: adapted(m),
        lambda p: layer_of(p).lora_A["x"].to("meta"),
        f"{Q}.lora_A.x.weight is on the meta device",
    ),
    "other dropout": (
        lambda m: adapted(m),
        lambda p: layer_of(p).lora_dropout.update({"x": nn.ReLU()}),
        f"{Q}.lora_dropout.x is a ReLU",
    ),
    "own low-rank layer": (
        lambda m: adapted(m),
        lambda p: layer_of(p).lora_A.update({"x": nn.Sequential(nn.Linear(32, 2))}),
        f"{Q}.lora_A.x is torch.nn.modules.container.Sequential",
    ),
    "hook on the layer": (
        lambda m: adapted(m),
        lambda p: layer_of(p).register_forward_hook(lambda *_: None),
        f"{Q} has a forward hook",
    ),
    "hook on the base": (
        lambda m: adapted(m),
        lambda p: layer_of(p).base_layer.register_forward_hook(lambda *_: None),
        f"{Q}.base_layer has a forward hook",
    ),
    "hook on the adapter": (
        lambda m: adapted(m),
        lambda p: layer_of(p).lora_B["x"].register_forward_pre_hook(lambda *_: None),
        f"{Q}.lora_B.x has a forward hook",
    ),
    "hook on the wrapper": (
        lambda m: adapted(m),
        lambda p: p.register_forward_hook(lambda *_: None),
        "peft.peft_model.PeftModel has a forward hook",
    ),
    "hook within the wrapper": (
        lambda m: adapted(m),
        lambda p: p.base_model.register_forward_hook(lambda *_: None),
        "peft.tuners.lora.model.LoraModel has a forward hook",
    ),
    "forward of its own": (
        lambda m: adapted(m),
        lambda p: own_forward(layer_of(p)),
        f"{Q} has a forward of its own",
    ),
    "IA3": (
        lambda m: get_peft_model(m, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
        None,
        "peft.peft_model.PeftModel",
    ),
    "prompt tuning": (
        lambda m: get_peft_model(m, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        None,
        "peft.peft_model.PeftModelForCausalLM",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused_by_name_and_nothing_moved(tiny, why):
    """H13: whatever the engine would compute otherwise than PEFT: named, with module and store as before."""
    make, change, message = REFUSED[why]
    model = tiny.model()
    module = make(model)
    if change is not None:
        change(module)
    store = tiny.store(model.config)
    places = {name: param.data_ptr() for name, param in module.named_parameters() if not param.is_meta}
    with pytest.raises(ConfigError) as caught:
        share(module, store, tiny.classes())
    assert message in str(caught.value)
    assert {n: param.data_ptr() for n, param in module.named_parameters() if not param.is_meta} == places
    assert store.weights == {} and store.adapters == {} and not store.version.valid


def in_ddp(model):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return DistributedDataParallel(adapted(model))
    finally:
        torch.distributed.destroy_process_group()


def with_checkpointing(model):
    module = adapted(model)
    module.gradient_checkpointing_enable()
    module.enable_input_require_grads()
    return module.train()


ACCEPTED = {
    "injected": lambda m: peft.inject_adapter_in_model(config(), m, adapter_name="x"),
    "causal": lambda m: adapted(m, task_type="CAUSAL_LM"),
    "rank-stabilised": lambda m: adapted(m, use_rslora=True),
    "with dropout, training": lambda m: adapted(m, lora_dropout=0.5).train(),
    "gradient checkpointing": with_checkpointing,
    "initialised by PiSSA": lambda m: adapted(m, init_lora_weights="pissa"),
    "regular expression": lambda m: adapted(m, target_modules=".*proj", exclude_modules=["lm_head"]),
    "compiled": lambda m: torch.compile(adapted(m)),
    "in DistributedDataParallel": in_ddp,
}


@pytest.mark.parametrize("why", ACCEPTED)
def test_what_computes_plain_lora_is_accepted(tiny, why):
    """H13: whoever put the adapters there, and whatever wraps the module."""
    model = tiny.model()
    module = ACCEPTED[why](model)
    store, shared = tiny.share(module, model)
    assert list(store.adapters) == ["x"] and len(list(store.adapters["x"].parts)) == 14
    shared.check_storage()
    shared.weights_changed()
    assert store.checksum() == checksum(module.named_parameters())


def test_ranks_alphas_and_targets_may_differ(tiny):
    """H13: per-module patterns, and adapters on any subset; rslora differs in its scaling only."""
    module = adapted(
        tiny.model(), rank_pattern={"q_proj": 5}, alpha_pattern={"down_proj": 7}, use_rslora=True
    )
    module.add_adapter("y", config(target_modules=["up_proj"], layers_to_transform=[1]))
    store, _ = tiny.share(module, unwrap(module))
    scalings = {part.module: part.scaling for part in store.adapters["x"].parts}
    assert store.adapters["x"].ranks == [2, 5]
    assert scalings[Q] == pytest.approx(3 / 5**0.5)
    assert scalings["model.layers.1.mlp.down_proj"] == pytest.approx(7 / 2**0.5)
    [only] = store.adapters["y"].parts
    assert (only.module, only.start, only.scaling) == ("model.layers.1.mlp.up_proj", 48, 1.5)


def test_layers_that_share_their_adapters_memory(tiny):
    """Base weights that can't move, as two of them are one, are aliased where they are."""
    model = tiny.model()
    model.model.layers[1].self_attn.k_proj.weight = model.model.layers[0].self_attn.k_proj.weight
    module = adapted(model)
    store, shared = tiny.share(module, model)
    assert [len(store.weights[f"layers.{layer}.qkv.weight"]) for layer in (0, 1)] == [3, 3]
    assert lies_in(module, store)
    shared.weights_changed()


@torch.no_grad()
def reallocate(layer):
    layer.lora_A["x"].weight.data = layer.lora_A["x"].weight.data.clone() + 1


def replace(layer):
    layer.lora_B["x"].weight = nn.Parameter(layer.lora_B["x"].weight.data + 1)


MOVES = {
    "re-allocated": (lambda p: reallocate(layer_of(p)), {"x": [2], "y": [4]}),
    "replaced": (lambda p: replace(layer_of(p)), {"x": [2], "y": [4]}),
    "deleted": (lambda p: p.delete_adapter("y"), {"x": [2]}),
    "deleted and made anew": (
        lambda p: p.delete_adapter("y") or p.add_adapter("y", config(r=3)),
        {"x": [2], "y": [3]},
    ),
    "cast": (
        lambda p: [m.to(torch.float64) for m in unwrap(p).modules() if is_low_rank(m)],
        {"x": [2], "y": [4]},
    ),
}


def is_low_rank(module):
    return isinstance(module, nn.Linear) and min(module.weight.shape) in (2, 4)


@pytest.mark.parametrize("move", MOVES)
def test_adapters_that_moved_are_found_and_read_anew(pair, move):
    """E13, H13: at a new request the weights are invalid; `weights_changed` reads what there is now."""
    module, store, shared = pair
    change, expected = MOVES[move]
    change(module)
    with pytest.raises(WeightsInvalidError, match="weights_changed"):
        shared.check_storage()
    assert not store.version.valid
    shared.weights_changed()
    assert store.version.valid and lies_in(module, store)
    assert {name: adapter.ranks for name, adapter in store.adapters.items()} == expected
    shared.check_storage()


ADDED = {
    "on layers that have one": lambda p: p.add_adapter("c", config(r=3, target_modules=["q_proj"])),
    "injected": lambda p: peft.inject_adapter_in_model(
        config(r=3, target_modules=["q_proj"]), unwrap(p), adapter_name="c"
    ),
}


@pytest.mark.parametrize("way", ADDED)
def test_a_new_adapter_is_there_from_weights_changed_on(pair, way):
    """H13: nothing that the engine reads has changed before, so that it goes on meanwhile."""
    module, store, shared = pair
    ADDED[way](module)
    shared.check_storage()
    assert list(store.adapters) == ["x", "y"]
    shared.weights_changed()
    assert store.adapters["c"].ranks == [3] and lies_in(module, store)


def test_adapters_come_and_go_around_a_shared_base(tiny):
    """H13: the base stays shared, where it is, while adapters are put beside it and taken away whole."""
    model = tiny.model()
    store, shared = tiny.share(model)
    held = {name: tensors[0].data_ptr() for name, tensors in store.weights.items()}
    for _ in range(2):
        module = adapted(model)
        shared.check_storage()
        assert store.adapters == {}
        shared.weights_changed()
        assert list(store.adapters) == ["x"] and lies_in(module, store)
        assert module.unload() is model
        shared.weights_changed()
        assert store.adapters == {}
    assert {name: tensors[0].data_ptr() for name, tensors in store.weights.items()} == held


def test_scalings_are_those_of_the_last_weights_changed(pair):
    """H13: `set_scale`, `scaling[...] =` and PEFT's `scale_layer`."""
    module, store, shared = pair
    layer = layer_of(module)

    def scaling():
        return next(part.scaling for part in store.adapters["x"].parts if part.module == Q)

    assert scaling() == 1.5
    for change, expected in (
        (lambda: layer.set_scale("x", 4.0), 6.0),
        (lambda: layer.scaling.update(x=0.25), 0.25),
        (lambda: layer.scale_layer(2.0), 0.5),
    ):
        before = scaling()
        change()
        assert scaling() == before
        shared.weights_changed()
        assert scaling() == expected


CHANGES = {
    "merged": (lambda p: p.merge_adapter(["x"]), lambda p: p.unmerge_adapter(), "merged into its weight"),
    "hook": (
        lambda p: layer_of(p).register_forward_hook(lambda *_: None),
        lambda p: layer_of(p)._forward_hooks.clear(),
        "forward hook",
    ),
    "hook on the wrapper": (
        lambda p: p.register_forward_hook(lambda *_: None),
        lambda p: p._forward_hooks.clear(),
        "forward hook",
    ),
    "variant": (
        lambda p: p.add_adapter("c", config(use_dora=True)),
        lambda p: p.delete_adapter("c"),
        "DoraLinearVariant",
    ),
    "adapter of the head": (
        lambda p: p.add_adapter("c", config(target_modules=["lm_head"])),
        lambda p: p.delete_adapter("c"),
        "lm_head has adapters",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_computes_something_else_is_refused_until_it_is_undone(pair, change):
    """E13: the next `weights_changed` finds it, the weights are invalid, and undone they are valid again."""
    module, store, shared = pair
    do, undo, message = CHANGES[change]
    adapters = store.adapters
    do(module)
    with pytest.raises(ConfigError, match=message):
        shared.weights_changed()
    assert not store.version.valid and store.adapters is adapters
    undo(module)
    if change == "adapter of the head":  # PEFT leaves its layer there, empty
        with pytest.raises(ConfigError, match=message):
            shared.weights_changed()
        module.unload()
        assert list(store.adapters) == ["x", "y"]
    shared.weights_changed()
    assert store.version.valid


def test_a_base_that_moved_needs_sharing_again(tiny, pair):
    """E13: as of a plain module; `weights_changed` does not heal that."""
    module, store, shared = pair
    weight = layer_of(module).base_layer.weight
    weight.data = weight.data.clone()
    for check in (shared.check_storage, shared.weights_changed):
        with pytest.raises(WeightsInvalidError, match=f"{Q}.weight was .*share_weights"):
            check()
    again = share(module, store, tiny.classes())
    again.check_storage()
    assert store.version.valid and lies_in(module, store)


def test_what_peft_switches_for_itself_changes_nothing(pair):
    """H13: a request names its adapter, so which one is active, or none, is no concern of the engine's."""
    module, store, shared = pair
    before = store.adapters
    module.set_adapter("y")
    with module.disable_adapter():
        shared.check_storage()
        shared.weights_changed()
    module.train()
    shared.weights_changed()
    assert list(store.adapters) == list(before) and lies_in(module, store)


def test_two_engines_of_one_peft_module(tiny, pair):
    """Another store reads the same memory; the adopted base needs no second move."""
    module, store, shared = pair
    other, _ = tiny.share(module, unwrap(module))
    assert all(other.weights[n][0].data_ptr() == t[0].data_ptr() for n, t in store.weights.items())
    assert lies_in(module, other)
    shared.check_storage()


def test_a_sync_with_adapters_everywhere_is_cheap(tiny):
    """Contract 6: with an adapter on each of 210 projections, a sync looks at each module a few times, and
    twice as many layers cost twice as much."""

    def calls(layers):
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
        module = adapted(tiny.model(num_hidden_layers=layers, **sizes))
        _, shared = tiny.share(module, unwrap(module))
        modules = len(list(module.modules()))
        return [calls_of(call) / modules for call in (shared.weights_changed, shared.check_storage)]

    for many, few in zip(calls(30), calls(15), strict=True):
        assert many < 1.1 * few and many < 10
