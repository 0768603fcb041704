"""The decoder, written once: what the families differ in is in the spec."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed_rl.cache.kv_cache import KVCache, LooseKV
from tokenspeed_rl.layers.attention import AttentionBackend, HeadNorms, attention
from tokenspeed_rl.layers.forward_batch import ForwardBatch
from tokenspeed_rl.layers.lora import AdaptedRows, added_to
from tokenspeed_rl.layers.mlp import mlp
from tokenspeed_rl.layers.moe import experts, route
from tokenspeed_rl.layers.projection import Parts, project
from tokenspeed_rl.layers.rope import RopeTable
from tokenspeed_rl.layers.torch_attention import TorchAttention
from tokenspeed_rl.models.slots import layer_slot
from tokenspeed_rl.models.spec import DecoderSpec
from tokenspeed_rl_kernels import add_rms_norm, linear


@dataclass(frozen=True, slots=True)
class _Names:
    """Slot names of one layer; biases, head norms and experts are there only if the spec has them."""

    input_norm: str
    qkv: str
    qkv_bias: str
    q_norm: str
    k_norm: str
    o: str
    o_bias: str
    post_norm: str
    gate_up: str
    gate_up_bias: str
    down: str
    down_bias: str
    router: str
    experts_gate_up: str
    experts_down: str


_SUFFIXES = (
    "input_norm",
    "qkv.weight",
    "qkv.bias",
    "q_norm",
    "k_norm",
    "o.weight",
    "o.bias",
    "post_norm",
    "gate_up.weight",
    "gate_up.bias",
    "down.weight",
    "down.bias",
    "router",
    "experts.gate_up",
    "experts.down",
)


class Decoder:
    """A language or scoring model over a paged cache. Holds no weights: it looks them up by slot at each
    forward.

    Used by one thread, under ``torch.no_grad``.
    """

    def __init__(
        self, spec: DecoderSpec, weights: Mapping[str, Parts], backend: AttentionBackend | None = None
    ) -> None:
        """`backend` attends; None: plain torch."""
        self.spec = spec
        self.backend = backend or TorchAttention()
        self._weights = weights
        self._rope = RopeTable(spec.rope)
        self._layers = [
            _Names(*(layer_slot(layer, suffix) for suffix in _SUFFIXES)) for layer in range(spec.num_layers)
        ]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._one("embed").device

    def forward(
        self,
        batch: ForwardBatch,
        kv: KVCache | LooseKV,
        *,
        streams: list[Tensor] | None = None,
        routes: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden_size] after the final norm; the step's keys and values go to ``kv``.

        Args:
            streams: gets float32 copies on the CPU of what enters each layer, and of the result.
            routes: gets the experts [T, k] of each of the spec's ``expert_layers``.

        Raises:
            ValueError: lengths, pages or positions don't fit the cache or the model.
        """
        spec, get = self.spec, self._weights.get
        embedding = self._weights["embed"][0]
        if not len(batch.token_ids):
            return embedding.new_empty(0, spec.hidden_size)
        plan = self.backend.plan(batch, kv.k[0], kv.v[0], set(spec.windows))
        cos_sin = self._rope.cos_sin(batch.length, embedding.device)
        hidden = F.embedding(batch.token_ids, embedding)
        residual: Tensor | None = None
        for layer, names in enumerate(self._layers):
            x, residual = add_rms_norm(hidden, residual, self._one(names.input_norm), spec.rms_eps)
            _note(streams, residual)
            x = attention(
                project(x, self._weights[names.qkv], get(names.qkv_bias), added_to(names.qkv, batch.adapted)),
                batch,
                plan,
                kv.k[layer],
                kv.v[layer],
                cos_sin,
                norms=self._head_norms(names),
                window=spec.windows[layer],
            )
            x = project(x, self._weights[names.o], get(names.o_bias), added_to(names.o, batch.adapted))
            x, residual = add_rms_norm(x, residual, self._one(names.post_norm), spec.rms_eps)
            hidden = self._feed_forward(x, layer, names, batch.adapted, routes)
        hidden = add_rms_norm(hidden, residual, self._one("norm"), spec.rms_eps)[0]
        _note(streams, hidden)
        return hidden

    def _feed_forward(
        self,
        x: Tensor,
        layer: int,
        names: _Names,
        adapted: Sequence[AdaptedRows],
        routes: list[Tensor] | None,
    ) -> Tensor:
        """What follows a layer's second norm: experts where it has some, else the one MLP."""
        spec, get = self.spec, self._weights.get
        if spec.experts is None or layer not in spec.experts.layers:
            return mlp(
                x,
                self._weights[names.gate_up],
                self._weights[names.down],
                get(names.gate_up_bias),
                get(names.down_bias),
                spec.activation,
                gate_up_added=added_to(names.gate_up, adapted),
                down_added=added_to(names.down, adapted),
            )
        chosen = route(x, self._one(names.router), spec.experts)
        if routes is not None:
            routes.append(chosen.experts)
        gate_up, down = self._one(names.experts_gate_up), self._one(names.experts_down)
        return experts(x, chosen, gate_up, down, spec.activation)

    def angles(self, length: int) -> Tensor:
        """The rotary angles' table for positions below ``length``: another object once others hold."""
        return self._rope.cos_sin(length, self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of tensors of its own, beside weights and cache."""
        return self._rope.nbytes

    def follow_rope(self, frequencies: Tensor | None) -> None:
        """Rotate by these [head_dim / 2] radians per position from now on; None: by those of the spec."""
        self._rope.follow(frequencies)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size] float32."""
        return linear(hidden, self._one("embed" if self.spec.tied else "lm_head")).float()

    def read(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> float32: the scores [N, labels] of a head that scores; of a language model
        each row at length 1, [N, hidden_size]."""
        if self.spec.head.generates:
            return F.normalize(hidden.float(), dim=-1)
        return project(hidden, self._weights["score.weight"], self._weights.get("score.bias")).float()

    def _one(self, name: str) -> Tensor:
        return self._weights[name][0]

    def _head_norms(self, names: _Names) -> HeadNorms | None:
        if not self.spec.qk_norm:
            return None
        return HeadNorms(query=self._one(names.q_norm), key=self._one(names.k_norm), eps=self.spec.rms_eps)


def _note(streams: list[Tensor] | None, stream: Tensor) -> None:
    if streams is not None:
        streams.append(stream.to("cpu", torch.float32, copy=True))
