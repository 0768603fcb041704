"""Tiny transformers models, and a decoder that runs their weights over a paged cache laid out by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tokenspeed_rl.cache.kv_cache import KVCache, KVLayout
from tokenspeed_rl.layers.forward_batch import ForwardBatch
from tokenspeed_rl.memory import HostMemory
from tokenspeed_rl.models import Decoder, slots, spec_from_config

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}


class Paged:
    """A decoder with a cache, run request by request or together. Pages lie in a shuffled order."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, pages: int = 40, page_size: int = 4) -> None:
        spec = decoder.spec
        self.decoder, self.page_size = decoder, page_size
        layout = KVLayout(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            page_size=page_size,
            head_dim=spec.head_dim,
            dtype=dtype,
        )
        memory = HostMemory()
        self.kv = KVCache(layout, pages, lambda nbytes, stripes: memory.reserve("kv_cache", nbytes, stripes))
        self.kv.map(pages)
        for cache in (*self.kv.k, *self.kv.v):
            cache.fill_(torch.nan)  # what was never written must not be read
        self._free = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).tolist()
        self.pages: list[list[int]] = []
        self.lens: list[int] = []

    def add(self) -> int:
        """A new, empty request; returns its number."""
        self.pages.append([])
        self.lens.append(0)
        return len(self.lens) - 1

    def step(
        self, decodes: dict[int, int], chunks: dict[int, Sequence[int]], shared: list[list[int]] | None = None
    ) -> Tensor:
        """Logits of one token for each request in ``decodes``, then of every token of each chunk.

        ``shared`` lists groups of decode rows whose first page is the same.
        """
        spans = [*((r, [t]) for r, t in decodes.items()), *((r, list(c)) for r, c in chunks.items())]
        positions, where = [], []
        for request, tokens in spans:
            for _ in tokens:
                at = self.lens[request]
                if at == len(self.pages[request]) * self.page_size:
                    self.pages[request].append(self._free.pop())
                positions.append(at)
                where.append(self.pages[request][at // self.page_size] * self.page_size + at % self.page_size)
                self.lens[request] += 1
        starts = torch.tensor([0, *(len(c) for c in chunks.values())]).cumsum(0)
        batch = ForwardBatch(
            token_ids=torch.tensor([token for _, tokens in spans for token in tokens]).long(),
            positions=torch.tensor(positions).long(),
            length=max(positions, default=-1) + 1,
            slots=torch.tensor(where).long(),
            num_decode=len(decodes),
            decode_pages=self._table(list(decodes)),
            decode_lens=torch.tensor([self.lens[r] for r in decodes], dtype=torch.int32),
            shared=None if shared is None else self._shared(list(decodes), shared),
            prefill_pages=self._table(list(chunks)),
            prefill_starts=starts.int(),
            prefill_lens=torch.tensor([self.lens[r] for r in chunks], dtype=torch.int32),
        )
        with torch.no_grad():
            return self.decoder.logits(self.decoder.forward(batch, self.kv))

    def _table(self, requests: list[int]) -> Tensor:
        width = max((len(self.pages[r]) for r in requests), default=0)
        rows = [self.pages[r] + [2**30] * (width - len(self.pages[r])) for r in requests]
        return torch.tensor(rows, dtype=torch.int32).view(len(requests), width)

    def _shared(self, requests: list[int], groups: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        owner = {request: number for number, group in enumerate(groups) for request in group}
        return (
            torch.tensor([self.pages[group[0]][:1] for group in groups], dtype=torch.int32),
            torch.tensor([self.page_size] * len(groups), dtype=torch.int32),
            torch.tensor([owner.get(request, -1) for request in requests], dtype=torch.int32),
        )


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """A transformers causal LM of a family with tiny random weights; norms and biases random too."""

    def make(family: str, **options: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        config = CONFIGS[family](**{**SIZES, **options})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                noise = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.data.copy_(noise + (1.0 if "norm" in name else 0.0))
        return model

    return make


@pytest.fixture
def page() -> Callable[..., Paged]:
    """Run a transformers model's weights in the decoder: ``page(model, fused=...)``."""

    def build(model: Any, *, fused: bool = True, **cache: int) -> Paged:
        spec = spec_from_config(model.config)
        state = model.state_dict()
        weights = {}
        for slot in slots(spec):
            parts = tuple(state[part.hf_name] for part in slot.parameters)
            assert [part.shape for part in slot.parameters] == [tuple(part.shape) for part in parts]
            weights[slot.name] = (torch.cat(parts),) if fused else parts
        return Paged(Decoder(spec, weights), next(model.parameters()).dtype, **cache)

    return build
