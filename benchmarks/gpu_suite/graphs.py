"""Does an engine with CUDA graphs say what one without says, through every change of what graphs stand on?

Sleep and wake of the cache, the weights and the graphs themselves, and an update: each leaves addresses as
they are, and graphs that live on must read what is there now.
"""

from typing import Any

import torch

from gpu_suite.machine import Machine
from gpu_suite.models import TOY, config, engine, prompts
from tokenspeed_rl import Engine

Outputs = list[dict[str, Any]]
TOKENS, FEW = 48, 6
"""Generated per sample on a GPU, and on the CPU."""
LENGTHS = (1, 5, 16, 17, 64, 100, 250)
NEAR = 0.1
"""Logprobs of two tokens that are no further apart: bfloat16 may choose either."""
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "vocab_size": 4096,
    "initializer_range": 0.05,
}
"""Layers of Qwen2.5 0.5B, whose kernels other sections need too."""
SLEEPS: dict[str, list[str] | None] = {
    "kv_cache slept": ["kv_cache"],
    "weights slept": ["weights"],
    "both slept": ["kv_cache", "weights"],
    "cuda_graph slept": ["cuda_graph"],
    "all slept": None,
}


def run(machine: Machine, found: dict[str, Any]) -> None:
    """Two engines alike but for graphs; what changes in one changes in the other, or shows in neither."""
    model = config(TOY, **({"initializer_range": 0.1} if machine.dry else SMALL))
    tokens = 1 << 12 if machine.dry else 1 << 18
    settings = {"max_total_tokens": tokens, "weights_backup": "cpu"}
    stages = found["stages"] = {}
    bare = machine.used()
    with engine(machine, model, graphs=True, **settings) as graphed:
        roll(machine, graphed)
        at, held = addresses(graphed), machine.used()
        graphed.release_memory_occupation()
        found |= {"bytes_awake": held - bare, "residue_bytes": machine.used() - bare}
        graphed.resume_memory_occupation()
        with engine(machine, model, graphs=False, **settings) as plain:
            expected = roll(machine, plain)
            stages["awake"] = compare(plain, expected, roll(machine, graphed))
            for name, tags in SLEEPS.items():
                slept = sleep(machine, graphed, tags)
                stages[name] = slept | compare(plain, expected, roll(machine, graphed))
            weights = other_weights(graphed)
            for each in (graphed, plain):
                each.update_weights_from_tensor(weights)
            changed = roll(machine, plain)
            assert ids(changed) != ids(expected), "an update with other weights changes what is said"
            stages["updated"] = compare(plain, changed, roll(machine, graphed))
            slept = sleep(machine, graphed, None)
            stages["updated, all slept"] = slept | compare(plain, changed, roll(machine, graphed))
        found["same_addresses"] = addresses(graphed) == at
    failed = [name for name, it in stages.items() if not (it["alike"] and it.get("there_and_back", True))]
    graphs = "" if machine.cuda else " (on a CPU there are none: two engines alike)"
    found["headlines"] = [
        f"{len(stages) - len(failed)} of {len(stages)} stages alike{graphs}",
        f"awake {found['bytes_awake'] / 1e6:.0f} MB, residue {found['residue_bytes'] / 1e6:.0f} MB",
    ]
    if failed or not found["same_addresses"]:
        raise AssertionError(f"failed: {failed}; same addresses: {found['same_addresses']}")
    if machine.cuda and found["warnings"]:
        raise AssertionError(f"perhaps nothing was captured: {found['warnings']}")


def roll(machine: Machine, engine: Engine) -> Outputs:
    """Greedy tokens and logprobs of prompts of many lengths, two of which have several samples."""
    vocab, tokens = engine.client.model_config.vocab_size, FEW if machine.dry else TOKENS
    lengths = LENGTHS[:4] if machine.dry else LENGTHS
    given = [prompts(1, length, vocab, seed=length)[0] for length in lengths]
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    outputs: Outputs = engine.generate(input_ids=given, sampling_params=params, return_logprob=True)
    outputs += engine.generate(input_ids=given[-2:], sampling_params={**params, "n": 4}, return_logprob=True)
    return outputs


def ids(outputs: Outputs) -> list[list[int]]:
    """Of each sample."""
    return [output["output_ids"] for output in outputs]


def compare(plain: Engine, expected: Outputs, got: Outputs) -> dict[str, Any]:
    """Where tokens differ first the best two must be near each other; up to there logprobs agree."""
    ties, largest = [], 0.0
    for one, other in zip(expected, got, strict=True):
        pairs = list(zip(one["output_ids"], other["output_ids"], strict=True))
        end = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        (mine, its) = (o["meta_info"]["output_token_logprobs"][:end] for o in (one, other))
        largest = max([largest, *(abs(a[0] - b[0]) for a, b in zip(mine, its, strict=True))])
        if end < len(pairs):
            ties.append(gap(plain, one["meta_info"]["prompt_ids"] + one["output_ids"][:end]))
    alike = all(tie <= NEAR for tie in ties) and largest <= NEAR
    return {"samples": len(got), "near_ties": ties, "logprob_difference": largest, "alike": alike}


def gap(engine: Engine, ids: list[int]) -> float:
    """How far the likeliest two tokens after `ids` are apart."""
    params = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    told = engine.generate(input_ids=ids, sampling_params=params, return_logprob=True, top_logprobs_num=2)
    (first, *_), (second, *_) = told["meta_info"]["output_top_logprobs"][0]
    return float(first - second)


def sleep(machine: Machine, engine: Engine, tags: list[str] | None) -> dict[str, Any]:
    """Release and resume; the device's memory falls by what was mapped, and is back afterwards: but for
    graphs, which are captured again only as they are needed."""
    report = engine.memory_report()
    mapped = sum(report[tag]["mapped"] for tag in tags or ("kv_cache", "weights"))
    awake = machine.used()
    seconds = machine.seconds(lambda: engine.release_memory_occupation(tags))
    asleep = machine.used()
    wake = machine.seconds(lambda: engine.resume_memory_occupation(tags))
    again = machine.used()
    back = awake if tags == ["cuda_graph"] else again
    there_and_back = min(awake - asleep, back - asleep) >= mapped or not machine.cuda
    return {
        "sleep_seconds": seconds,
        "wake_seconds": wake,
        "mapped_bytes": mapped,
        "freed_bytes": awake - asleep,
        "taken_bytes": again - asleep,
        "there_and_back": there_and_back,
    }


def addresses(engine: Engine) -> list[int]:
    """Of all weights, keys and values."""
    kv = engine.client._core.kv  # not public: nothing but a check of addresses needs it
    tensors = [tensor for _, tensor in engine.named_parameters()]
    return [tensor.data_ptr() for tensor in (*tensors, *kv.k, *kv.v)]


def other_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Every weight anew: norms stay, the rest is in another order."""
    return {
        name: tensor.clone() if tensor.ndim == 1 else tensor.flip(1).contiguous()
        for name, tensor in engine.named_parameters()
    }
