"""Seeds derived by hashing: the same for one purpose, on every rank and in any order, otherwise unrelated.

Adding to a seed (`seed + step`) makes step 1 of seed 0 draw what step 0 of seed 1 drew; hashing doesn't.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence

SeedPart = int | str | Sequence[int]


def derive(seed: int, *path: SeedPart) -> int:
    """A seed in 0 .. 2**63 - 1 for the purpose `path`, e.g. `derive(cfg.seed, "minibatches", step)`.

    It depends on the values alone, not on the process, its hash randomisation, rank or world size. Different
    paths collide with the odds of random 63-bit numbers. 1 and "1" are different parts.
    """
    text = json.dumps([seed, *path], separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def prompt_seeds(seed: int, step: int, keys: Sequence[SeedPart]) -> list[int]:
    """One seed per prompt of a step; the engine keys the samples of a prompt by their index.

    `keys` identify the prompts (token ids, or a data set's id). A prompt's seed depends on its key and on how
    many with the same key stand before it in `keys`: equal prompts are sampled differently, and neither other
    prompts nor their order matter.
    """
    seen: Counter[SeedPart] = Counter()
    seeds = []
    for key in keys:
        seeds.append(derive(seed, "prompt", step, key, seen[key]))
        seen[key] += 1
    return seeds
