"""What a decode step can't be faster than: bytes moved and kernels launched, from a model's shape alone.

    python benchmarks/roofline.py [--models Qwen2.5-0.5B] [--batch 1 64] [--context 2048] [--dtype bfloat16]
                                  [--prefix 0 --group 1] [--bandwidth 4.3e12] [--launch 1.3e-6]

The floor is the bytes that any engine must read, weights and the keys and values of every row, at the
bandwidth of the memory. This engine's step also writes and reads logits, and every kernel of a captured graph
costs its launch, in which nothing is read:

    predicted = (weights + KV + logits) / bandwidth + launches * launch cost

Other activations are left out: at 256 rows of 2k tokens the largest of a layer, the states of attention's
splits, are 30 MB (7B), and the L2 of an H200 holds 50. Nothing is measured here, and the defaults are of an
H200; `benchmarks/gpu_suite.py` measures.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BANDWIDTH = 4.3e12
"""Bytes per second that a large copy reaches on an H200."""
LAUNCH = 1.3e-6
"""Seconds from one small kernel of a CUDA graph to the next, on an H200."""
PAGE = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B")
"""Models of the table in docs/kernels.md."""
BATCHES = (1, 64, 256)
CONTEXT = 2048
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

LAYER_LAUNCHES = (
    "add_rms_norm",
    "qkv",
    "rope_write_kv",
    "paged_decode",
    "paged_decode, merge",
    "o",
    "add_rms_norm, second",
    "gate_up",
    "silu_mul",
    "down",
)
"""Kernels of a layer of this engine's decode step, in order."""
AIM = 6
"""Kernels of a layer, were norms, merge and gate parts of their neighbours."""
STEP_LAUNCHES = {
    "step_metadata": 1,
    "embedding": 1,
    "norm": 1,
    "head": 1,
    "cast to float32": 1,
    "sampling": 4,
    "feedback of the draw": 5,
}
"""Kernels of a step that don't belong to a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers of a model's config that its speed hangs on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = True
    """Whether the head is the embedding."""
    qkv_bias: bool = True

    @property
    def qkv(self) -> int:
        """Rows of the fused projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def read_together(self) -> int:
        """Samples that read their prompt at once in bfloat16: what the tile of attention has room for."""
        heads = 1 << (self.heads // self.kv_heads - 1).bit_length()
        return max(1, (32 if self.head_dim <= 64 else 16) // heads)

    @property
    def layer_weights(self) -> int:
        """Numbers in a layer's weights."""
        attention = self.hidden * (self.qkv + self.heads * self.head_dim) + self.qkv * self.qkv_bias
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def step_weights(self) -> int:
        """Weights that a step reads: all but an embedding that is not the head, of which it reads a row per
        token."""
        return self.layers * self.layer_weights + self.hidden + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.step_weights + (0 if self.tied else self.vocab * self.hidden)

    @property
    def kv_token(self) -> int:
        """Numbers in the keys and values of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    "Qwen2.5-0.5B": Shape(
        layers=24, hidden=896, heads=14, kv_heads=2, head_dim=64, intermediate=4864, vocab=151936
    ),
    "Qwen2.5-1.5B": Shape(
        layers=28, hidden=1536, heads=12, kv_heads=2, head_dim=128, intermediate=8960, vocab=151936
    ),
    "Qwen2.5-7B": Shape(
        layers=28,
        hidden=3584,
        heads=28,
        kv_heads=4,
        head_dim=128,
        intermediate=18944,
        vocab=152064,
        tied=False,
    ),
    "SmolLM2-135M": Shape(
        layers=30,
        hidden=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        vocab=49152,
        qkv_bias=False,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A decode step on paper."""

    weight_bytes: int
    kv_bytes: int
    logit_bytes: int
    launches: int
    bandwidth: float
    launch: float

    @property
    def floor(self) -> float:
        """Seconds to read weights and KV once."""
        return (self.weight_bytes + self.kv_bytes) / self.bandwidth

    @property
    def launching(self) -> float:
        """Seconds in which kernels start."""
        return self.launches * self.launch

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.floor + self.logit_bytes / self.bandwidth + self.launching


def context_tokens(batch: int, context: int, prefix: int = 0, group: int = 1) -> int:
    """Tokens whose keys and values a step reads: of rows in groups of `group`, the first `prefix` tokens of
    each group's contexts once."""
    return batch * (context - prefix) + -(-batch // group) * prefix


def predict(
    shape: Shape,
    batch: int,
    tokens: int,
    *,
    dtype: str = "bfloat16",
    bandwidth: float = BANDWIDTH,
    launch: float = LAUNCH,
    per_layer: int = len(LAYER_LAUNCHES),
) -> Prediction:
    """A step of `batch` rows that reads the KV of `tokens` tokens in all, see `context_tokens`."""
    size = BYTES[dtype]
    logit = size + size + 4 + 4  # the head writes it, the cast reads and writes it, the draw reads it
    return Prediction(
        weight_bytes=shape.step_weights * size,
        kv_bytes=tokens * shape.kv_token * size,
        logit_bytes=batch * shape.vocab * logit,
        launches=shape.layers * per_layer + sum(STEP_LAUNCHES.values()),
        bandwidth=bandwidth,
        launch=launch,
    )


HEAD = (
    "model",
    "B",
    "weights GB",
    "KV GB",
    "logits GB",
    "floor ms",
    "launches",
    "launching",
    "predicted ms",
    "of the floor",
    f"with {AIM}",
)
SHARED_HEAD = ("model", "prompt", "response", "KV GB apart", "together", "ms apart", "together", "ratio")


def rows(models: Sequence[str], batches: Sequence[int], **load: Any) -> list[tuple[str, ...]]:
    """A line of the table for each model and batch; `load`: context, prefix and group, and what `predict`
    takes."""
    tokens = {name: load.pop(name) for name in ("context", "prefix", "group") if name in load}
    lines = []
    for model in models:
        for batch in batches:
            read = context_tokens(batch, **tokens)
            step = predict(SHAPES[model], batch, read, **load)
            fused = predict(SHAPES[model], batch, read, **load, per_layer=AIM)
            lines.append(
                (
                    model,
                    f"{batch}",
                    f"{step.weight_bytes / 1e9:.2f}",
                    f"{step.kv_bytes / 1e9:.2f}",
                    f"{step.logit_bytes / 1e9:.2f}",
                    f"{step.floor * 1e3:.2f}",
                    f"{step.launches}",
                    f"{step.launching / step.seconds:.0%}",
                    f"{step.seconds * 1e3:.2f}",
                    f"{step.floor / step.seconds:.0%}",
                    f"{fused.floor / fused.seconds:.0%}",
                )
            )
    return lines


def shared_rows(models: Sequence[str], batch: int = 256, group: int = 8) -> list[tuple[str, ...]]:
    """What it saves that samples of a prompt read it together, as many as can: `group` samples of each."""
    lines = []
    for model in models:
        for prompt, response in ((1024, 4096), (4096, 1024)):
            context = prompt + response
            apart = predict(SHAPES[model], batch, context_tokens(batch, context))
            readers = min(group, SHAPES[model].read_together)
            together = predict(SHAPES[model], batch, context_tokens(batch, context, prompt, readers))
            lines.append(
                (
                    model,
                    f"{prompt}",
                    f"{response}",
                    f"{apart.kv_bytes / 1e9:.1f}",
                    f"{together.kv_bytes / 1e9:.1f}",
                    f"{apart.seconds * 1e3:.2f}",
                    f"{together.seconds * 1e3:.2f}",
                    f"{apart.seconds / together.seconds:.1f}x",
                )
            )
    return lines


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, as a page has it."""
    whole = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in whole)


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=PAGE, choices=SHAPES)
    parser.add_argument("--batch", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--prefix", type=int, default=0, help="first tokens that the rows of a group share")
    parser.add_argument("--group", type=int, default=1, help="rows of a group")
    parser.add_argument("--dtype", default="bfloat16", choices=BYTES)
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="bytes per second")
    parser.add_argument("--launch", type=float, default=LAUNCH, help="seconds per kernel")
    options = vars(parser.parse_args())
    models, batches = options.pop("models"), options.pop("batch")
    print(table(HEAD, rows(models, batches, **options)), end="\n\n")
    print(table(SHARED_HEAD, shared_rows(models)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
