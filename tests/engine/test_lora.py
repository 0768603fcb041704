"""LoRA adapters of a live PEFT module, decoded beside the base: exact in any company, and in training."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model

from tokenspeed_rl.core.intake import Intake
from tokenspeed_rl.errors import ConfigError, RequestError, WeightsInvalidError
from tokenspeed_rl.requests import GenerateReqInput
from tokenspeed_rl.weights import checksum, unwrap

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORAS = (None, "first", "second")
PARAMS = {"max_new_tokens": 8}


def config(**fields):
    """Adapters whose B isn't zero, so that they matter from the start."""
    return LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ALL, "init_lora_weights": False, **fields}
    )


def peft_module(tiny, *, model=None, **fields):
    """A tiny model with the adapters "first" (all projections) and "second" (three of them, rank 2)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = get_peft_model(model or tiny.model(), config(**fields), adapter_name="first")
        few = ["q_proj", "v_proj", "down_proj"]
        module.add_adapter("second", config(r=2, lora_alpha=5, target_modules=few, use_rslora=True, **fields))
    return module.eval()


@contextmanager
def active(module, lora):
    """The PEFT module, computing with one adapter or with none, in evaluation mode."""
    before, training = module.active_adapter, module.training
    module.eval()
    try:
        if lora is None:
            with module.disable_adapter():
                yield module
        else:
            module.set_adapter(lora)
            yield module
    finally:
        module.set_adapter(before)
        module.train(training)


def gap(tiny, module, prompt, lora, result):
    """Largest difference of the output's logprobs from PEFT's."""
    with active(module, lora):
        return tiny.gap(module, prompt, result)


def together(tiny, engine, asks, **fields):
    """The results of (prompt, lora) requests that all begin before the same step."""
    fields = {"sampling_params": PARAMS, "return_logprob": True, **fields}
    with tiny.held(engine):
        streams = [
            engine.client.generate_request(GenerateReqInput(input_ids=prompt, lora=lora, **fields))
            for prompt, lora in asks
        ]

    async def results():
        return await asyncio.gather(*(stream.result() for stream in streams))

    return engine.llm.run(results())


def check_mixed(tiny, engine, module, asks, **fields):
    """All of them exact, in one batch; returns the results."""
    results = together(tiny, engine, asks, **fields)
    for (prompt, lora), result in zip(asks, results, strict=True):
        for sample in result if isinstance(result, list) else [result]:
            assert len(sample["output_ids"]) == PARAMS["max_new_tokens"]
            assert gap(tiny, module, prompt, lora, sample) < 1e-4
    return results


@pytest.fixture(scope="module")
def shared(tiny):
    """A module that nobody writes."""
    return peft_module(tiny)


def base_checksum(engine):
    return checksum((name, tensor) for name, tensor in engine.named_parameters() if "lora_" not in name)


@pytest.mark.parametrize("sync", ["weights_changed", "watch"])
def test_a_hundred_steps_of_the_adapters(tiny, make_engine, sync):
    """H13: 100 AdamW steps on a real loss, with dropout, each followed by a sync of 0 bytes: the base keeps
    its bits and its place, and base and adapters decode in one batch as PEFT computes them."""
    module = peft_module(tiny, lora_dropout=0.2).train()
    engine = make_engine(module, page_size=4)
    adapters = [param for name, param in module.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW(adapters, lr=5e-3)
    if sync == "watch":
        engine.watch(optimizer)
    base, addresses = base_checksum(engine), {n: t.data_ptr() for n, t in engine.named_parameters()}
    ids = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(3))
    prompts = [tiny.prompt(13), tiny.prompt(6, seed=1)]
    asks = [(prompt, lora) for prompt in prompts for lora in LORAS]
    losses = []
    for step in range(1, 101):
        module.set_adapter(LORAS[1 + step % 2])
        optimizer.zero_grad()
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if sync == "weights_changed":
            assert engine.weights_changed().bytes == 0
        assert tiny.state(engine)["weight_version"] == str(step)
        if step % 10 == 0:
            results = check_mixed(tiny, engine, module, asks)
            assert {r["meta_info"]["cached_tokens"] for r in results} == {0}, (
                "KV of another epoch, or adapter"
            )
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10]), "it learned"
    assert base_checksum(engine) == base
    assert {n: t.data_ptr() for n, t in engine.named_parameters()} == addresses
    assert engine.weights_checksum() == checksum(module.named_parameters())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_every_family(tiny, make_engine, family):
    """H13: with biases beside the adapters, with norms of heads, with sliding windows."""
    module = peft_module(tiny, model=tiny.model(family))
    engine = make_engine(module)
    results = check_mixed(tiny, engine, module, [(tiny.prompt(20), lora) for lora in LORAS])
    values = [[v for v, *_ in result["meta_info"]["output_token_logprobs"]] for result in results]
    assert all(abs(one[0] - other[0]) > 1e-3 for one, other in pairwise(values))


def unfused(module):
    """Two layers on one tensor: it can't move, so that q, k and v stay apart."""
    attentions = [layer.self_attn for layer in unwrap(module).model.layers]
    attentions[1].k_proj.base_layer.weight = attentions[0].k_proj.base_layer.weight
    return module


@pytest.mark.parametrize(
    "options", [{}, {"chunked_prefill_size": 5}, {"enable_prefix_caching": False}], ids=str
)
@pytest.mark.parametrize("shape", [lambda module: module, unfused], ids=["fused", "unfused"])
def test_a_mixed_batch(tiny, make_engine, shape, options):
    """H13: many requests of all three kinds, samples too, in one batch, with chunked prompts or without
    caching, fused or not."""
    module = shape(peft_module(tiny))
    engine = make_engine(module, page_size=4, **options)
    parts = len(engine.client._core.source.store.weights["layers.0.qkv.weight"])
    assert parts == (3 if shape is unfused else 1)
    prompts = [tiny.prompt(length, seed=length) for length in (3, 9, 17, 30)]
    asks = [(prompt, lora) for prompt in prompts for lora in LORAS]
    check_mixed(tiny, engine, module, asks, sampling_params={**PARAMS, "n": 2})
    tiny.all_back(engine)


def test_nothing_is_shared_between_adapters(tiny, make_engine, shared):
    """H13: equal prompts of other adapters, in flight or cached, neither lead, nor fork, nor lend a page;
    those of one adapter do."""
    engine, prompt = make_engine(shared, page_size=4), tiny.prompt(17)
    for cached in (0, 16):
        results = check_mixed(tiny, engine, shared, [(prompt, lora) for lora in LORAS])
        assert [r["meta_info"]["cached_tokens"] for r in results] == [cached] * 3
    results = check_mixed(tiny, engine, shared, [(prompt, "first")] * 2, sampling_params={**PARAMS, "n": 2})
    assert sorted(s["meta_info"]["cached_tokens"] for r in results for s in r) == [16, 17, 17, 17]


def test_preemption(tiny, make_engine, shared):
    """H13, C3: in a cache too small for all, requests come back with their adapter."""
    engine = make_engine(shared, page_size=4, max_total_tokens=64)
    asks = [(tiny.prompt(14, seed=seed), lora) for seed in range(4) for lora in LORAS]
    check_mixed(tiny, engine, shared, asks)
    assert tiny.state(engine)["num_retractions"] > 0
    tiny.all_back(engine)


@pytest.mark.parametrize("mode", ["retract", "wait"])
def test_pause_release_and_wake(tiny, make_engine, shared, mode):
    """H13: what was in flight goes on exactly after a pause, a release of everything and a wake."""
    engine, asks = make_engine(shared, page_size=4), [(tiny.prompt(11), lora) for lora in LORAS]
    paused = tiny.after_step(engine, 3, lambda: engine.pause(mode))
    with tiny.held(engine):
        streams = [
            engine.client.generate_request(
                GenerateReqInput(input_ids=prompt, lora=lora, sampling_params=PARAMS, return_logprob=True)
            )
            for prompt, lora in asks
        ]
    assert paused.result(20) and tiny.state(engine)["num_waiting"] == (3 if mode == "retract" else 0)
    engine.release_memory_occupation()
    report = engine.memory_report()["weights"]
    assert report["owner"] == "trainer" and tiny.state(engine)["validity"] == "valid"
    engine.resume_memory_occupation()
    engine.resume()
    for (prompt, lora), stream in zip(asks, streams, strict=True):
        assert gap(tiny, shared, prompt, lora, engine.llm.run(stream.result(20))) < 1e-4
    check_mixed(tiny, engine, shared, asks)


def test_streams(tiny, make_engine, shared):
    """H13: deltas concatenate to the result of the same seed."""
    engine, prompt = make_engine(shared), tiny.prompt(9)
    params = {**PARAMS, "seed": 7}
    for lora in LORAS:
        whole = engine.generate(input_ids=prompt, sampling_params=params, lora=lora)
        stream = engine.generate(input_ids=prompt, sampling_params=params, lora=lora, stream=True)
        assert [token for message in stream for token in message["output_ids"]] == whole["output_ids"]


def test_prompt_logprobs(tiny, make_engine, shared):
    """F9, H13: the prompt is scored with the adapter too, from the base's cached pages or not."""
    engine, prompt = make_engine(shared, page_size=4), tiny.prompt(12)
    for lora in LORAS:
        result = engine.generate(
            input_ids=prompt,
            lora=lora,
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
        with active(shared, lora) as module:
            expected = tiny.ref_logprobs(module, prompt)
        found = [value for value, *_ in result["meta_info"]["input_token_logprobs"][1:]]
        assert found == pytest.approx(expected, abs=1e-4)


def test_a_request_in_flight_follows_its_adapter(tiny, make_engine, step_gate, pool):
    """H13: the adapter is trained while its request runs: tokens from then on are those of the new one, and
    say so."""
    module = peft_module(tiny)
    engine, prompt = make_engine(module, page_size=4), tiny.prompt(10)
    engine.client._core.capacity()  # so that the gate counts no command but those below
    with step_gate(engine) as gate:
        future = pool.submit(
            engine.generate, input_ids=prompt, sampling_params=PARAMS, return_logprob=True, lora="second"
        )
        gate.step(4)
        gate.wait()
        changed = pool.submit(engine.weights_changed, "new")
        gate.commanded()
        with torch.no_grad():  # the step at the gate computes with this already, and the command follows it
            for name, param in module.named_parameters():
                if ".second." in name:
                    param.mul_(1.5)
        gate.open()
        assert changed.result(20).version == "new"
        result = future.result(20)
    old, new = result["meta_info"]["weight_versions"]
    assert (old["version"], new["version"], new["start"]) == ("default", "new", 5)
    values = [value for value, *_ in result["meta_info"]["output_token_logprobs"]]
    ids = [*prompt, *result["output_ids"]]
    with active(module, "second"):
        expected = tiny.ref_logprobs(module, ids)[len(prompt) - 1 :]
    assert values[5:] == pytest.approx(expected[5:], abs=1e-4)
    assert values[0] != pytest.approx(expected[0], abs=1e-3)


def test_an_adapter_added_scaled_and_deleted(tiny, make_engine):
    """H13: each is seen at the next `weights_changed`; names in the state follow."""
    module = peft_module(tiny)
    engine, prompt = make_engine(module), tiny.prompt(15)
    assert {name: a["ranks"] for name, a in tiny.state(engine)["adapters"].items()} == {
        "first": [4],
        "second": [2],
    }
    module.add_adapter("third", config(r=3, target_modules=["up_proj"]))
    with pytest.raises(RequestError, match="it has 'first', 'second'"):
        engine.generate(input_ids=prompt, lora="third")
    engine.weights_changed()
    assert tiny.state(engine)["adapters"]["third"]["ranks"] == [3]
    check_mixed(tiny, engine, module, [(prompt, lora) for lora in (*LORAS, "third")])
    for layer in unwrap(module).modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("second", 3.0)
    engine.weights_changed()
    check_mixed(tiny, engine, module, [(prompt, lora) for lora in (*LORAS, "third")])
    module.delete_adapter("third")
    engine.weights_changed()
    with pytest.raises(RequestError, match="it has 'first', 'second'"):
        engine.generate(input_ids=prompt, lora="third")
    check_mixed(tiny, engine, module, [(prompt, lora) for lora in LORAS])


@pytest.mark.parametrize("paused", [None, "keep", "retract"])
def test_requests_of_a_deleted_adapter_end(tiny, make_engine, paused):
    """H13: with what they have, and a message that names it; the others, queued ones too, go on exactly."""
    module = peft_module(tiny)
    engine, prompt = make_engine(module, max_running_requests=3, page_size=4), tiny.prompt(10)
    asks = ["first", "second", None, "second", "first"]  # the last two wait

    def delete():
        module.delete_adapter("second")
        return engine.weights_changed()

    done = tiny.after_step(engine, 3, delete if paused is None else lambda: engine.pause(paused))
    with tiny.held(engine):
        streams = [
            engine.client.generate_request(
                GenerateReqInput(input_ids=prompt, lora=lora, sampling_params=PARAMS, return_logprob=True)
            )
            for lora in asks
        ]
    done.result(20)
    if paused is not None:
        assert delete().bytes == 0
        assert tiny.state(engine)["num_waiting"] + tiny.state(engine)["num_running"] == 3
        engine.resume()
    for lora, stream in zip(asks, streams, strict=True):
        result = engine.llm.run(stream.result(20))
        reason = result["meta_info"]["finish_reason"]
        if lora == "second":
            assert reason["type"] == "abort" and "no adapter 'second'" in reason["message"]
            assert len(result["output_ids"]) == (3 if stream is streams[1] else 0)
        else:
            assert reason["type"] == "length" and gap(tiny, module, prompt, lora, result) < 1e-4
    tiny.all_back(engine)


def test_a_request_overtaken_by_a_deletion(tiny, make_engine, monkeypatch):
    """H13: checked while its adapter was there, submitted when it is gone: ended with the same message."""
    module = peft_module(tiny)
    engine, prompt = make_engine(module), tiny.prompt(10)
    prepare = Intake.prepare

    def overtaken(*arguments, **fields):
        requests = prepare(*arguments, **fields)
        module.delete_adapter("second")
        engine.weights_changed()
        return requests

    with monkeypatch.context() as patch:
        patch.setattr(Intake, "prepare", overtaken)
        result = engine.generate(input_ids=prompt, sampling_params=PARAMS, lora="second")
    assert "no adapter 'second'" in result["meta_info"]["finish_reason"]["message"]
    check_mixed(tiny, engine, module, [(prompt, lora) for lora in LORAS[:2]])


def test_a_moved_or_merged_adapter(tiny, make_engine):
    """E13, H13: moved memory is found at the next request, and read from where it is after
    `weights_changed`; a merged adapter is refused until it is unmerged."""
    module = peft_module(tiny)
    engine, prompt = make_engine(module), tiny.prompt(10)
    asks = [(prompt, lora) for lora in LORAS]
    with torch.no_grad():
        for layer in unwrap(module).model.layers:
            pair = layer.mlp.down_proj.lora_B["first"]
            pair.weight.data = pair.weight.data * 2
    with pytest.raises(WeightsInvalidError, match="weights_changed"):
        engine.generate(input_ids=prompt)
    engine.weights_changed()
    check_mixed(tiny, engine, module, asks)
    module.set_adapter("first")
    module.merge_adapter()
    with pytest.raises(ConfigError, match="merged into its weight"):
        engine.weights_changed()
    with pytest.raises(WeightsInvalidError, match="merged"):
        engine.generate(input_ids=prompt)
    module.unmerge_adapter()
    engine.weights_changed()
    check_mixed(tiny, engine, module, asks)


def test_sharing_begins_and_ends_with_a_running_engine(tiny, make_engine):
    """H13: an engine with weights of its own takes a PEFT module, then the plain one, by `share_weights`."""
    module = peft_module(tiny)
    plain = tiny.model(seed=1)
    engine, prompt = make_engine(plain.config), tiny.prompt(10)
    with pytest.raises(RequestError, match="it has none"):
        engine.generate(input_ids=prompt, lora="first")
    assert engine.share_weights(module).kind == "shared"
    check_mixed(tiny, engine, module, [(prompt, lora) for lora in LORAS])
    engine.share_weights(plain)
    assert tiny.state(engine)["adapters"] == {}
    with pytest.raises(RequestError, match="it has none"):
        engine.generate(input_ids=prompt, lora="first")
    result = engine.generate(input_ids=prompt, sampling_params=PARAMS, return_logprob=True)
    assert tiny.gap(plain, prompt, result) < 1e-4


OTHERS = {
    "IA3": lambda model: get_peft_model(model, IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
    "prompt tuning": lambda model: get_peft_model(
        model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ),
    "DoRA": lambda model: get_peft_model(model, config(use_dora=True)),
    "merged": lambda model: merged(get_peft_model(model, config())),
}


def merged(module):
    module.merge_adapter()
    return module


@pytest.mark.parametrize("kind", OTHERS)
def test_no_engine_of_what_it_would_compute_otherwise(tiny, make_engine, kind):
    """H13: refused at construction, and by `share_weights` of a running engine, which goes on as it was."""
    module, plain = OTHERS[kind](tiny.model()), tiny.model(seed=1)
    places = {name: param.data_ptr() for name, param in module.named_parameters()}
    with pytest.raises(ConfigError):
        make_engine(module)
    engine = make_engine(plain)
    with pytest.raises(ConfigError):
        engine.share_weights(module)
    assert {name: param.data_ptr() for name, param in module.named_parameters()} == places
    result = engine.generate(input_ids=[1, 2], sampling_params=PARAMS, return_logprob=True)
    assert tiny.gap(plain, [1, 2], result) < 1e-4


def test_turns_of_a_session_with_different_adapters(tiny, make_engine):
    """H13: the tokens go on; KV is that of the turn's own adapter. A turn whose adapter is deleted leaves the
    session as it was."""
    module = peft_module(tiny)
    engine, tokens, found = make_engine(module, page_size=4), [], []
    session = engine.open_session(200)
    for number, lora in enumerate(("first", None, "first", "second")):
        words = tiny.prompt(7, seed=number)
        result = engine.generate(
            input_ids=words,
            sampling_params=PARAMS,
            return_logprob=True,
            lora=lora,
            session_params={"id": session},
        )
        assert gap(tiny, module, [*tokens, *words], lora, result) < 1e-4
        found.append(result["meta_info"]["cached_tokens"])
        tokens += [*words, *result["output_ids"]]
    assert found == [0, 0, 12, 0]  # 14 of its own first turn have KV, on three full pages

    def delete():
        module.delete_adapter("second")
        engine.weights_changed()

    turn = {"sampling_params": PARAMS, "session_params": {"id": session}}
    deleted = tiny.after_step(engine, 2, delete)
    ended = engine.generate(input_ids=[1], lora="second", **turn)
    deleted.result(20)
    assert ended["meta_info"]["finish_reason"]["type"] == "abort" and len(ended["output_ids"]) == 2
    again = engine.generate(input_ids=[1], lora="first", **turn)
    assert again["meta_info"]["prompt_ids"] == [*tokens, 1]


def test_an_output_of_an_adapter_explained(tiny, make_engine, shared):
    """Issue 4: `explain` computes with the output's adapter; a trainer with another one active differs."""
    engine, prompt = make_engine(shared), tiny.prompt(12)
    for lora in LORAS:
        output = engine.generate(input_ids=prompt, sampling_params=PARAMS, return_logprob=True, lora=lora)
        assert output["meta_info"].get("lora") == lora
        with active(shared, lora):
            found = engine.explain(output, shared)
        assert found.position is None and found.first_layer is None and not found.different_weights
        with active(shared, "second" if lora is None else None):
            found = engine.explain(output, shared)
        assert found.position is not None and found.rollout_logprob == pytest.approx(
            found.engine_logprob, abs=1e-4
        )


def test_names_of_adapters_can_be_read(tiny, make_engine, shared):
    """Contract 6: by PEFT's names, with and without its prefix; base weights by Hugging Face's."""
    engine = make_engine(shared)
    params = dict(shared.named_parameters())
    for name in (
        "base_model.model.model.layers.1.mlp.up_proj.lora_A.first.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
    ):
        expected = params[name][:2].tolist()
        assert engine.get_weights_by_name(name, 2) == expected
        bare = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert engine.get_weights_by_name(bare, 2) == expected
    with pytest.raises(RequestError, match="no such parameter"):
        engine.get_weights_by_name("model.layers.1.mlp.up_proj.lora_A.third.weight")
    assert sum(a["bytes"] for a in tiny.state(engine)["adapters"].values()) == sum(
        param.nbytes for name, param in params.items() if "lora_" in name
    )


def test_a_bfloat16_base_with_float32_adapters(tiny, make_engine):
    """H13: PEFT keeps adapters of a bfloat16 model in float32; the engine computes them so, in place."""
    module = peft_module(tiny, model=tiny.model().to(torch.bfloat16))
    kinds = {param.dtype for name, param in module.named_parameters() if "lora_" in name}
    assert kinds == {torch.float32}
    engine, prompt = make_engine(module), tiny.prompt(20)
    results = together(tiny, engine, [(prompt, lora) for lora in LORAS])
    for lora, result in zip(LORAS, results, strict=True):
        assert gap(tiny, module, prompt, lora, result) < 0.1
        for other in LORAS:  # the adapter's part is far above the rounding
            assert other == lora or gap(tiny, module, prompt, other, result) > 0.2
    assert engine.weights_checksum() == checksum(module.named_parameters())


def test_threads_with_different_adapters(tiny, make_engine, shared):
    """Contract 7: any thread, any adapter, at any time."""
    engine = make_engine(shared, page_size=4)
    asks = [(tiny.prompt(5 + n, seed=n), LORAS[n % 3]) for n in range(12)]
    with ThreadPoolExecutor(6) as threads:
        futures = [
            threads.submit(
                engine.generate, input_ids=prompt, sampling_params=PARAMS, return_logprob=True, lora=lora
            )
            for prompt, lora in asks
        ]
        results = [future.result(30) for future in futures]
    for (prompt, lora), result in zip(asks, results, strict=True):
        assert gap(tiny, shared, prompt, lora, result) < 1e-4
