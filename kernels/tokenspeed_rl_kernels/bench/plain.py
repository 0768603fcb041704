"""What the ops are timed against: the same in plain torch, with its own fast functions where it has any."""

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate: Tensor, value: Tensor) -> Tensor:
    """silu(gate) * value."""
    return F.silu(gate) * value


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(the norm of x + residual, x + residual)."""
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, 1e-6), total


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotation as transformers writes it, and two indexed writes."""
    cos, sin = (part.repeat(1, 2)[:, None] for part in cos_sin[positions].to(q.dtype).chunk(2, 1))

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, 2)
        return x * cos + torch.cat((-b, a), 2) * sin

    page, offset = slots // k_cache.shape[2], slots % k_cache.shape[2]
    k_cache[page, :, offset] = rotated(k)
    v_cache[page, :, offset] = v
    return rotated(q)


def decode(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [B, Hq, D] over keys and values [B, Hkv, n, D] that lie in one piece."""
    return F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


def prefill(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [n, Hq, D] over keys and values [1, Hkv, n, D] that lie in one piece."""
    heads_first = q.transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(heads_first, keys, values, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def sample(logits: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """(tokens, their logprobs), of a nucleus if top_p < 1."""
    logprobs = (logits / temperature).log_softmax(1)
    if top_p < 1:
        ranked, ids = logprobs.sort(1, descending=True)
        probs = ranked.exp()
        ranked = ranked.masked_fill(probs.cumsum(1) - probs >= top_p, -torch.inf)
        logprobs = torch.empty_like(ranked).scatter_(1, ids, ranked).log_softmax(1)
    tokens = logprobs.exp().multinomial(1)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def linear_logprob(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(log_softmax of the targets, entropies)."""
    logprobs = F.linear(hidden, weight).float().log_softmax(1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)


def step_metadata(lens: Tensor, table: Tensor, page_size: int) -> Tensor:
    """[2, B]: position and slot of each row's last token."""
    positions = lens.long() - 1
    pages = table.gather(1, (positions // page_size).unsqueeze(1)).squeeze(1)
    return torch.stack((positions, pages.long() * page_size + positions % page_size))
