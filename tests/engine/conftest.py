"""Tiny models, engines that end with their test, and the reference: transformers without a cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tokenspeed_rl import Engine

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
POSTED_WITHIN = 20.0


class Tiny:
    """What the tests of this folder build, under one name."""

    @staticmethod
    def config(family: str = "llama", **changes: Any) -> PretrainedConfig:
        return CONFIGS[family](**{**SIZES, **changes})

    @staticmethod
    def model(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
        """Random weights, norms and biases included; without an EOS id unless `changes` has one."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(Tiny.config(family, **changes)).eval()
            for name, parameter in model.named_parameters():
                if "norm" in name or "bias" in name:
                    torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
        return model

    @staticmethod
    def successor(following: Callable[[int], int] | None = None, **changes: Any) -> PreTrainedModel:
        """A model whose most likely token after t, by far, is `following(t)`: without it t + 1."""
        model = Tiny.model("llama", **changes)
        vocab = model.config.vocab_size
        order = [(following or (lambda t: (t + 1) % vocab))(t) for t in range(vocab)]
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            model.model.norm.weight.fill_(1.0)
            unit = torch.nn.functional.normalize(model.model.embed_tokens.weight)
            model.lm_head.weight.zero_()
            model.lm_head.weight.index_add_(0, torch.tensor(order), unit * 4.0)
        return model

    @staticmethod
    def tokenizer(size: int = 256, names: Mapping[int, str] | None = None) -> PreTrainedTokenizerFast:
        """Token id b is the byte b, so that a character may take several tokens, but for those in `names`."""
        letters = bytes_to_unicode()
        vocab = {letters[b]: b for b in range(size)}
        for token, text in (names or {}).items():
            del vocab[letters[token]]
            vocab["".join(letters[b] for b in text.encode())] = token
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)

    @staticmethod
    def prompt(length: int, seed: int = 0, vocab: int = 256) -> list[int]:
        return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    @staticmethod
    @torch.no_grad()
    def logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
        """[len(ids), V] float64: row i is what follows ids[: i + 1]."""
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double()

    @staticmethod
    def ref_logprobs(model: PreTrainedModel, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """logprob of ids[1:], each given all before it; temperature 0 is 1."""
        rows = (Tiny.logits(model, ids) / (temperature or 1.0)).log_softmax(-1)
        return [rows[at, token].item() for at, token in enumerate(ids[1:])]

    @staticmethod
    def gap(
        model: PreTrainedModel, prompt: Sequence[int], result: dict[str, Any], temperature: float = 1.0
    ) -> float:
        """Largest difference of the output's "sampling" logprobs from the reference's."""
        ids = [*prompt, *result["output_ids"]]
        expected = Tiny.ref_logprobs(model, ids, temperature)[len(prompt) - 1 :]
        triples = result["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in triples] == result["output_ids"]
        return max(
            (abs(value - ref) for (value, _, _), ref in zip(triples, expected, strict=True)), default=0.0
        )

    @staticmethod
    def state(engine: Engine) -> dict[str, Any]:
        return engine.get_internal_state()[0]

    @staticmethod
    def all_back(engine: Engine) -> None:
        """Nothing of `engine` runs, waits or holds a page."""
        for _ in range(2):  # what the first posts behind a step that still runs, the second waits for
            engine.flush_cache()
        state = Tiny.state(engine)
        assert state["num_running"] == state["num_waiting"] == engine.get_load()[0].num_reqs == 0
        assert state["pages"]["free"] == state["pages"]["total"]

    @staticmethod
    @contextmanager
    def held(engine: Engine) -> Iterator[None]:
        """Within, no step is taken: everything submitted waits for the same first step."""
        engine.client._core.capacity()  # the first request would wait for the loop to map the cache
        go_on = threading.Event()
        engine.client._core.loop.call(go_on.wait)
        try:
            yield
        finally:
            go_on.set()

    @staticmethod
    def after_step(engine: Engine, number: int, call: Callable[[], Any]) -> Future[Any]:
        """Make `call`, on a thread of its own, so that it acts right after the `number`-th forward from now.

        The loop is held after that forward until the call's command, or request, is in its inbox.
        """
        loop = engine.client._core.loop
        run, post = loop.runner.run, loop._post
        posted, outcome = threading.Event(), Future[Any]()
        left = number

        def make_call() -> None:
            try:
                outcome.set_result(call())
            except BaseException as error:
                outcome.set_exception(error)
            finally:
                posted.set()

        def count(plan: Any) -> Any:
            nonlocal left
            result = run(plan)
            left -= 1
            if left == 0:
                posted.clear()
                threading.Thread(target=make_call, daemon=True).start()
                assert posted.wait(POSTED_WITHIN)
            return result

        def note(*command: Any) -> None:
            post(*command)
            posted.set()

        loop.runner.run, loop._post = count, note
        return outcome


class StepGate:
    """An engine's steps, let through one by one: the loop stands before the next forward until told."""

    def __init__(self, engine: Engine) -> None:
        self._loop = engine.client._core.loop
        self._run, self._submit, self._call = self._loop.runner.run, self._loop.submit, self._loop.call
        self._arrivals, self._permits = threading.Semaphore(0), threading.Semaphore(0)
        self._submissions, self._commands = threading.Semaphore(0), threading.Semaphore(0)
        self._open = self._at_gate = False

    def __enter__(self) -> StepGate:
        loop: Any = self._loop
        loop.runner.run, loop.submit, loop.call = self._pass, self._count, self._count_command
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        loop: Any = self._loop
        loop.runner.run, loop.submit, loop.call = self._run, self._submit, self._call

    def wait(self) -> None:
        """Until the loop stands at the gate, all earlier steps done."""
        if not self._at_gate:
            assert self._arrivals.acquire(timeout=POSTED_WITHIN), "no step came"
            self._at_gate = True

    def step(self, count: int = 1) -> None:
        """Let `count` steps through, each as it comes; the last may still run on return."""
        for _ in range(count):
            self.wait()
            self._at_gate = False
            self._permits.release()

    def submitted(self, count: int = 1) -> None:
        """Until `count` more calls have submitted their requests."""
        for _ in range(count):
            assert self._submissions.acquire(timeout=POSTED_WITHIN), "nothing was submitted"

    def commanded(self, count: int = 1) -> None:
        """Until `count` more control calls are in the loop's inbox."""
        for _ in range(count):
            assert self._commands.acquire(timeout=POSTED_WITHIN), "no command came"

    def open(self) -> None:
        """Let everything through from now on."""
        self._open = True
        self._permits.release()

    def _pass(self, plan: Any) -> Any:
        self._arrivals.release()
        if not self._open:
            assert self._permits.acquire(timeout=POSTED_WITHIN), "the gate was left closed"
        return self._run(plan)

    def _count(self, *arguments: Any) -> None:
        self._submit(*arguments)
        self._submissions.release()

    def _count_command(self, command: Callable[[], Any]) -> Any:
        future = self._call(command)
        self._commands.release()
        return future


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    return Tiny


@pytest.fixture
def step_gate() -> type[StepGate]:
    """`with step_gate(engine) as gate:` holds the loop before its next step."""
    return StepGate


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """`Engine(model, **options)` on the CPU with a small KV cache; all are shut down after the test."""
    made: list[Engine] = []

    def make(model: Any, **options: Any) -> Engine:
        made.append(Engine(model, **{"device": "cpu", "max_total_tokens": 4096, **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """One model for all tests of a file that don't write its weights."""
    return Tiny.model()


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    """One engine that shares `model`, with a tokenizer, for all tests of a file that don't break it."""
    with Engine(model, tokenizer=Tiny.tokenizer(), max_total_tokens=4096) as made:
        yield made


@pytest.fixture(scope="module")
def counting() -> PreTrainedModel:
    """A model whose greedy output after token t is t + 1, t + 2 ... (mod 256); nobody writes its weights."""
    return Tiny.successor()


@pytest.fixture(scope="module")
def counter(counting: PreTrainedModel) -> Iterator[Engine]:
    """An engine of `counting` with a tokenizer whose token b is the byte b, for tests that don't break it."""
    with Engine(counting, tokenizer=Tiny.tokenizer(), max_total_tokens=1024) as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for callers that block."""
    with ThreadPoolExecutor(12) as made:
        yield made
