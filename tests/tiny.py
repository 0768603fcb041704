"""Tiny models, and the reference: transformers without a cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tokenspeed_rl import Engine

CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
}
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
EXPERTS: dict[str, dict[str, Any]] = {
    "moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4},
}
POSTED_WITHIN = 20.0


class Tiny:
    """What the tests of this folder build, under one name."""

    @staticmethod
    def config(family: str = "llama", **changes: Any) -> PretrainedConfig:
        return CONFIGS[family](**{**SIZES, **EXPERTS.get(family, {}), **changes})

    @staticmethod
    def model(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
        """Random weights, norms and biases included; without an EOS id unless `changes` has one.

        Family "moe" is Qwen3-MoE."""
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
    @torch.no_grad()
    def experts(model: PreTrainedModel, ids: Sequence[int]) -> list[list[list[int]]]:
        """[len(ids), layers with experts, k]: each token's experts by router logits, likeliest first."""
        found = model(input_ids=torch.tensor([list(ids)]), use_cache=False, output_router_logits=True)
        k = model.config.num_experts_per_tok
        chosen = [logits.double().softmax(-1).topk(k).indices for logits in found.router_logits]
        return torch.stack(chosen, 1).tolist()

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
        holding, go_on = threading.Event(), threading.Event()
        engine.client._core.loop.call(lambda: holding.set() or go_on.wait())
        assert holding.wait(POSTED_WITHIN)  # with nothing of what comes from here on in its hands
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
