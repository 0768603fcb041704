"""Tiny random models, and the slots they have, written down here independently of the engine's model code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tokenspeed_rl.weights import Part, SharedWeights, Slot, WeightStore, share

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "Llama": (LlamaConfig, LlamaForCausalLM),
    "Qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


class Tiny:
    """What the tests of this folder build, under one name."""

    @staticmethod
    def config(family: str = "Llama", **changes: object) -> PretrainedConfig:
        return FAMILIES[family][0](**(SHAPE | {"tie_word_embeddings": False} | changes))

    @staticmethod
    def model(family: str = "Llama", seed: int = 0, **changes: object) -> PreTrainedModel:
        model = FAMILIES[family][1](Tiny.config(family, **changes))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in model.parameters():  # no two parameters alike, norms and biases included
                param.normal_(0.0, 0.05, generator=generator)
        return model

    @staticmethod
    def slots(config: PretrainedConfig) -> tuple[Slot, ...]:
        return _slots(config)

    @staticmethod
    def store(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> WeightStore:
        return WeightStore(_slots(config), dtype=dtype, device="cpu")

    @staticmethod
    def classes(family: str = "Llama") -> frozenset[str]:
        kinds = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
        return frozenset(family + kind for kind in kinds)

    @staticmethod
    def share(module: nn.Module, plain: PreTrainedModel | None = None) -> tuple[WeightStore, SharedWeights]:
        """Share `module`, a wrapper of `plain` where that is given, with a store of its own."""
        plain = plain or module
        store = Tiny.store(plain.config, next(plain.parameters()).dtype)
        return store, share(module, store, Tiny.classes(type(plain).__name__.removesuffix("ForCausalLM")))

    @staticmethod
    def snapshot(module: nn.Module) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    @staticmethod
    def held(store: WeightStore) -> dict[str, Tensor]:
        """What the engine would compute with, from its fused tensors: Hugging Face name -> copy."""
        found = {}
        for slot in store.slots:
            rows = torch.cat([tensor.reshape(-1) for tensor in store.weights[slot.name]])
            sizes = [part.numel for part in slot.parts]
            for part, piece in zip(slot.parts, rows.split(sizes), strict=True):
                found[part.hf_name] = piece.view(part.shape).clone()
        return found

    @staticmethod
    def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
        def raw(tensor: Tensor) -> Tensor:
            return tensor.detach().contiguous().view(-1).view(torch.uint8)

        assert left.keys() == right.keys()
        return all(
            left[name].dtype == right[name].dtype
            and left[name].shape == right[name].shape
            and torch.equal(raw(left[name]), raw(right[name]))
            for name in left
        )

    @staticmethod
    def train_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        ids = torch.arange(24).view(2, 12) % model.config.vocab_size
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


@pytest.fixture(autouse=True)
def _forget_accelerate() -> Iterator[None]:
    """Accelerators share one state per process; what one test asked for must not reach the next."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    return Tiny


def _slots(config: PretrainedConfig) -> tuple[Slot, ...]:
    family, h = type(config).__name__.removesuffix("Config"), config.hidden_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    slots = [Slot("embed", (Part("model.embed_tokens.weight", (config.vocab_size, h)),))]
    for i in range(config.num_hidden_layers):
        at, hf = f"layers.{i}", f"model.layers.{i}"
        rows = {"q": q, "k": kv, "v": kv}
        mlp = {name: config.intermediate_size for name in ("gate", "up")}
        slots += [
            Slot(f"{at}.input_norm", (Part(f"{hf}.input_layernorm.weight", (h,)),)),
            Slot(
                f"{at}.qkv.weight",
                tuple(Part(f"{hf}.self_attn.{p}_proj.weight", (n, h)) for p, n in rows.items()),
            ),
            Slot(f"{at}.o.weight", (Part(f"{hf}.self_attn.o_proj.weight", (h, q)),)),
            Slot(f"{at}.post_norm", (Part(f"{hf}.post_attention_layernorm.weight", (h,)),)),
            Slot(
                f"{at}.gate_up.weight",
                tuple(Part(f"{hf}.mlp.{p}_proj.weight", (n, h)) for p, n in mlp.items()),
            ),
            Slot(f"{at}.down.weight", (Part(f"{hf}.mlp.down_proj.weight", (h, config.intermediate_size)),)),
        ]
        if family == "Qwen2":
            biases = tuple(Part(f"{hf}.self_attn.{p}_proj.bias", (n,)) for p, n in rows.items())
            slots.append(Slot(f"{at}.qkv.bias", biases))
        if family == "Qwen3":
            norms = (
                Slot(f"{at}.{p}_norm", (Part(f"{hf}.self_attn.{p}_norm.weight", (config.head_dim,)),))
                for p in "qk"
            )
            slots += norms
    slots.append(Slot("norm", (Part("model.norm.weight", (h,)),)))
    if not config.tie_word_embeddings:
        slots.append(Slot("lm_head", (Part("lm_head.weight", (config.vocab_size, h)),)))
    return tuple(slots)
