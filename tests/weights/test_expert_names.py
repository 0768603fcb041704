"""Experts by either of their names, packed as in live modules or one by one as in checkpoints: one set."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import ConfigError, WeightUpdateError
from tokenspeed_rl.weights import WeightsSender, checksum, flatten

FAMILIES = ("moe", "mixtral")
LAYER = "model.layers.1"
NAMES = {  # block, gate, up, down
    "moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}
EXPERTS = {"moe": 8, "mixtral": 4}
Named = dict[str, Tensor]


class Family:
    """Two sets of weights of a family, in both namings, and an engine that starts with the first."""

    def __init__(self, family: str, folder: Any, make_engine: Callable[..., Engine]) -> None:
        changes = {"mlp_only_layers": [0]} if family == "moe" else {}
        self.name, self.count = family, EXPERTS[family]
        self.models = [Tiny.model(family, seed=seed, **changes) for seed in range(2)]
        self.folders = [folder / str(number) for number in range(2)]
        for model, place in zip(self.models, self.folders, strict=True):
            model.save_pretrained(place)
        self.live = [dict(model.named_parameters()) for model in self.models]
        self.saved = [load_file(place / "model.safetensors") for place in self.folders]
        self.digests = [checksum(named) for named in self.live]
        self.engine = make_engine(self.folders[0])

    def expert(self, number: int, which: int, layer: str = LAYER) -> str:
        """The checkpoint's name of an expert's gate, up (1) or down (2)."""
        return f"{layer}.{NAMES[self.name][0]}.experts.{number}.{NAMES[self.name][1 + which]}.weight"

    def mixed(self, seed: int) -> list[tuple[str, Tensor]]:
        """The second set, every packed parameter by either naming, in any order."""
        rng = random.Random(seed)
        chosen: list[tuple[str, Tensor]] = []
        one_by_one = {name: t for name, t in self.saved[1].items() if name not in self.live[1]}
        for name, tensor in self.live[1].items():
            owner, _, last = name.rpartition(".mlp.")
            kinds = {"experts.gate_up_proj": (0, 1), "experts.down_proj": (2,)}
            if last in kinds and rng.random() < 0.5:
                parts = [self.expert(e, w, owner) for e in range(self.count) for w in kinds[last]]
                chosen += [(part, one_by_one[part]) for part in parts]
            else:
                chosen.append((name, tensor))
        rng.shuffle(chosen)
        return chosen


@pytest.fixture(params=FAMILIES)
def family(request: Any, tmp_path: Any, make_engine: Callable[..., Engine]) -> Family:
    return Family(request.param, tmp_path, make_engine)


def likeliest(model: PreTrainedModel) -> list[int]:
    ids = [1, 2, 3]
    for _ in range(8):
        ids.append(int(Tiny.logits(model, ids)[-1].argmax()))
    return ids[3:]


def outputs(engine: Engine) -> Any:
    return engine.generate(input_ids=[1, 2, 3], sampling_params={"temperature": 0, "max_new_tokens": 8})[
        "output_ids"
    ]


def test_a_checkpoint_is_the_module_that_was_saved(family: Family) -> None:
    """Contract 6: what save_pretrained wrote expert by expert is the live module's weights, under its names
    and, for whoever computes a checksum, under those of the checkpoint."""
    engine = family.engine
    found = dict(engine.named_parameters())
    assert found.keys() == family.live[0].keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in family.live[0].items())
    assert engine.weights_checksum() == family.digests[0] == checksum(family.saved[0])
    assert checksum(family.saved[1]) == family.digests[1] != family.digests[0]
    assert checksum(family.live[1], torch.bfloat16) == checksum(family.saved[1], torch.bfloat16)


@pytest.mark.parametrize("naming", ["live", "saved", "mixed 1", "mixed 2"])
@pytest.mark.parametrize("form", ["mapping", "iterator", "bucket", "bytes", "prefixed", "buckets of 3"])
def test_updates_by_either_naming(family: Family, naming: str, form: str) -> None:
    """E1, E3: names mixed, wrapped and shuffled, in any form: each piece once, the same weights."""
    pairs = family.mixed(int(naming[-1])) if "mixed" in naming else list(getattr(family, naming)[1].items())
    engine = family.engine
    if form == "buckets of 3":
        for at in range(0, len(pairs), 3):
            reply = engine.update_weights_from_tensor(
                flatten(pairs[at : at + 3]), partial=True, weight_version="w1"
            )
    else:
        made: dict[str, Callable[[], dict[str, Any]]] = {
            "mapping": lambda: {"named_tensors": dict(pairs)},
            "iterator": lambda: {"named_tensors": iter(pairs)},
            "bucket": lambda: {"named_tensors": flatten(pairs)},
            "bytes": lambda: {"serialized_named_tensors": [save({n: t.contiguous() for n, t in pairs})]},
            "prefixed": lambda: {"named_tensors": [(f"module._orig_mod.{n}", t) for n, t in pairs]},
        }
        reply = engine.update_weights_from_tensor(**made[form](), weight_version="w1")
        assert sorted(reply.report.loaded) == sorted(family.live[1])
    assert reply.report.missing == () and reply.report.version == "w1"
    assert engine.weights_checksum() == reply.report.checksum == family.digests[1]
    assert outputs(engine) == likeliest(family.models[1])


@pytest.mark.parametrize("naming", ["live", "saved", "mixed"])
def test_over_a_group(family: Family, naming: str) -> None:
    """Contract 6: a sender in either naming, tensor by tensor and in buckets."""
    named = dict(family.mixed(3)) if naming == "mixed" else getattr(family, naming)[1]
    engine, flattened = family.engine, naming != "live"
    fields = {"master_address": "127.0.0.1", "world_size": 2, "backend": "gloo", "timeout": 20.0}
    sender = WeightsSender(master_port=0, group_name="trainer", **fields)
    with ThreadPoolExecutor(1) as pool:
        joining = {**fields, "group_name": "trainer", "rank_offset": 1}
        engine.init_weights_update_group(**joining, master_port=sender.master_port)
        sending = pool.submit(sender.send, named, **({"bucket_bytes": 20_000} if flattened else {}))
        engine.update_weights_from_distributed(
            list(named),
            [str(tensor.dtype).removeprefix("torch.") for tensor in named.values()],
            [list(tensor.shape) for tensor in named.values()],
            group_name="trainer",
            load_format="flattened_bucket" if flattened else None,
            timeout=20.0,
        )
        sending.result(20.0)
    sender.close()
    assert engine.weights_checksum() == family.digests[1]


def test_from_disk(family: Family) -> None:
    """Contract 6: a checkpoint of single experts, as an update."""
    report = family.engine.update_weights_from_disk(str(family.folders[1])).report
    assert sorted(report.loaded) == sorted(family.live[1]) and report.checksum == family.digests[1]


def test_any_strides_and_dtypes(family: Family) -> None:
    """E5: packed and single experts transposed in memory and of other float dtypes are cast once."""
    rounded = {name: tensor.detach().bfloat16() for name, tensor in family.mixed(4)}
    turned = {
        name: tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.ndim > 1 else tensor
        for name, tensor in rounded.items()
    }
    report = family.engine.update_weights_from_tensor(turned).report
    assert report.checksum == checksum({name: tensor.float() for name, tensor in rounded.items()})


def refused(family: Family, named: Any, match: str) -> None:
    before = outputs(family.engine)
    with pytest.raises(WeightUpdateError, match=match):
        family.engine.update_weights_from_tensor(named)
    assert family.engine.weights_checksum() == family.digests[0] and outputs(family.engine) == before


def test_a_missing_expert_is_named(family: Family) -> None:
    """E2: one matrix of one expert by its own name, all of a layer's by the one packed name."""
    named = dict(family.saved[1])
    del named[family.expert(2, 1)]
    refused(family, named, rf"1 missing \(missing: {family.expert(2, 1)}\)")
    for number in range(family.count):
        for which in (0, 1):
            named.pop(family.expert(number, which), None)
    refused(family, named, rf"1 missing \(missing: {LAYER}.mlp.experts.gate_up_proj\)")


def test_unknown_and_misshapen_experts_are_named(family: Family) -> None:
    """E2: an expert too many, another family's name, a matrix turned round, gates without their ups."""
    saved = family.saved[1]
    extra = family.expert(family.count, 0)
    refused(family, saved | {extra: saved[family.expert(0, 0)]}, f"1 unknown .*unknown: {extra}")
    other = f"{LAYER}.mlp.experts.0.w1.weight"
    refused(family, saved | {other: saved[family.expert(0, 0)]}, f"1 unknown .*unknown: {other}")
    down = family.expert(0, 2)
    rows, columns = saved[down].shape
    turned = saved | {down: saved[down].T}
    refused(family, turned, rf"1 mis-shaped .*{down} \[{columns}, {rows}\] instead of \[{rows}, {columns}\]")
    packed = f"{LAYER}.mlp.experts.gate_up_proj"
    live = family.live[1]
    refused(family, live | {packed: live[packed].flatten(0, 1)}, f"1 mis-shaped .*{packed}")
    refused(family, live | {packed: live[packed][:, : rows // 2]}, f"1 mis-shaped .*{packed}")


def test_an_expert_given_packed_and_alone_is_given_twice(family: Family) -> None:
    """E2: which of the two would count depended on their order."""
    one = family.expert(1, 0)
    refused(family, family.live[1] | {one: family.saved[1][one]}, f"1 given twice .*{one}")
    router = f"{LAYER}.{NAMES[family.name][0]}.gate.weight"
    if router not in family.live[1]:  # one module, two names
        refused(family, family.live[1] | {router: family.saved[1][router]}, f"1 given twice .*{router}")


def test_one_expert_alone(family: Family) -> None:
    """Contract 6: `partial=True` changes just what is given, and the receipt says so."""
    names = [family.expert(1, which) for which in (0, 1, 2)]
    report = family.engine.update_weights_from_tensor(
        [(name, family.saved[1][name]) for name in names], partial=True
    ).report
    assert report.loaded == tuple(names) and not set(names) & set(report.missing)
    assert family.expert(0, 0) in report.missing and "model.norm.weight" in report.missing
    expected = family.saved[0] | {name: family.saved[1][name] for name in names}
    assert report.checksum == checksum(expected) == family.engine.weights_checksum()
    for which in (0, 1, 2):
        got = family.engine.get_weights_by_name(names[which], truncate_size=3)
        assert torch.equal(torch.tensor(got), family.saved[1][names[which]][:3])


def test_a_version_in_pieces_of_single_experts(family: Family) -> None:
    """E16: experts that come one at a time make the version complete with the last, by whatever names."""
    engine, pairs = family.engine, list(family.saved[1].items())
    random.Random(5).shuffle(pairs)
    for at, pair in enumerate(pairs):
        reply = engine.update_weights_from_tensor([pair], partial=True, weight_version="pieces")
        last = at == len(pairs) - 1
        assert reply.report.version == ("pieces" if last else "invalid")
        assert bool(reply.report.missing) is not last
    assert engine.weights_checksum() == family.digests[1]


def test_pieces_that_begin_packed_and_end_alone(family: Family) -> None:
    """E16: a piece given again by its other name is written again, and counts once."""
    engine, live, saved = family.engine, family.live[1], family.saved[1]
    packed = f"{LAYER}.mlp.experts.gate_up_proj"
    fields = {"partial": True, "weight_version": "v"}
    first = engine.update_weights_from_tensor({packed: live[packed]}, **fields).report
    assert first.loaded == (packed,)
    again = family.expert(0, 0)
    assert again not in engine.update_weights_from_tensor({again: saved[again]}, **fields).report.missing
    rest = {name: tensor for name, tensor in live.items() if name != packed}
    assert engine.update_weights_from_tensor(rest, **fields).report.checksum == family.digests[1]


def test_an_atomic_update_takes_single_experts_back(family: Family) -> None:
    """E14: every byte of experts written before the failure is put back."""
    pairs = family.mixed(6)

    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from pairs[:-1]
        raise OSError("the disk is gone")

    before = outputs(family.engine)
    with pytest.raises(WeightUpdateError, match="the disk is gone"):
        family.engine.update_weights_from_tensor(failing(), atomic=True)
    assert family.engine.weights_checksum() == family.digests[0] and outputs(family.engine) == before


def test_read_by_either_name(family: Family) -> None:
    """Contract 6: `get_weights_by_name` knows packed experts, single ones and the router by both names."""
    read, live, saved = family.engine.get_weights_by_name, family.live[0], family.saved[0]
    for name in (f"{LAYER}.mlp.experts.gate_up_proj", f"{LAYER}.mlp.experts.down_proj"):
        assert torch.equal(torch.tensor(read(name, truncate_size=2)), live[name][:2])
    for named in (live, saved):
        for name, tensor in named.items():
            if ".gate." in name or ".experts.3." in name:
                assert torch.equal(torch.tensor(read(f"module.{name}")), tensor[:100])


@pytest.mark.parametrize("family_name", FAMILIES)
def test_a_live_module_and_its_optimizer(make_engine: Callable[..., Engine], family_name: str) -> None:
    """E13: experts are shared as they lie; an optimizer's step is seen after `weights_changed`."""
    model = Tiny.model(family_name)
    engine = make_engine(model)
    for name, tensor in engine.named_parameters():
        assert tensor.data_ptr() == model.get_parameter(name).data_ptr()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    before = outputs(engine)
    for _ in range(2):
        ids = torch.arange(24).view(2, 12)
        model(input_ids=ids, labels=ids, output_router_logits=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert engine.weights_changed().bytes == 0
        assert engine.weights_checksum() == checksum(model.named_parameters())
        assert outputs(engine) == likeliest(model) != before


class OwnRouter(Qwen3MoeTopKRouter):
    """A user's subclass, which may choose anything."""


class OwnExperts(Qwen3MoeExperts):
    """A user's subclass, which may compute anything."""


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: setattr(m.mlp, "gate", OwnRouter(m.mlp.experts.config)), "mlp.gate is .*OwnRouter"),
        (
            lambda m: setattr(m.mlp, "experts", OwnExperts(m.mlp.experts.config)),
            "mlp.experts is .*OwnExperts",
        ),
        (
            lambda m: setattr(m.mlp, "gate", nn.Linear(64, 8, bias=False)),
            "mlp.gate is .*Linear, not a plain TopK",
        ),
        (
            lambda m: setattr(m.mlp, "gate", MixtralTopKRouter(Tiny.config("mixtral", num_local_experts=8))),
            "mlp.gate is .*MixtralTopKRouter",
        ),
        (lambda m: setattr(m.mlp.gate, "top_k", 2), "mlp.gate.top_k is 2, not the engine's 3"),
        (lambda m: setattr(m.mlp.gate, "norm_topk_prob", True), "mlp.gate.norm_topk_prob is True"),
        (lambda m: m.mlp.gate.register_forward_hook(lambda *_: None), "mlp.gate has a forward hook"),
        (lambda m: m.mlp.register_forward_pre_hook(lambda *_: None), "mlp has a forward hook"),
        (lambda m: setattr(m.mlp.experts, "act_fn", nn.Tanh()), "act_fn is .*Tanh"),
        (lambda m: setattr(m.mlp, "shared_expert", nn.Linear(2, 2)), "shared_expert is .*Linear"),
        (
            lambda m: m.mlp.experts.register_parameter("gate_up_proj_bias", nn.Parameter(torch.zeros(8, 96))),
            "gate_up_proj_bias is no weight of the model",
        ),
    ],
)
def test_what_routes_or_computes_otherwise_is_refused(
    make_engine: Callable[..., Engine], change: Callable[[Any], Any], match: str
) -> None:
    """Contract 6: modules that don't compute what the engine would are refused by name."""
    model = Tiny.model("moe")
    change(model.model.layers[1])
    with pytest.raises(ConfigError, match=match):
        make_engine(model)


def test_what_transformers_hooks_in_is_harmless(make_engine: Callable[..., Engine]) -> None:
    """Contract 6: recording router logits leaves hooks on the module, which change no value."""
    model = Tiny.model("moe")
    model(input_ids=torch.tensor([[1, 2]]), output_router_logits=True)
    assert outputs(make_engine(model)) == likeliest(model)
