"""A live module shared: one memory for trainer and engine, the module as good as before in every way."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from torch import nn

from tests.calls import calls_of
from tokenspeed_rl.weights import checksum

FUSED = {"layers.0.qkv.weight", "layers.0.gate_up.weight", "layers.1.qkv.weight", "layers.1.gate_up.weight"}
OPTIMIZERS = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "foreach AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "plain AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


def addresses(module: nn.Module) -> dict[str, int]:
    return {name: param.data_ptr() for name, param in module.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_adopted_bit_for_bit(tiny, family, tied, dtype):
    """E13: every slot fused, every parameter the same object, bits and flags, with its own storage."""
    model = tiny.model(family, tie_word_embeddings=tied).to(dtype).train()
    model.model.norm.weight.requires_grad_(False)
    before, objects = tiny.snapshot(model), list(model.parameters())
    store, shared = tiny.share(model)
    assert tiny.same_bits(tiny.snapshot(model), before)
    assert all(now is then for now, then in zip(model.parameters(), objects, strict=True))
    assert [p.requires_grad for p in objects] == [
        n != "model.norm.weight" for n, _ in model.named_parameters()
    ]
    assert model.training
    for param in objects:
        assert param.untyped_storage().nbytes() == param.nbytes and param.is_leaf
    assert len({param.untyped_storage().data_ptr() for param in objects}) == len(objects)
    assert all(len(tensors) == 1 for tensors in store.weights.values())
    assert {name: view.data_ptr() for name, view in store.parameters()} == {
        name: param.data_ptr() for name, param in model.named_parameters()
    }
    assert all(store.weights[name][0].data_ptr() % 64 == 0 for name in FUSED)
    receipt = shared.receipt
    assert (receipt.bytes, receipt.kind, receipt.version) == (0, "shared", "default")
    assert receipt.loaded == tuple(store.names.hf_names) and store.version.valid
    assert receipt.checksum == checksum(model.named_parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_was_shared(tiny, name):
    """E13: shared in mid-training, every later step gives the bits it gives without, and is seen."""
    model, twin = tiny.model("Qwen3"), tiny.model("Qwen3")
    optimizer, other = (OPTIMIZERS[name](m.parameters()) for m in (model, twin))
    for m, o in ((model, optimizer), (twin, other)):
        tiny.train_step(m, o)
    grads = {n: p.grad for n, p in model.named_parameters()}
    store, shared = tiny.share(model)
    assert all(p.grad is grads[n] for n, p in model.named_parameters())
    for _ in range(3):
        epoch = store.version.epoch
        for m, o in ((model, optimizer), (twin, other)):
            tiny.train_step(m, o)
        receipt = shared.weights_changed()
        assert tiny.same_bits(dict(model.named_parameters()), dict(twin.named_parameters()))
        assert tiny.same_bits(tiny.held(store), dict(twin.named_parameters()))
        assert store.version.epoch > epoch and receipt.bytes == 0
    assert store.version.label == "3"


@pytest.mark.parametrize(
    "write",
    [
        lambda model, other: model.load_state_dict(other.state_dict()),
        lambda model, other: [
            p.data.copy_(q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
        ],
        lambda model, other: [
            p.data.view(-1)[:].mul_(0).add_(q.data.view(-1))
            for p, q in zip(model.parameters(), other.parameters(), strict=True)
        ],
    ],
    ids=["load_state_dict", ".data.copy_", ".data in place"],
)
def test_writes_in_place_are_seen(tiny, write):
    """E13: load_state_dict and `.data` writes reach the engine without a copy."""
    model, other = tiny.model(), tiny.model(seed=1)
    store, shared = tiny.share(model)
    write(model, other)
    shared.weights_changed("v2")
    assert tiny.same_bits(tiny.held(store), dict(other.named_parameters()))
    assert store.version.label == "v2"


def test_two_engines_share_one_module(tiny):
    """Contract 6: the second engine reads the first one's adopted slots, fused, and moves nothing."""
    model = tiny.model("Qwen2")
    first, shared = tiny.share(model)
    before = addresses(model)
    second, also_shared = tiny.share(model)
    assert addresses(model) == before
    for name, tensors in first.weights.items():
        assert len(second.weights[name]) == 1 and second.weights[name][0].data_ptr() == tensors[0].data_ptr()
    del first, shared
    gc.collect()
    tiny.train_step(model, torch.optim.AdamW(model.parameters()))
    also_shared.weights_changed()
    assert tiny.same_bits(tiny.held(second), dict(model.named_parameters()))


@pytest.mark.parametrize("order", ["as named", "reversed", "gaps"])
def test_views_of_a_flat_buffer_are_read_as_they_lie(tiny, order):
    """Contract 6: nothing moves out of a flat buffer, as DeepSpeed's; what isn't adjacent stays unfused."""
    model = tiny.model()
    expected = tiny.snapshot(model)
    params = list(model.named_parameters())
    gap = 16 if order == "gaps" else 0
    flat = torch.zeros(sum(p.numel() + gap for _, p in params))
    at = 0
    for _, param in params if order != "reversed" else params[::-1]:
        place = flat[at : at + param.numel()].view(param.shape)
        param.data = place.copy_(param.data)
        at += param.numel() + gap
    before = addresses(model)
    store, shared = tiny.share(model)
    assert addresses(model) == before and tiny.same_bits(tiny.held(store), expected)
    assert {name for name, tensors in store.weights.items() if len(tensors) > 1} == (
        set() if order == "as named" else FUSED
    )
    flat.mul_(2)
    shared.weights_changed()
    assert tiny.same_bits(tiny.held(store), {name: tensor * 2 for name, tensor in expected.items()})


def test_parameters_in_shared_memory_are_not_moved(tiny):
    """A module that other processes read through shared memory must stay where they see it."""
    model = tiny.model().share_memory()
    before = addresses(model)
    store, _ = tiny.share(model)
    assert addresses(model) == before and tiny.same_bits(tiny.held(store), dict(model.named_parameters()))


def test_a_parameter_used_twice_is_not_moved(tiny):
    """Two layers with one projection: both keep reading it, so it may not move into a slot of one of them."""
    model = tiny.model()
    layers = model.model.layers
    layers[1].self_attn.k_proj.weight = layers[0].self_attn.k_proj.weight
    store, shared = tiny.share(model)
    assert layers[1].self_attn.k_proj.weight is layers[0].self_attn.k_proj.weight
    assert len(store.weights["layers.0.qkv.weight"]) == len(store.weights["layers.1.qkv.weight"]) == 3
    tiny.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    shared.weights_changed()
    assert tiny.same_bits(tiny.held(store), dict(model.named_parameters(remove_duplicate=False)))


@pytest.mark.parametrize("wrap", ["compile", "compiled layer", "DataParallel", "DistributedDataParallel"])
def test_wrappers_are_seen_through(tiny, wrap):
    """E3: compile and data parallel wrappers change names, not the computation."""
    model = tiny.model()
    wrapped: nn.Module = model
    if wrap == "compile":
        wrapped = torch.compile(model)
    elif wrap == "compiled layer":
        model.model.layers[1] = torch.compile(model.model.layers[1])
    elif wrap == "DataParallel":
        wrapped = nn.DataParallel(model)
    else:
        rendezvous = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=rendezvous, rank=0, world_size=1)
        wrapped = nn.parallel.DistributedDataParallel(model)
    try:
        store, shared = tiny.share(wrapped, plain=model)
        shared.weights_changed()
        shared.check_storage()
        held = {name.replace("_orig_mod.", ""): param for name, param in model.named_parameters()}
        assert tiny.same_bits(tiny.held(store), held)
    finally:
        if wrap == "DistributedDataParallel":
            torch.distributed.destroy_process_group()


def test_called_under_inference_mode_the_module_still_trains(tiny):
    """In-process manners: no inference tensor gets into the module, and no mode is left changed."""
    model = tiny.model()
    with torch.inference_mode():
        store, shared = tiny.share(model)
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    tiny.train_step(model, torch.optim.AdamW(model.parameters()))
    shared.weights_changed()
    assert tiny.same_bits(tiny.held(store), dict(model.named_parameters()))


def test_sharing_between_forward_and_backward_keeps_the_gradients(tiny):
    """A graph recorded before the move still has its values: gradients equal those without sharing."""
    grads = []
    for moved in (False, True):
        model = tiny.model()
        ids = torch.arange(16).view(2, 8)
        loss = model(input_ids=ids, labels=ids).loss
        if moved:
            tiny.share(model)
        loss.backward()
        grads.append({name: param.grad for name, param in model.named_parameters()})
    assert tiny.same_bits(*grads)


def test_the_module_outlives_the_engine_and_leaves_nothing_behind(tiny):
    """Contract 6: adopted memory belongs to the module; when both are gone, so is every object of it."""
    model = tiny.model()
    before = tiny.snapshot(model)
    store, shared = tiny.share(model)
    watched = [weakref.ref(model), weakref.ref(shared), weakref.ref(store)]
    del store, shared
    gc.collect()
    assert [ref() is None for ref in watched] == [False, True, True]
    assert tiny.same_bits(tiny.snapshot(model), before)
    tiny.train_step(model, torch.optim.AdamW(model.parameters()))
    del model
    gc.collect()
    assert watched[0]() is None


def test_memory_stays_flat_over_many_modules(tiny):
    """Module after module shared and dropped: the process keeps none of their memory."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def once() -> None:
        model = tiny.model(hidden_size=256, intermediate_size=1024, num_hidden_layers=1)  # 4.3 MB
        tiny.share(model)

    for _ in range(5):
        once()
    gc.collect()
    start = resident()
    for _ in range(20):
        once()
    gc.collect()
    assert resident() - start < 20e6


def test_a_forked_worker_leaves_the_parent_alone(tiny):
    """What a DataLoader worker writes or frees in its copy of the process isn't seen here."""
    model = tiny.model()
    store, shared = tiny.share(model)
    before = tiny.snapshot(model)
    child = os.fork()
    if child == 0:
        for param in model.parameters():
            param.data.fill_(7.0)
        del store, shared, model
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    loader = torch.utils.data.DataLoader(range(8), batch_size=2, num_workers=2)
    assert sum(int(batch.sum()) for batch in loader) == 28
    assert tiny.same_bits(tiny.snapshot(model), before) and tiny.same_bits(tiny.held(store), before)
    shared.check_storage()


def test_the_interpreter_exits_cleanly_with_modules_still_shared():
    """Exit code 0 and not a word, though parameters over adopted memory are alive to the very end."""
    script = """
        import torch
        from torch import nn
        from tokenspeed_rl.alias import tensor_at
        block = torch.zeros(16)
        param = nn.Parameter(torch.zeros(16))
        param.data = tensor_at(block.data_ptr(), (16,), dtype=block.dtype, device=block.device, owner=block)
        optimizer = torch.optim.AdamW([param], fused=True)
        param.sum().backward()
        optimizer.step()
        nn.kept = param
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_storage_check_is_cheap_enough_for_each_admission(tiny):
    """Contract 6: storage is checked at every admission: each of some 300 parameters is looked at briefly."""
    model = tiny.model(
        hidden_size=8, intermediate_size=8, num_hidden_layers=32, num_attention_heads=1, num_key_value_heads=1
    )
    _, shared = tiny.share(model)
    parameters = len(list(model.parameters()))
    assert parameters > 280
    assert calls_of(shared.check_storage) < 10 * parameters
