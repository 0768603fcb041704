"""Which weights a decoder has: a slot per tensor that the kernels read, and the Hugging Face names in it."""

from collections.abc import Iterator

from tokenspeed_rl.models.spec import DecoderSpec
from tokenspeed_rl.weights.mapping import Part, Slot


def layer_slot(layer: int, suffix: str) -> str:
    """Name of a slot of one layer."""
    return f"layers.{layer}.{suffix}"


def slots(spec: DecoderSpec) -> tuple[Slot, ...]:
    """Every slot of the decoder, in the order of the forward."""
    return (
        _slot("embed", "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size),
        *(slot for layer in range(spec.num_layers) for slot in _layer(spec, layer)),
        _slot("norm", "model.norm.weight", spec.hidden_size),
        *_head(spec),
    )


def _slot(name: str, hf_name: str, *shape: int) -> Slot:
    return Slot(name, (Part(hf_name, shape),))


def _head(spec: DecoderSpec) -> Iterator[Slot]:
    if spec.head.labels:
        yield _slot("score.weight", "score.weight", spec.head.labels, spec.hidden_size)
        if spec.head.bias:
            yield _slot("score.bias", "score.bias", spec.head.labels)
    elif not spec.tied:
        yield _slot("lm_head", "lm_head.weight", spec.vocab_size, spec.hidden_size)


def _layer(spec: DecoderSpec, layer: int) -> Iterator[Slot]:
    prefix = f"model.layers.{layer}"
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}

    def norm(name: str, module: str, size: int) -> Slot:
        return _slot(layer_slot(layer, name), f"{prefix}.{module}.weight", size)

    def linear(name: str, modules: dict[str, int], inputs: int, bias: bool) -> Iterator[Slot]:
        for kind, shape in (("weight", (inputs,)), ("bias", ()))[: 2 if bias else 1]:
            parts = (Part(f"{prefix}.{module}.{kind}", (rows, *shape)) for module, rows in modules.items())
            yield Slot(layer_slot(layer, f"{name}.{kind}"), tuple(parts))

    yield norm("input_norm", "input_layernorm", hidden)
    yield from linear("qkv", qkv, hidden, spec.qkv_bias)
    if spec.qk_norm:
        yield norm("q_norm", "self_attn.q_norm", spec.head_dim)
        yield norm("k_norm", "self_attn.k_norm", spec.head_dim)
    yield from linear("o", {"self_attn.o_proj": hidden}, queries, spec.o_bias)
    yield norm("post_norm", "post_attention_layernorm", hidden)
    if layer in spec.expert_layers:
        yield from _experts(spec, layer)
        return
    yield from linear("gate_up", gate_up, hidden, spec.mlp_bias)
    yield from linear("down", {"mlp.down_proj": hidden}, inner, spec.mlp_bias)


def _experts(spec: DecoderSpec, layer: int) -> Iterator[Slot]:
    """Router and experts: each one parameter of a live module, and a part per expert and projection."""
    assert spec.experts is not None
    names, count, width, hidden = spec.expert_names, spec.experts.count, spec.experts.width, spec.hidden_size
    live, saved = f"model.layers.{layer}.mlp", f"model.layers.{layer}.{names.block}"

    def expert(number: int, projection: str, *shape: int) -> Part:
        return Part(f"{saved}.experts.{number}.{projection}.weight", shape)

    yield Slot(
        layer_slot(layer, "router"),
        (Part(f"{saved}.gate.weight", (count, hidden)),),
        Part(f"{live}.gate.weight", (count, hidden)),
    )
    yield Slot(
        layer_slot(layer, "experts.gate_up"),
        tuple(expert(e, name, width, hidden) for e in range(count) for name in (names.gate, names.up)),
        Part(f"{live}.experts.gate_up_proj", (count, 2 * width, hidden)),
    )
    yield Slot(
        layer_slot(layer, "experts.down"),
        tuple(expert(e, names.down, hidden, width) for e in range(count)),
        Part(f"{live}.experts.down_proj", (count, hidden, width)),
    )
