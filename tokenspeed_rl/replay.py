"""Dumped requests, run again on an engine and compared.

A line of a dump (core/watching/request_record.py) says all that one sample depended on, and the seed with
which a request of one sample draws what that one drew. So a replay under the same weights gives the same
tokens, drawn ones too, whatever ran beside them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenspeed_rl.engine import Engine
from tokenspeed_rl.errors import RequestError

Sample = Mapping[str, Any]
"""A line of a dump, or a result of `Engine.generate`."""


class Difference(NamedTuple):
    """One sample, then and now."""

    name: str
    tokens: int
    """Of the output, then."""
    version: str
    """Of the weights, then: several were at work where there is a plus."""
    first: int | None
    """The first position at which the outputs differ; None: they are the same."""
    logprob: float | None
    """The largest difference of a logprob before that; None: none was asked for then."""

    def within(self, tolerance: float) -> bool:
        """Whether they are the same, but for so much of a logprob."""
        return self.first is None and (self.logprob is None or self.logprob <= tolerance)


def read_dump(path: Path) -> list[Sample]:
    """The samples of a dump's file, or of all files of a folder, in the order in which they ended; embeddings
    and scores are left out.

    Raises:
        RequestError: there is none, or a line is no sample.
    """
    files = sorted(path.glob("requests-*.jsonl")) if path.is_dir() else [path]
    samples: list[Sample] = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"the dump can't be read: {error}", got=str(file)) from error
        for number, line in enumerate(lines, 1):
            if (sample := _sample(line, f"{file}:{number}")) is not None:
                samples.append(sample)
    if not samples:
        raise RequestError(
            "there is no dump, or none of a generation" if files else "there is no dump",
            got=str(path),
            fix="Name a file or dump_requests_folder; embeddings and scores aren't replayed.",
        )
    return samples


def replay(engine: Engine, samples: Sequence[Sample]) -> list[Sample]:
    """Each sample again, as a request of its own, all of one adapter in one batch; one that was cut short is
    cut there.

    Raises:
        RequestError: this engine can't serve one of them (vocabulary, tokenizer, size of the cache, adapter).
    """
    results: dict[int, Sample] = {}
    adapters = [sample["meta_info"].get("lora") for sample in samples]
    for adapter in dict.fromkeys(adapters):
        mine = [number for number, its in enumerate(adapters) if its == adapter]
        again = engine.generate(
            input_ids=[samples[number]["input_ids"] for number in mine],
            sampling_params=[_params(samples[number]) for number in mine],
            return_logprob=True,
            lora=adapter,
        )
        results.update(zip(mine, again, strict=True))
    return [results[number] for number in range(len(samples))]


def compare(then: Sample, now: Sample) -> Difference:
    """What came out then and now."""
    before, after = then["output_ids"], now["output_ids"]
    pairs = zip(before, after, strict=False)
    first = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if first is None and len(before) != len(after):
        first = min(len(before), len(after))
    meta = then["meta_info"]
    versions = dict.fromkeys(span["version"] for span in meta["weight_versions"])
    return Difference(
        name=f"{meta['id']}[{meta['index']}]",
        tokens=len(before),
        version=" + ".join(versions),
        first=first,
        logprob=_gap(meta.get("output_token_logprobs"), now["meta_info"]["output_token_logprobs"], first),
    )


def report(differences: Sequence[Difference], tolerance: float) -> str:
    """The samples that differ, and a last line about all."""
    wrong = [each for each in differences if not each.within(tolerance)]
    rows = [("sample", "weights", "tokens", "first difference", "logprobs differ by")]
    rows += [
        (d.name, d.version, str(d.tokens), "-" if d.first is None else str(d.first), _shown(d.logprob))
        for d in wrong
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    largest = max((d.logprob for d in differences if d.logprob is not None), default=None)
    same = f"{len(differences) - len(wrong)} of {len(differences)} samples are the same"
    last = f"{same} (ids, and logprobs to {tolerance:g}); logprobs differ by {_shown(largest)} at most"
    return "\n".join([*(table if wrong else ()), last])


def _sample(line: str, place: str) -> Sample | None:
    try:
        sample = json.loads(line)
        if sample["wants"]["reading"] is not None:
            return None
        if _is_whole(sample):
            return dict(sample)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise RequestError(
        f"{place} is no sample of a dump", got=line, fix="Name a file of dump_requests_folder."
    )


def _is_whole(sample: Sample) -> bool:
    """Whether all that a replay reads is there, and of its type. Raises KeyError, TypeError."""
    meta, params = sample["meta_info"], sample["sampling_params"]
    numbers = sample["seed"], sample["max_new_tokens"], params["min_new_tokens"], meta["index"]
    lists = sample["input_ids"], sample["output_ids"], meta["weight_versions"]
    return (
        all(type(number) is int for number in numbers)
        and all(isinstance(each, list) for each in lists)
        and isinstance(meta["id"], str)
        and isinstance(meta["finish_reason"], dict)
        and all(isinstance(span["version"], str) for span in meta["weight_versions"])
        and isinstance(meta.get("lora"), str | None)
        and isinstance(meta.get("output_token_logprobs"), list | None)
    )


def _params(sample: Sample) -> dict[str, Any]:
    cut = sample["meta_info"]["finish_reason"].get("type") == "abort"
    most = len(sample["output_ids"]) if cut else sample["max_new_tokens"]
    fields = {**sample["sampling_params"], "n": 1, "seed": sample["seed"], "max_new_tokens": most}
    return {**fields, "min_new_tokens": min(fields["min_new_tokens"], most)}


def _gap(before: Sequence[Any] | None, after: Sequence[Any], end: int | None) -> float | None:
    if before is None:
        return None
    pairs = list(zip(before, after, strict=False))[:end]
    gaps = [0.0 if one[0] == other[0] else abs(one[0] - other[0]) for one, other in pairs]
    return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)


def _shown(gap: float | None) -> str:
    return "-" if gap is None else f"{gap:.1e}"
