"""Experts compute what transformers computes, and their weights lie where transformers has them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tests.models.conftest import SIZES
from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.layers.moe import ExpertSpec, Routes, experts, route
from tokenspeed_rl.models import slots, spec_from_config

QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OPTIONS: dict[str, tuple[type, dict]] = {
    "qwen": (Qwen3MoeConfig, QWEN),
    "qwen, renormalised": (Qwen3MoeConfig, {**QWEN, "norm_topk_prob": True}),
    "qwen, one of many": (Qwen3MoeConfig, {**QWEN, "num_experts": 40, "num_experts_per_tok": 1}),
    "qwen, all of them": (Qwen3MoeConfig, {**QWEN, "num_experts_per_tok": 6}),
    "qwen, one expert": (Qwen3MoeConfig, {**QWEN, "num_experts": 1, "num_experts_per_tok": 1}),
    "qwen, first layer dense": (Qwen3MoeConfig, {**QWEN, "mlp_only_layers": [0]}),
    "qwen, every second layer": (Qwen3MoeConfig, {**QWEN, "decoder_sparse_step": 2}),
    "qwen, no layer": (Qwen3MoeConfig, {**QWEN, "mlp_only_layers": [0, 1]}),
    "qwen, biases and a window": (
        Qwen3MoeConfig,
        {**QWEN, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5},
    ),
    "qwen, gelu": (Qwen3MoeConfig, {**QWEN, "hidden_act": "gelu"}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "mixtral, three of five, window": (
        MixtralConfig,
        {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 7},
    ),
}


def config(name: str, **changes: object) -> PretrainedConfig:
    kind, options = OPTIONS[name]
    return kind(**{**SIZES, **options, **changes})


def built(name: str, **changes: object) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config(name, **changes)).eval()


def expected(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)


def parts(model: PreTrainedModel, kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the slots of a model say: its `parameters`, or the `parts` of a checkpoint."""
    made = slots(spec_from_config(model.config))
    return {part.hf_name: part.shape for slot in made for part in getattr(slot, kind)}


def tokens(seed: int, length: int) -> list[int]:
    return torch.randint(1, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, page):
    """Issue 4, item 3: whatever a config chooses, logprobs equal transformers' recompute, in chunks, token by
    token and beside another request."""
    model = built(name)
    paged, first, second = page(model), tokens(1, 40), tokens(2, 9)
    a, b = paged.add(), paged.add()
    parts = [paged.step({}, {a: first[:23]}), paged.step({}, {a: first[23:31]})]
    mixed = paged.step({a: first[31]}, {b: second})
    parts.append(mixed[:1])
    parts += [paged.step({a: token}, {}) for token in first[32:]]
    for logits, ids in ((torch.cat(parts), first), (mixed[1:], second)):
        torch.testing.assert_close(logits.log_softmax(-1), expected(model, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_whatever_way_transformers_computes_experts(implementation, page):
    """Issue 4, item 3: transformers' implementations are one function, and so is ours."""
    model = built("qwen")
    model.set_experts_implementation(implementation)
    paged, ids = page(model), tokens(3, 30)
    logits = paged.step({}, {paged.add(): ids})
    torch.testing.assert_close(logits.log_softmax(-1), expected(model, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen, renormalised", "mixtral"])
def test_half_precision_rounds_where_transformers_does(name, page):
    """Architecture: in bfloat16 the router decides in float32, and its weights are rounded as transformers
    rounds them: the same experts, and outputs no farther off than bfloat16 makes them."""
    model = built(name).to(torch.bfloat16)
    paged, ids = page(model), tokens(4, 60)
    logits = paged.step({}, {paged.add(): ids})
    with torch.no_grad():
        reference = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    assert (logits - reference).abs().mean() < 0.02 * reference.abs().mean()


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_the_definition(renormalise, dtype):
    """The layer by itself, one token after the other in float64: softmax over all experts, the k likeliest,
    their outputs added up with those weights."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, router, gate_up, down = drawn(33, 16), drawn(7, 16), drawn(7, 24, 16) / 4, drawn(7, 16, 12) / 4
    spec = ExpertSpec(
        layers=(0,), count=7, per_token=3, width=12, renormalise=renormalise, rounded_weights=False
    )
    routes = route(x, router, spec)
    found = experts(x, routes, gate_up, down, "silu")
    assert found.dtype == dtype and routes.experts.dtype == torch.int64
    close = 1e-5 if dtype == torch.float32 else 0.1
    wide = [tensor.double() for tensor in (x, router, gate_up, down)]
    for row, token in enumerate(wide[0]):
        scores = (token @ wide[1].T).softmax(-1)
        best, which = scores.topk(3)
        if dtype == torch.float32:
            assert routes.experts[row].tolist() == which.tolist()
        which = routes.experts[row]
        best = scores[which] / (scores[which].sum() if renormalise else 1.0)
        torch.testing.assert_close(routes.weights[row].double(), best, rtol=close, atol=close)
        total = torch.zeros(16, dtype=torch.float64)
        for weight, expert in zip(best, which, strict=True):
            gates, ups = (wide[2][expert] @ token).chunk(2)
            total += weight * (wide[3][expert] @ (torch.nn.functional.silu(gates) * ups))
        torch.testing.assert_close(found[row].double(), total, rtol=close, atol=close)


def test_a_token_does_not_depend_on_its_neighbours():
    """F12: a row comes to the same bits in any order of the batch, and NaN stays in its own row."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 8, generator=generator)
    gate_up, down = torch.randn(4, 12, 8, generator=generator), torch.randn(4, 8, 6, generator=generator)
    chosen = torch.rand(40, 4, generator=generator).argsort(1)[:, :2]
    routes = Routes(chosen, torch.rand(40, 2, generator=generator))
    whole = experts(x, routes, gate_up, down, "silu")
    order = torch.randperm(40, generator=generator)
    mixed = experts(x[order], Routes(chosen[order], routes.weights[order]), gate_up, down, "silu")
    torch.testing.assert_close(mixed, whole[order], rtol=0, atol=1e-5)
    x[3] = torch.nan
    broken = experts(x, routes, gate_up, down, "silu")
    assert broken[3].isnan().all() and not torch.cat((broken[:3], broken[4:])).isnan().any()
    assert experts(x[:0], Routes(chosen[:0], routes.weights[:0]), gate_up, down, "silu").shape == (0, 8)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_slots_are_the_module(name):
    """Contract 6: names and shapes of a live module, each once, whichever layers have experts."""
    model = built(name)
    assert parts(model, "parameters") == {
        name: tuple(param.shape) for name, param in model.named_parameters()
    }


@pytest.mark.parametrize("name", ["qwen, first layer dense", "mixtral"])
def test_the_parts_are_the_checkpoint(name, tmp_path):
    """Contract 6: names and shapes of a checkpoint as save_pretrained writes it."""
    model = built(name)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert parts(model, "parts") == {name: tuple(tensor.shape) for name, tensor in saved.items()}


@pytest.mark.parametrize("count", [0, 7, -1])
def test_more_experts_than_there_are(count):
    """Rule 5: a config that can't be computed is refused by name."""
    with pytest.raises(ConfigError, match=r"num_experts_per_tok must lie in 1 \.\. 6"):
        spec_from_config(config("qwen", num_experts_per_tok=count))


def test_relatives_are_not_taken_for_them():
    """Rule 5: what has shared experts or another router is another architecture, and refused."""
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM"):
        spec_from_config(Qwen2MoeConfig(**SIZES))
