"""Kernels of the engine, one file per op: torch and triton only.

``paged_decode`` and ``paged_prefill`` attend over a paged cache that ``rope_write_kv`` fills;
``add_rms_norm``, ``silu_mul`` and ``linear`` are the rest of a decoder layer; ``sample`` draws the token.
``linear_logprob`` is the trainer's: logprobs and entropies without logits, differentiable.
``step_metadata`` tells the next step where its tokens go.
"""

from tokenspeed_rl_kernels.add_rms_norm import add_rms_norm
from tokenspeed_rl_kernels.linear import linear
from tokenspeed_rl_kernels.linear_logprob import linear_logprob
from tokenspeed_rl_kernels.paged_decode import paged_decode
from tokenspeed_rl_kernels.paged_prefill import paged_prefill
from tokenspeed_rl_kernels.rope_write_kv import rope_write_kv
from tokenspeed_rl_kernels.sample import SampleOutput, sample
from tokenspeed_rl_kernels.silu_mul import silu_mul
from tokenspeed_rl_kernels.step_metadata import step_metadata

__all__ = [
    "SampleOutput",
    "add_rms_norm",
    "linear",
    "linear_logprob",
    "paged_decode",
    "paged_prefill",
    "rope_write_kv",
    "sample",
    "silu_mul",
    "step_metadata",
]
