"""`get_internal_state` and `get_load` say what is."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl import Engine, requests

WAIT = 20.0
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4}
MakeEngine = Callable[..., Engine]


# get_internal_state, get_load


def test_the_state_is_plain_and_moves_with_the_engine(make_engine: MakeEngine, tmp_path: Any) -> None:
    """JSON can hold the state in every place on the three axes, and each of its parts says where that is."""
    Tiny.model().save_pretrained(tmp_path)
    engine = make_engine(str(tmp_path))

    def state() -> dict[str, Any]:
        (shown,) = engine.llm.run(engine.client.get_internal_state())
        assert json.loads(json.dumps(shown)) == shown
        return shown

    engine.generate(input_ids=list(range(40)), sampling_params=GREEDY)
    home = state()
    assert (home["admission"], home["draining"], home["validity"]) == ("running", None, "valid")
    assert set(home["residency"].values()) == {"resident"} and not home["updating"]
    assert home["memory"] == engine.memory_report()
    assert home["server_args"]["max_total_tokens"] == 4096
    assert home["health"]["status"] == home["status"] == "up"
    assert (home["num_live"], home["num_running"], home["num_waiting"]) == (0, 0, 0)
    assert (home["prefill_tokens"], home["output_tokens"], home["num_finished"]) == (40, 4, 1)
    assert home["tokens_per_second"] == pytest.approx(4 / home["step_seconds"])
    assert home["recent"]["tokens_per_second"] == pytest.approx(home["tokens_per_second"])
    engine.pause("keep")
    engine.release_memory_occupation("weights")
    away = state()
    assert away["admission"] == "keep" and away["residency"]["weights"] == "released"
    assert away["validity"].startswith("invalid: ") and away["memory"]["weights"]["mapped"] == 0
    engine.resume_memory_occupation()
    receipt = engine.update_weights_from_disk(str(tmp_path), weight_version="again").report
    back = state()
    assert (back["weight_version"], back["weight_epoch"]) == ("again", home["weight_epoch"] + 1)
    assert back["validity"] == "valid" and receipt.version == "again"


def test_the_state_tells_of_ends_and_of_what_the_cache_saved(
    counter: Engine, pool: ThreadPoolExecutor, step_gate: type[StepGate]
) -> None:
    """Finished, aborted and abandoned samples are counted apart, and cached of prompt tokens."""
    counter.flush_cache()
    before = Tiny.state(counter)
    prompt = list(range(33))
    first, again = (counter.generate(input_ids=prompt, sampling_params=GREEDY) for _ in range(2))
    assert first["output_ids"] == again["output_ids"] == [33, 34, 35, 36]
    with step_gate(counter) as gate:
        running = pool.submit(counter.generate, input_ids=[1], sampling_params=GREEDY, rid="doomed")
        gate.wait()
        counter.abort("doomed")
        assert running.result(WAIT)["meta_info"]["finish_reason"]["type"] == "abort"
        stream = counter.generate(input_ids=[2], sampling_params=GREEDY, stream=True)
        gate.step(2)
        next(stream)
        stream.close()
        gate.open()
    Tiny.all_back(counter)
    after = Tiny.state(counter)
    grown = {name: after[name] - before[name] for name in ("num_finished", "num_aborted", "num_abandoned")}
    assert grown == {"num_finished": 2, "num_aborted": 1, "num_abandoned": 1}
    cached = after["cached_tokens"] - before["cached_tokens"]
    prompts = after["prompt_tokens"] - before["prompt_tokens"]
    assert (cached, prompts) == (32, 33 + 33 + 1 + 1)
    assert after["cache_hit_rate"] == after["cached_tokens"] / after["prompt_tokens"]


def test_preemptions_are_retractions_for_lack_of_pages(make_engine: MakeEngine) -> None:
    """A pause that retracts is none; a pool that is too small makes some."""
    engine = make_engine(Tiny.model(), page_size=4, max_total_tokens=64)
    with engine.paused("keep"):
        streams = [engine.client.generate_request(ask([number], 40)) for number in range(3)]
    tasks = ThreadPoolExecutor(3)
    results = [tasks.submit(engine.llm.run, stream.result()) for stream in streams]
    assert all(len(each.result(WAIT)["output_ids"]) == 40 for each in results)
    shown = Tiny.state(engine)
    assert shown["num_preemptions"] == shown["num_retractions"] > 0
    with StepGate(engine) as gate:
        last = tasks.submit(engine.generate, input_ids=[1], sampling_params=GREEDY)
        gate.wait()
        pausing = tasks.submit(engine.pause, "retract")
        gate.open()
        pausing.result(WAIT)
    engine.resume()
    assert len(last.result(WAIT)["output_ids"]) == 4
    assert Tiny.state(engine)["num_preemptions"] == shown["num_preemptions"]


def ask(prompt: list[int], count: int) -> requests.GenerateReqInput:
    return requests.GenerateReqInput(
        input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    )


def test_load_and_state_answer_while_a_step_hangs(
    counter: Engine, pool: ThreadPoolExecutor, step_gate: type[StepGate]
) -> None:
    """G2, contract 5: from any thread within a second, also while a step holds the loop's lock."""
    with step_gate(counter) as gate:
        running = pool.submit(counter.generate, input_ids=[5], sampling_params={**GREEDY, "n": 2})
        gate.step()
        gate.wait()
        waiting = pool.submit(counter.generate, input_ids=list(range(20)), sampling_params=GREEDY)
        gate.submitted(2)
        loop = counter.client._core.loop
        held, go_on = threading.Event(), threading.Event()

        def hang() -> None:  # as a tokenizer of the user's may, under the lock
            with loop.lock:
                held.set()
                assert go_on.wait(WAIT)

        hanging = pool.submit(hang)
        assert held.wait(WAIT)
        (load,) = pool.submit(counter.get_load).result(1.0)
        assert (load.dp_rank, load.num_reqs, load.num_waiting_reqs) == (0, 3, 1)
        assert load.num_pages == 2, "a page for each of the two that run"
        state = pool.submit(Tiny.state, counter).result(1.0)
        assert (state["num_live"], state["num_running"]) == (3, 2)
        go_on.set()
        hanging.result(WAIT)
        gate.open()
        assert [each["output_ids"] for each in running.result(WAIT)] == [[6, 7, 8, 9]] * 2
        assert waiting.result(WAIT)["output_ids"] == [20, 21, 22, 23]
    assert counter.llm.run(counter.client.get_load())[0].num_reqs == 0
