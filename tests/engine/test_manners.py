"""The engine is a guest: what belongs to the process is after every call as it was before."""

from __future__ import annotations

import logging
import os
import random
import signal
import warnings

import numpy as np
import pytest
import torch

from tokenspeed_rl import Engine

ASK = {
    "input_ids": [5, 6, 7, 8],
    "sampling_params": {"seed": 3, "max_new_tokens": 9, "top_k": 9, "temperature": 0.7},
}


def process_state():
    """All that a guest must leave alone, comparable."""
    generator = torch.get_rng_state()
    return {
        "torch": generator.tolist(),
        "numpy": [str(part) for part in np.random.get_state()],
        "random": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "environment": dict(os.environ),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "handlers": list(logging.getLogger().handlers),
        "level": logging.getLogger().level,
        "group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "filters": [str(entry) for entry in warnings.filters],
    }


def module_state(model):
    return [
        (name, parameter.requires_grad, parameter.grad, torch.clone(parameter.detach()).tolist())
        for name, parameter in model.named_parameters()
    ] + [(name, module.training) for name, module in model.named_modules()]


@pytest.fixture(params=["plain", "bfloat16 and no grad", "train mode"])
def lent(tiny, request):
    """A module in the process states that trainers use, restored afterwards."""
    model = tiny.model("qwen3").train(request.param == "train mode")
    if request.param != "bfloat16 and no grad":
        yield model
        return
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.no_grad():
            yield model
    finally:
        torch.set_default_dtype(torch.float32)


def test_every_call_leaves_process_and_module_alone(tiny, lent, tmp_path):
    """F14: init from a module, a config and a directory, generate, stream, update, share, shutdown: the
    states of torch, numpy and random, modes, defaults, environment, handlers are identical."""
    tiny.model().save_pretrained(tmp_path)
    process, module = process_state(), module_state(lent)

    def unchanged():
        assert process_state() == process
        assert module_state(lent) == module
        return True

    engine = Engine(lent, tokenizer=tiny.tokenizer(), max_total_tokens=4096)
    assert unchanged()
    params = {"n": 3, "max_new_tokens": 6, "top_p": 0.9}
    engine.generate("hello", params, return_logprob=True, logprob_start_len=0)
    assert unchanged()
    assert list(engine.generate(input_ids=[4, 5], sampling_params=params, stream=True)) and unchanged()
    engine.weights_changed(), engine.flush_cache(), engine.get_internal_state(), engine.weights_checksum()
    assert unchanged()
    engine.share_weights(lent)
    assert unchanged()
    for source in (tiny.config(), tmp_path):
        other = Engine(source, device="cpu", max_total_tokens=4096)
        assert unchanged()
        other.generate(input_ids=[1], sampling_params={"max_new_tokens": 2})
        other.shutdown()
        assert unchanged()
    engine.shutdown()
    assert unchanged()


def test_draws_do_not_depend_on_the_process(tiny, engine):
    """F14, F5: whatever state the global generators are in, the same seed gives the same samples."""
    ask = {"input_ids": tiny.prompt(9), "sampling_params": {"n": 4, "seed": 3, "max_new_tokens": 9}}
    first = [result["output_ids"] for result in engine.generate(**ask)]
    torch.rand(7), np.random.rand(3), random.random()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12345)
        assert [result["output_ids"] for result in engine.generate(**ask)] == first


@pytest.fixture(scope="module")
def usual(tiny):
    """What an engine gives in a process that nobody has set up."""
    with Engine(tiny.model("qwen3"), max_total_tokens=4096) as engine:
        return engine.generate(**ASK, return_logprob=True)


def test_every_dtype_and_mode_of_the_caller_gives_the_same(usual, lent):
    """F14: a trainer's default dtype, no_grad and train mode change nothing of what is computed."""
    with Engine(lent, max_total_tokens=4096) as engine:
        result = engine.generate(**ASK, return_logprob=True)
    assert result["output_ids"] == usual["output_ids"]
    triples = (each["meta_info"]["output_token_logprobs"] for each in (result, usual))
    assert [value for value, _, _ in next(triples)] == pytest.approx([value for value, _, _ in next(triples)])


def test_the_default_device_of_the_caller_is_not_used(tiny, usual):
    """F14: under `torch.set_default_device`, too, everything lies on the engine's device."""
    with torch.device("meta"), Engine(tiny.config(), device="cpu", max_total_tokens=4096) as engine:
        assert engine.weights_checksum()
    model = tiny.model("qwen3")
    with torch.device("meta"), Engine(model, max_total_tokens=4096) as engine:
        assert engine.generate(**ASK, return_logprob=True)["output_ids"] == usual["output_ids"]
