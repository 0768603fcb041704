"""Weight updates that succeed: by every path and in every state, exact, receipted, without a trace of
before."""

from __future__ import annotations

import random
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lifecycle.guarded import (
    HOW,
    PATHS,
    PROMPT,
    exact,
    looks,
    parcel,
    save_model,
    update,
    version,
    weights_of,
)
from tests.lifecycle.rollouts import EXACT, ask, labels, span_gap, take
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import WeightsInvalidError
from tokenspeed_rl.weights import Receipt, checksum

Q, K, V = (f"model.layers.0.self_attn.{x}_proj" for x in "qkv")


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Pair:
    """Two models of one shape, each also as a checkpoint, and an engine with weights of its own for them."""

    def __init__(self, family: str, tied: bool, folder: Path) -> None:
        self.models = [Tiny.model(family, seed, tie_word_embeddings=tied) for seed in (0, 1)]
        self.saved = [save_model(model, folder / f"W{i}") for i, model in enumerate(self.models)]
        self.engine = Engine(self.models[0].config, max_total_tokens=4096, page_size=4)

    def send(self, number: int, path: str, how: str = "engine", **fields: Any) -> Receipt:
        """Update to model `number`; the receipt."""
        source = self.saved[number] if path == "disk" else weights_of(self.models[number])
        receipt = update(self.engine, how, path, source, **fields)
        assert isinstance(receipt, Receipt), receipt
        return receipt

    def places(self) -> dict[str, int]:
        """Where the weights are."""
        return {name: tensor.data_ptr() for name, tensor in self.engine.named_parameters()}


FAMILIES = [("llama", False), ("qwen2", True), ("qwen3", False)]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda p: f"{p[0]}-{'tied' if p[1] else 'untied'}")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(*request.param, tmp_path_factory.mktemp("pair"))
    yield made
    made.engine.shutdown()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair("llama", False, tmp_path_factory.mktemp("llama"))
    yield made
    made.engine.shutdown()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("path", PATHS)
def test_by_every_path(pair: Pair, path: str, how: str) -> None:
    """D1, D4, E6: W1, W1 again, W0. A warm prompt is computed anew under each, exactly, without a cached
    token; the receipt says what was written and has the trainer's checksum; no address moves."""
    pair.send(0, "mapping")
    engine, start = pair.engine, looks(pair.engine)
    places = pair.places()
    assert exact(pair.models[0], engine) < EXACT and exact(pair.models[0], engine, cached=20) < EXACT
    for label, number in (("one", 1), ("two", 1), ("three", 0)):
        model, before = pair.models[number], version(engine)
        receipt = pair.send(number, path, how, weight_version=label)
        weights = weights_of(model)
        assert receipt.loaded == tuple(name for name, _ in engine.named_parameters())
        assert set(receipt.loaded) == set(weights)
        assert receipt.missing == receipt.unknown == ()
        assert receipt.bytes == sum(tensor.nbytes for tensor in weights.values())
        assert receipt.version == label and receipt.seconds >= 0
        assert receipt.kind == ("disk" if path == "disk" else "tensor")
        assert receipt.checksum == checksum(weights) == engine.weights_checksum()
        assert version(engine)[:3] == (before[0] + 1, label, "valid")
        for cached in (0, 20):
            assert exact(model, engine, cached=cached) < EXACT
        assert pair.places() == places
    assert looks(engine) == start


@pytest.mark.parametrize("how", HOW)
def test_the_model_is_called_by_its_new_path(pair: Pair, how: str, make_engine: Any) -> None:
    """E7, contract 6: an update from disk changes path and name; tensors don't; a name that was configured
    stays."""
    pair.send(1, "disk", how)
    called = (str(pair.saved[1]), "W1")
    assert version(pair.engine)[3:] == called
    pair.send(0, "mapping", how)
    assert version(pair.engine)[3:] == called
    named = make_engine(pair.models[0].config, served_model_name="policy")
    assert isinstance(update(named, how, "disk", pair.saved[1]), Receipt)
    assert version(named)[3:] == (str(pair.saved[1]), "policy")


@pytest.mark.parametrize("size", [1, 2, 7, None])
@pytest.mark.parametrize("path", ["mapping", "iterator", "bucket", "bytes"])
def test_buckets_of_one_version(pair: Pair, path: str, size: int | None) -> None:
    """E1, E16: buckets of any size, shuffled so that q, k and v part, under one label: invalid until the
    last, then a complete update with checksum and output of the whole. Each receipt says what is still
    missing."""
    pair.send(0, "mapping")
    engine, weights = pair.engine, list(weights_of(pair.models[1]).items())
    random.Random(size).shuffle(weights)
    step = size or len(weights)
    for start in range(0, len(weights), step):
        piece = weights[start : start + step]
        receipt = update(engine, "engine", path, piece, partial=True, weight_version="whole")
        assert isinstance(receipt, Receipt)
        rest = {name for name, _ in weights[start + step :]}
        assert set(receipt.loaded) == {name for name, _ in piece} and set(receipt.missing) == rest
        if rest:
            assert receipt.version == "invalid"
            with pytest.raises(WeightsInvalidError, match=r"'whole' has arrived in part: \d+ of"):
                engine.generate(input_ids=[1])
    assert receipt.version == "whole"
    assert receipt.checksum == checksum(weights) and exact(pair.models[1], engine, cached=0) < EXACT


def test_pieces_of_two_versions(llama: Pair) -> None:
    """E16: halves under two labels are no version, until one of them is complete."""
    llama.send(0, "mapping")
    engine, weights = llama.engine, list(weights_of(llama.models[1]).items())
    halves = weights[: len(weights) // 2], weights[len(weights) // 2 :]
    for half, label in zip(halves, ("a", "b"), strict=True):
        engine.update_weights_from_tensor(half, partial=True, weight_version=label)
    with pytest.raises(WeightsInvalidError, match="'b' has arrived in part"):
        engine.generate(input_ids=[1])
    reply = engine.update_weights_from_tensor(halves[0], partial=True, weight_version="b")
    assert reply.report.version == "b" and exact(llama.models[1], engine) < EXACT


def test_a_subset_is_a_version_of_its_own(llama: Pair) -> None:
    """E4, D1: some weights changed without a label: the rest stays, nothing cached is used."""
    llama.send(0, "mapping")
    engine = llama.engine
    mix = Tiny.model()
    new = {HEAD: weights_of(llama.models[1])[HEAD]}
    with torch.no_grad():
        mix.lm_head.weight.copy_(new[HEAD])
    exact(llama.models[0], engine)
    receipt = engine.update_weights_from_tensor(new, partial=True).report
    assert receipt.loaded == (HEAD,) and len(receipt.missing) == len(weights_of(mix)) - 1
    assert exact(mix, engine, cached=0) < EXACT and receipt.checksum == checksum(weights_of(mix))


@pytest.mark.parametrize("mode", ["abort", "wait", "keep", "retract"])
@pytest.mark.parametrize("path", PATHS)
def test_under_every_pause(llama: Pair, path: str, mode: str) -> None:
    """B1, C6: an update of a paused engine never waits for its resume, and changes no pause; who waits is
    then served by the new weights."""
    llama.send(0, "mapping")
    engine = llama.engine
    with engine.paused(mode):
        waiting = ask(engine, PROMPT)
        assert llama.send(1, path, "async" if mode in ("keep", "wait") else "engine").loaded
        assert Tiny.state(engine)["admission"] == mode and waiting._requests[0].output_len == 0
    result = take(engine, waiting)
    label = Tiny.state(engine)["weight_version"]
    assert labels(result) == [(label, 0, 6)] and span_gap({label: llama.models[1]}, PROMPT, result) < EXACT


def test_one_label_twice(llama: Pair) -> None:
    """E17: two sets of weights under one label share no KV: the epoch, not the label, is the identity."""
    for number in (0, 1, 0):
        llama.send(number, "mapping", weight_version="same", flush_cache=False)
        assert exact(llama.models[number], llama.engine, cached=0) < EXACT
        assert exact(llama.models[number], llama.engine, cached=20) < EXACT


@pytest.mark.parametrize("how", HOW)
def test_the_sender_goes_on_with_its_buffer(llama: Pair, how: str) -> None:
    """E11: what the caller does to its tensors after the return, or an iterator to the one buffer that all of
    them came in, doesn't reach the engine."""
    weights = {name: tensor.clone() for name, tensor in weights_of(llama.models[1]).items()}
    for path in ("mapping", "bucket"):
        fields = parcel(path, weights)
        receipt = llama.engine.update_weights_from_tensor(**fields).report
        for tensor in weights.values():
            tensor.fill_(torch.nan)
        if path == "bucket":
            fields["named_tensors"].data.fill_(255)
        weights = {name: tensor.clone() for name, tensor in weights_of(llama.models[1]).items()}
        assert receipt.checksum == checksum(weights) and exact(llama.models[1], llama.engine) < EXACT
    buffer = torch.empty(max(tensor.numel() for tensor in weights.values()))

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            place = buffer[: tensor.numel()].view(tensor.shape)
            yield name, place.copy_(tensor)

    llama.send(0, "mapping")
    received = update(llama.engine, how, "iterator", stream())
    assert isinstance(received, Receipt) and received.checksum == checksum(weights)


def anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0]) * 1024


def test_a_hundred_updates(llama: Pair) -> None:
    """E10: by random paths, through both interfaces, also refused ones: every incoming tensor is dead when
    its call has returned, and memory is flat."""
    engine, chance, held = llama.engine, random.Random(0), []
    for number in range(100):
        path = chance.choice([path for path in PATHS if path != "disk"])
        weights = {name: tensor.clone() for name, tensor in weights_of(llama.models[number % 2]).items()}
        wrong = number % 10 == 9
        if wrong:
            weights[HEAD] = torch.zeros(3)
        refs = [weakref.ref(tensor) for tensor in weights.values()]
        found = update(engine, chance.choice(HOW), path, weights, atomic=wrong, partial=chance.random() < 0.3)
        assert isinstance(found, Receipt) != wrong
        if wrong:
            del found
        weights.clear()
        assert all(ref() is None for ref in refs)
        if number % 20 == 19:
            held.append(anonymous())
    assert max(held[1:]) - held[0] < 3 << 20


def test_thirty_random_updates(llama: Pair, tmp_path: Path) -> None:
    """F13: by random paths, in random dtypes, whole and in pieces: the gap to transformers doesn't grow."""
    chance, model, gaps = random.Random(1), Tiny.model(), []
    for number in range(30):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                drawn = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.copy_(drawn.bfloat16() + (1 if "norm" in name else 0))
        path, fields = chance.choice(PATHS), {}
        pieces: list[Any] = [save_model(model, tmp_path / str(number))]
        if path != "disk":
            kind = chance.choice([torch.float32, torch.bfloat16, torch.float64])
            source = [(name, tensor.to(kind)) for name, tensor in weights_of(model).items()]
            chance.shuffle(source)
            with torch.no_grad():
                for name, tensor in source:
                    model.get_parameter(name).copy_(tensor)
            cut = chance.randrange(len(source))
            pieces = [source[:cut], source[cut:]]
            fields = {"partial": True, "weight_version": f"v{number}"}
        for piece in pieces:
            found = update(llama.engine, chance.choice(HOW), path, piece, **fields)
        assert isinstance(found, Receipt) and found.checksum == checksum(weights_of(model))
        gaps.append(exact(model, llama.engine, cached=0))
    assert max(gaps) < EXACT and max(gaps[20:]) < 4 * max(gaps[:10])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


SURROUNDINGS = {
    "inference mode": torch.inference_mode,
    "with meta": lambda: torch.device("meta"),
    "meta by default": lambda: default_device("meta"),
    "float64 by default": lambda: default_dtype(torch.float64),
}


def whole_life(weights: list[dict[str, Tensor]], saved: Path, config: Any) -> Iterator[object]:
    """Constructed, updated by every path, asleep and awake: what is seen of it."""
    ask = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5, "seed": 1}, "return_logprob": True}
    with Engine(saved, device="cpu", max_total_tokens=512, weights_backup="cpu") as engine:
        yield engine.weights_checksum()
    with Engine(config, device="cpu", max_total_tokens=512, weights_backup="cpu") as engine:
        for at, path in enumerate(PATHS):
            atomic = {} if path == "disk" else {"atomic": at % 2 == 0}
            receipt = update(engine, "engine", path, saved if path == "disk" else weights[at % 2], **atomic)
            assert isinstance(receipt, Receipt)
            yield receipt.checksum
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        (result,) = [engine.generate(**ask)]
        yield result["output_ids"], result["meta_info"]["output_token_logprobs"]
        yield engine.get_weights_by_name("model.norm.weight")
        yield [(name, tensor.dtype, tensor.device.type) for name, tensor in engine.named_parameters()]
        yield [tensor.is_inference() for _, tensor in engine.named_parameters()]
        core = engine.client._core
        yield [tensor.is_inference() for tensor in (*core.kv.k, *core.kv.v)]
        yield [tensor.is_inference() for kept in core.source.store.weights.values() for tensor in kept]


@pytest.mark.parametrize("where", SURROUNDINGS)
def test_a_whole_life_in_the_callers_surroundings(where: str, tmp_path: Path) -> None:
    """F14: inference mode, a default device and a default dtype of the caller's change nothing: not a bit of
    weights and logprobs, and every tensor is an ordinary one where the engine is."""
    models = [Tiny.model("qwen2", seed) for seed in (0, 1)]
    weights, saved = [weights_of(model) for model in models], save_model(models[1], tmp_path)
    usual = list(whole_life(weights, saved, models[0].config))
    with SURROUNDINGS[where]():
        found = list(whole_life(weights, saved, models[0].config))
    assert found == usual
    assert not any(flag for flags in found[-3:] for flag in flags)
