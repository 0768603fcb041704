"""How fast are rollouts? SmolLM2-135M, 8 prompts x 8 samples, long-tailed lengths, temperature 1, against
peers.

    python benchmarks/rollout.py --peers transformers [--rounds 2] [--threads 2]

Every round runs the engine and each peer once, in turn, in one process, on the same prompts, with every
sample ending at the same length on all sides (data/rollout_lengths.json: log-normal, mean 40, longest 192).
The figure is useful tokens per second: tokens of a sample up to its own end. The engine also returns every
token's logprob; transformers' `generate` is spared that.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import describe, load_smollm2, table
from transformers import StoppingCriteria, StoppingCriteriaList

DATA = Path(__file__).parent / "data"
Run = Callable[[list[list[int]], list[int]], list[int]]


def workload(tokenizer: Any) -> tuple[list[list[int]], list[int]]:
    """Prompt ids of all 64 samples, prompt-major, and how many tokens each generates."""
    messages = json.loads((DATA / "rollout_prompts.json").read_text())
    lengths = json.loads((DATA / "rollout_lengths.json").read_text())
    each = len(lengths) // len(messages)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": message}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for message in messages
    ]
    return [prompt for prompt in prompts for _ in range(each)], lengths


def engine_run(model: Any) -> Run:
    """Ours, sharing the model's weights."""
    from tokenspeed_rl import Engine

    engine = Engine(model)

    def run(prompts: list[list[int]], lengths: list[int]) -> list[int]:
        engine.flush_cache()  # every round computes its prompts
        params = [{"max_new_tokens": n, "ignore_eos": True, "temperature": 1.0} for n in lengths]
        outputs = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        assert all(len(o["meta_info"]["output_token_logprobs"]) == len(o["output_ids"]) for o in outputs)
        return [len(o["output_ids"]) for o in outputs]

    return run


class OwnLength(StoppingCriteria):
    """Row i is done after `lengths[i]` new tokens."""

    def __init__(self, prompt_len: int, lengths: list[int]) -> None:
        self.ends = prompt_len + torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def transformers_run(model: Any, pad_id: int) -> Run:
    """transformers' `generate` over one left-padded static batch, as plain trainers call it."""

    def run(prompts: list[list[int]], lengths: list[int]) -> list[int]:
        width = max(map(len, prompts))
        ids = torch.tensor([[pad_id] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.no_grad():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(lengths),
                eos_token_id=None,
                pad_token_id=pad_id,
                stopping_criteria=StoppingCriteriaList([OwnLength(width, lengths)]),
            )
        return [min(out.shape[1] - width, n) for n in lengths]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default="transformers", help="comma-separated: transformers")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_smollm2()
    prompts, lengths = workload(tokenizer)
    runs: dict[str, Run] = {"tokenspeed_rl": engine_run(model)}
    for peer in filter(None, args.peers.split(",")):
        if peer != "transformers":
            parser.error(f"--peers: {peer} is no peer this benchmark has; choose transformers")
        runs[peer] = transformers_run(model, tokenizer.pad_token_id or 0)

    print(describe(args.threads))
    print(f"{len(prompts)} samples, {sum(map(len, prompts))} prompt tokens, {sum(lengths)} useful tokens")
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():  # warm up
        run(prompts[:1], [4])
    for _ in range(args.rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            produced = run(prompts, lengths)
            seconds[name].append(time.perf_counter() - started)
            assert produced == lengths, f"{name} produced other lengths"
    ours = median(seconds["tokenspeed_rl"])
    rows = [
        [name, f"{median(s):.1f}", f"{sum(lengths) / median(s):.1f}", f"{median(s) / ours:.2f}x"]
        for name, s in seconds.items()
    ]
    print(table(["engine", "seconds", "tokens/s", "ours is"], rows))


if __name__ == "__main__":
    main()
