"""A rollout's worth of requests, long-tailed: the engine against transformers' continuous batching."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from roofline import Shape, predict

from gpu_suite.machine import Machine
from gpu_suite.models import config, engine, prompts, shapes
from gpu_suite.peer import Peer
from tokenspeed_rl import Engine

Ends = list[float]
Run = Callable[[list[int]], Ends]
"""Lengths -> seconds after which each request ended."""
MEDIAN, SPREAD, SHORTEST, LONGEST = 600, 1.0, 16, 8192
"""Of the log-normal lengths, in tokens."""
PILOT = 64
"""The lengths are divided by this for first runs, which warm up and tell how long the whole would take."""
HEADROOM = 0.5
"""Share of the time that the whole may take by that, as steps get longer with their contexts."""
FEW = 16
"""Fewer running requests than this are the tail."""


def run(machine: Machine, found: dict[str, Any]) -> None:
    """Each shape in its share of the time."""
    found |= {"runs": [], "headlines": []}
    todo = list(shapes(machine).items())
    for at, (name, shape) in enumerate(todo):
        until = time.monotonic() + machine.left / (len(todo) - at)
        for line in compare(machine, shape, until):
            found["runs"].append({"model": name, **line})
            found["headlines"].append(f"{name}, {headline(line)}")


def compare(machine: Machine, shape: Shape, until: float) -> list[dict[str, Any]]:
    """A line for the engine and one for the peer, at the same lengths: those that the time allows."""
    count, samples, length = (4, 2, 24) if machine.dry else (32, 8, 512)
    ids = [ids for ids in prompts(count, length, shape.vocab) for _ in range(samples)]
    whole = lengths(len(ids), 1.0)
    tokens = 1 << 12 if machine.dry else sum(whole) + len(ids) * (length + 32)
    model = config(shape)
    peer, pilot, problem = make_peer(machine, model, ids, until)
    settings = {"max_total_tokens": tokens, "max_model_len": length + LONGEST + 16}
    with engine(machine, model, **settings) as made:
        if peer is not None:
            made.update_weights_from_tensor(peer.weights())
        runs: dict[str, Run] = {"engine": partial(serve, made, ids)}
        if peer is not None:
            runs["transformers"] = partial(peer.run, ids)
        serve(made, ids, few(ids))
        scale = what_fits(machine, pilot + max(serve(made, ids, few(ids))), until)
        asked = lengths(len(ids), scale)
        about = {"scale": scale, "longest": max(asked)}
        lines = [
            {"who": who, **about, **measured(machine, shape, run(asked), asked, length, samples)}
            for who, run in runs.items()
        ]
        left = HEADROOM * (until - time.monotonic())
        if scale < 1 and not machine.dry and lines[0]["seconds"] / scale < left:
            alone = measured(machine, shape, runs["engine"](whole), whole, length, samples)
            lines.append({"who": "engine alone", "scale": 1.0, "longest": max(whole), **alone})
    if peer is None:
        return [*lines, {"who": "transformers", "problem": problem}]
    lines[1]["attention"] = peer.attention
    return lines


def lengths(count: int, scale: float) -> list[int]:
    """Log-normal, seeded; at `scale` 1 the longest is LONGEST."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(0))
    whole = (MEDIAN * (SPREAD * drawn).exp()).clamp(SHORTEST, LONGEST)
    scaled: list[int] = (whole * scale).clamp(min=2).int().tolist()
    return scaled


def few(ids: list[list[int]]) -> list[int]:
    """The lengths of a pilot."""
    return lengths(len(ids), 1 / PILOT)


def make_peer(
    machine: Machine, model: Any, ids: list[list[int]], until: float
) -> tuple[Peer | None, float, str]:
    """It, and the seconds of its pilot; or None, and why."""
    try:
        peer = Peer(machine, model, until)
        return peer, max(peer.run(ids, few(ids))), ""
    except Exception as error:
        return None, 0.0, f"{type(error).__name__}: {error}"


def what_fits(machine: Machine, pilot: float, until: float) -> float:
    """By which the lengths must be multiplied, at most 1, if both pilots took so many seconds."""
    whole = HEADROOM * (until - time.monotonic()) / pilot
    return 1 / PILOT if machine.dry else min(1.0, max(1.0, whole) / PILOT)


def serve(made: Engine, ids: list[list[int]], asked: list[int]) -> Ends:
    """The engine's run; it also returns every token's logprob."""
    made.flush_cache()
    params = [{"max_new_tokens": n, "ignore_eos": True, "temperature": 1.0} for n in asked]
    outputs = made.generate(input_ids=ids, sampling_params=params, return_logprob=True)
    assert [len(output["output_ids"]) for output in outputs] == asked
    return [output["meta_info"]["e2e_latency"] for output in outputs]


def measured(
    machine: Machine, shape: Shape, ends: Ends, asked: list[int], prompt: int, samples: int
) -> dict[str, Any]:
    """What a run came to."""
    seconds, few = max(ends), min(FEW, len(ends))
    floor = floor_seconds(machine, shape, asked, prompt, samples)
    return {
        "seconds": seconds,
        "tokens": sum(asked),
        "tokens_per_second": sum(asked) / seconds,
        "tail_seconds": seconds - sorted(ends)[-few],
        "floor": floor,
        "of_floor": floor / seconds,
    }


def floor_seconds(machine: Machine, shape: Shape, asked: list[int], prompt: int, samples: int) -> float:
    """Of all decode steps, weights and KV read once in each, prompts once per group; computing the prompts
    is not in it."""
    groups = torch.tensor(asked).view(-1, samples)
    total = 0.0
    for step in range(max(asked)):
        live = groups > step
        rows, prompts_read = int(live.sum()), int(live.any(1).sum())
        tokens = prompts_read * prompt + rows * step
        total += predict(shape, rows, tokens, bandwidth=machine.bandwidth).floor
    return total


def headline(line: dict[str, Any]) -> str:
    """One line of the final table."""
    if "problem" in line:
        return f"{line['who']}: {line['problem'][:60]}"
    return (
        f"{line['who']}: {line['tokens_per_second']:.0f} tokens/s, {line['of_floor']:.0%} of the floor, "
        f"tail {line['tail_seconds']:.2f} of {line['seconds']:.2f} s, longest {line['longest']}"
    )
