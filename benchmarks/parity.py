"""Does the engine say what transformers says? Greedy ids and logprobs of SmolLM2-135M on 20 prompts, float32.

    python benchmarks/parity.py [--threads 2]

Each prompt runs alone and all 20 run in one batch; ids are held against transformers' `generate`, logprobs
against one full forward without a cache. Exits with 1 where ids differ or a logprob is off by 1e-4 or more.
"""

import argparse
import sys

import torch
from common import describe, load_smollm2, table

from tokenspeed_rl import Engine

QUESTIONS = """\
What is the capital of France?
Name three primes.
Translate 'good morning' into Spanish.
Why is the sky blue?
Write a haiku about rain.
How many legs does a spider have?
What is 12 times 12?
Give me a word that rhymes with light.
Who wrote Hamlet?
What does a compiler do?
List the days of the week.
Spell the word necessary.
What is the opposite of cold?
Explain gravity to a child.
Name a fruit that is yellow.
What comes after Tuesday?
Write one sentence about the sea.
What is the boiling point of water?
How do you make tea?
Say hello.""".splitlines()
NEW_TOKENS = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    model, tokenizer = load_smollm2()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for q in QUESTIONS
    ]
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
    with Engine(model, enable_prefix_caching=False) as engine:
        alone = [engine.generate(input_ids=p, sampling_params=params, return_logprob=True) for p in prompts]
        batch = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    same = {"alone": 0, "in a batch": 0}
    gap = {"alone": 0.0, "in a batch": 0.0}
    for prompt, one, other in zip(prompts, alone, batch, strict=True):
        with torch.no_grad():
            ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)[
                0
            ].tolist()
            logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        expected = ids[len(prompt) :]
        for name, output in (("alone", one), ("in a batch", other)):
            same[name] += output["output_ids"] == expected
            for place, (value, token, _) in enumerate(output["meta_info"]["output_token_logprobs"]):
                gap[name] = max(gap[name], abs(value - logprobs[len(prompt) + place - 1, token].item()))
    print(describe(torch.get_num_threads()))
    rows = [[name, f"{same[name]} of {len(prompts)}", f"{gap[name]:.1e}"] for name in same]
    print(table(["greedy, against transformers", "same ids", "largest logprob difference"], rows))
    return int(min(same.values()) < len(prompts) or max(gap.values()) >= 1e-4)


if __name__ == "__main__":
    sys.exit(main())
