"""The end of an engine: everybody who waits is told, nothing of it is left, and others don't notice."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tokenspeed_rl import LLM, AsyncLLM, Engine, requests
from tokenspeed_rl.errors import EngineShutdownError
from tokenspeed_rl.requests import GenerateReqInput

WAIT = 20.0
LONG = {"max_new_tokens": 200}
GREEDY = {"temperature": 0, "max_new_tokens": 4}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as made:
        yield made


@pytest.fixture(scope="module")
def counting(tiny: Any) -> Any:
    """A model whose greedy output after token t is t + 1, t + 2 ..."""
    return tiny.successor()


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tokenspeed_rl")]


def wait_in_generate(engine: Engine) -> Any:
    return engine.generate(input_ids=[[1], [2]], sampling_params=LONG)


def wait_with_a_bar(engine: Engine) -> Any:
    return engine.generate(input_ids=[[1], [2]], sampling_params=LONG, use_tqdm=True)


def wait_in_client(engine: Engine) -> Any:
    return asyncio.run(engine.client.generate(GenerateReqInput(input_ids=[1], sampling_params=LONG)))


def wait_in_stream(engine: Engine) -> Any:
    return list(engine.generate(input_ids=[1], sampling_params=LONG, stream=True))


def wait_in_async_stream(engine: Engine) -> Any:
    async def read() -> None:
        async for _ in await engine.async_generate(input_ids=[1], sampling_params=LONG, stream=True):
            pass

    asyncio.run(read())


def wait_in_run(engine: Engine) -> Any:
    return engine.llm.run(engine.client.flush_cache())


def wait_in_command(engine: Engine) -> Any:
    return asyncio.run(engine.client.flush_cache())


def wait_for_anything(engine: Engine) -> Any:
    return engine.llm.run(asyncio.sleep(1000))


WAITERS = [
    wait_in_generate,
    wait_with_a_bar,
    wait_in_client,
    wait_in_stream,
    wait_in_async_stream,
    wait_in_run,
    wait_in_command,
    wait_for_anything,
]


def test_everyone_who_waits_is_woken(counting: Any, make_engine: Any, step_gate: Any, pool: Any) -> None:
    """G8: shutdown while callers wait, in every kind of call at once and while a step runs: each is woken
    with EngineShutdownError, before the step has ended, and so is each later call."""
    engine = make_engine(counting)
    in_run = threading.Event()

    async def announce() -> None:
        in_run.set()
        await asyncio.sleep(1000)

    with step_gate(engine) as gate:
        first = pool.submit(engine.generate, input_ids=[5], sampling_params=LONG)
        gate.step(2)
        gate.wait()
        waiting = [pool.submit(wait, engine) for wait in WAITERS[:-1]]
        waiting.append(pool.submit(engine.llm.run, announce()))
        gate.submitted(1 + 5)
        gate.commanded(1 + 2)  # the first is the KV cache's mapping
        assert in_run.wait(WAIT)
        ending = threading.Thread(target=engine.shutdown)
        ending.start()
        for waiter in (first, *waiting[:-1]):
            with pytest.raises(EngineShutdownError):
                waiter.result(WAIT)
        gate.open()
        ending.join(WAIT)
    assert not ending.is_alive()
    with pytest.raises(EngineShutdownError):
        waiting[-1].result(WAIT)
    for call in WAITERS:
        with pytest.raises(EngineShutdownError):
            call(engine)


CALLS: dict[str, Callable[[Engine], Any]] = {
    "generate": lambda e: e.generate(input_ids=[1]),
    "generate stream": lambda e: e.generate(input_ids=[1], stream=True),
    "generate with a bar": lambda e: e.generate(input_ids=[1], use_tqdm=True),
    "generate wait": lambda e: e.generate(input_ids=[1], wait=True),
    "async_generate": lambda e: asyncio.run(e.async_generate(input_ids=[1])),
    "async_generate stream": lambda e: asyncio.run(e.async_generate(input_ids=[1], stream=True)),
    "chat": lambda e: e.chat([{"role": "user", "content": "a"}], chat_template="a"),
    "encode": lambda e: e.encode(input_ids=[1]),
    "pause": lambda e: e.pause(),
    "resume": lambda e: e.resume(),
    "release": lambda e: e.release_memory_occupation(),
    "resume memory": lambda e: e.resume_memory_occupation(),
    "update from tensor": lambda e: e.update_weights_from_tensor({}),
    "update from distributed": lambda e: e.update_weights_from_distributed([], [], []),
    "update from disk": lambda e: e.update_weights_from_disk("/nowhere"),
    "init group": lambda e: e.init_weights_update_group(
        master_address="h", master_port=1, rank_offset=1, world_size=2
    ),
    "destroy group": lambda e: e.destroy_weights_update_group("g"),
    "get weights": lambda e: e.get_weights_by_name("model.norm.weight"),
    "checksum": lambda e: e.weights_checksum(),
    "parameters": lambda e: e.named_parameters(),
    "changed": lambda e: e.weights_changed(),
    "flush": lambda e: e.flush_cache(),
    "open session": lambda e: e.open_session(10),
    "close session": lambda e: e.close_session("s"),
    "load": lambda e: e.get_load(),
    "state": lambda e: e.get_internal_state(),
    "set state": lambda e: e.set_internal_state(),
    "start profile": lambda e: e.start_profile(),
    "stop profile": lambda e: e.stop_profile(),
    "start experts": lambda e: e.start_expert_distribution_record(),
    "stop experts": lambda e: e.stop_expert_distribution_record(),
    "dump experts": lambda e: e.dump_expert_distribution_record(),
    "memory report": lambda e: e.memory_report(),
    "paused": lambda e: e.paused("keep").__enter__(),
    "resident": lambda e: e.resident("weights").__enter__(),
    "llm.generate": lambda e: e.llm.generate(GenerateReqInput(input_ids=[1])),
    "llm.generate_stream": lambda e: e.llm.generate_stream(GenerateReqInput(input_ids=[1])),
    "client.generate_request": lambda e: e.client.generate_request(GenerateReqInput(input_ids=[1])),
    "client.embed": lambda e: e.client.generate_request(requests.EmbeddingReqInput(input_ids=[1])),
    "client.drop_request_state": lambda e: e.client.drop_request_state("r"),
    "client.mark_server_up": lambda e: e.client.mark_server_up(),
    "client.mark_server_unhealthy": lambda e: e.client.mark_server_unhealthy(),
    "client.configure_logging": lambda e: e.client.configure_logging(requests.ConfigureLoggingReq()),
    "client.pause_scheduler": lambda e: asyncio.run(e.client.pause_scheduler()),
    "client.resume_scheduler": lambda e: asyncio.run(e.client.resume_scheduler()),
    "client.get_load": lambda e: asyncio.run(e.client.get_load()),
    "client.flush_cache": lambda e: asyncio.run(e.client.flush_cache()),
    "client.weights_checksum": lambda e: asyncio.run(e.client.weights_checksum()),
    "client.set_internal_state": lambda e: asyncio.run(
        e.client.set_internal_state(requests.SetInternalStateReq())
    ),
}


@pytest.fixture(scope="module")
def ended(tiny: Any) -> Engine:
    engine = Engine(tiny.successor(), tokenizer=tiny.tokenizer(), max_total_tokens=256)
    engine.generate(input_ids=[1], sampling_params=GREEDY)
    engine.shutdown()
    return engine


@pytest.mark.parametrize("name", CALLS)
def test_calls_after_shutdown(ended: Engine, name: str) -> None:
    """G8: after shutdown every member raises EngineShutdownError at once."""
    with pytest.raises(EngineShutdownError):
        CALLS[name](ended)


def test_what_may_be_called_after_shutdown(ended: Engine) -> None:
    """G8: `shutdown`, `abort` and the `is_*` members work after shutdown."""
    ended.abort()
    ended.abort("r")
    ended.client.abort_request("r")
    ended.shutdown()
    ended.client.shutdown()
    ended.llm.shutdown()
    assert not ended.is_paused() and not ended.is_sleeping()
    assert not asyncio.run(ended.client.is_sleeping()) and not asyncio.run(ended.client.is_scheduler_paused())
    assert not ended.client.is_server_starting() and ended.client.gracefully_exit
    assert ended.client.last_receive_tstamp > 0


def test_shutdown_from_several_threads(counting: Any, make_engine: Any, step_gate: Any, pool: Any) -> None:
    """G8: shutdown is idempotent; called by several threads at once, each returns when the engine is down."""
    before = set(engine_threads())
    engine = make_engine(counting)
    threads = set(engine_threads()) - before
    returned = []

    def end() -> None:
        engine.shutdown()
        returned.append([thread.is_alive() for thread in threads])

    with step_gate(engine) as gate:
        waiter = pool.submit(wait_in_generate, engine)
        gate.wait()
        ending = [pool.submit(end) for _ in range(4)]
        with pytest.raises(EngineShutdownError):
            waiter.result(WAIT)
        assert returned == [], "nobody returns while the step still runs"
        gate.open()
        for future in ending:
            future.result(WAIT)
    assert returned == [[False, False]] * 4
    with engine, engine:
        pass


def test_shutdown_from_inside(counting: Any, make_engine: Any) -> None:
    """G8: shutdown from a coroutine of the facade, and from a witness of its results, neither blocks nor
    harms."""
    engine = make_engine(counting)

    async def end() -> str:
        engine.shutdown()
        return "returned"

    with pytest.raises(EngineShutdownError):
        engine.llm.run(end(), timeout=WAIT)
        engine.llm.run(end(), timeout=WAIT)
    assert not engine.llm._thread.is_alive() or engine.llm._thread.join(WAIT) is None

    engine = make_engine(counting)
    stream = engine.client.submit(
        GenerateReqInput(input_ids=[[1], [2]], sampling_params=[GREEDY, LONG]), on_finish=engine.shutdown
    )
    with pytest.raises(EngineShutdownError):
        engine.llm.run(stream.result(), timeout=WAIT)
    with pytest.raises(EngineShutdownError):
        engine.generate(input_ids=[1])


def test_shutdown_against_a_coroutine_that_will_not_end(counting: Any, make_engine: Any, pool: Any) -> None:
    """G8: shutdown wakes the caller of a coroutine that swallows its cancellation, or blocks its thread."""
    engine = make_engine(counting)
    started, let_go = threading.Event(), threading.Event()

    async def block() -> None:
        started.set()
        let_go.wait(WAIT)

    waiter = pool.submit(engine.llm.run, block())
    assert started.wait(WAIT)
    ending = pool.submit(engine.shutdown)
    with pytest.raises(EngineShutdownError):
        waiter.result(WAIT)
    let_go.set()
    ending.result(WAIT)


def test_shutdown_ends_a_watch(tiny: Any, make_engine: Any) -> None:
    """After shutdown the optimizer that was watched steps on undisturbed."""
    model = tiny.successor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, other = make_engine(model), make_engine(model)
    for watching in (engine, other):
        watching.watch(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    engine.shutdown()
    optimizer.step()
    assert tiny.state(other)["weight_version"] == "2"


def test_shutdown_while_a_step_draws(counting: Any, make_engine: Any, step_gate: Any, pool: Any) -> None:
    """G8: what the running step draws after shutdown is dropped: the loop ends in peace, as shut down, not as
    failed."""
    engine = make_engine(counting)
    loop = engine.client._core.loop
    with step_gate(engine) as gate:
        waiter = pool.submit(engine.generate, input_ids=[1], sampling_params={"max_new_tokens": 1})
        gate.wait()
        ending = pool.submit(engine.shutdown)
        with pytest.raises(EngineShutdownError):
            waiter.result(WAIT)
        gate.open()
        ending.result(WAIT)
    assert loop._cause is None
    with pytest.raises(EngineShutdownError):
        engine.get_load()


def test_submissions_against_shutdown(counting: Any, make_engine: Any, pool: Any) -> None:
    """G8: calls that race shutdown get their result or EngineShutdownError; none is lost, five times over."""
    for _ in range(5):
        engine, barrier = make_engine(counting), threading.Barrier(5)
        engine.generate(input_ids=[1], sampling_params=GREEDY)

        def call(start: int, engine: Engine = engine, barrier: threading.Barrier = barrier) -> int:
            barrier.wait(WAIT)
            for done in range(1000):
                try:
                    result = engine.generate(input_ids=[start], sampling_params=GREEDY)
                except EngineShutdownError:
                    return done
                assert result["output_ids"] == list(range(start + 1, start + 5))
            raise AssertionError("it goes on after shutdown")

        callers = [pool.submit(call, start) for start in (10, 20, 30, 40)]
        barrier.wait(WAIT)
        engine.generate(input_ids=[1], sampling_params=GREEDY)
        engine.shutdown()
        assert all(caller.result(WAIT) >= 0 for caller in callers)


def test_shutdown_of_the_facade_alone(counting: Any, make_engine: Any, pool: Any) -> None:
    """`LLM.shutdown` ends the facade and wakes its callers; the AsyncLLM behind it goes on."""
    engine = make_engine(counting)
    facade, started = LLM(engine.client), threading.Event()

    async def stay() -> None:
        started.set()
        await asyncio.sleep(1000)

    waiter = pool.submit(facade.run, stay())
    assert started.wait(WAIT)
    facade.shutdown()
    facade.shutdown()
    with pytest.raises(EngineShutdownError):
        waiter.result(WAIT)
    with pytest.raises(EngineShutdownError):
        facade.run(engine.client.get_load())
    assert engine.generate(input_ids=[1], sampling_params=GREEDY)["output_ids"] == [2, 3, 4, 5]


def test_an_engine_that_is_dropped(counting: Any) -> None:
    """An engine, a facade or a client without any reference left ends its threads and frees its memory, also
    when it was used before and was part of a cycle."""
    before = set(engine_threads())
    engine = Engine(counting, max_total_tokens=256)
    engine.cycle = engine  # type: ignore[attr-defined]
    client = AsyncLLM(counting, max_total_tokens=256)
    facade = LLM(client)
    engine.generate(input_ids=[1], sampling_params=GREEDY)
    stream = engine.generate(input_ids=[1], sampling_params=LONG, stream=True)
    next(stream)
    facade.generate(GenerateReqInput(input_ids=[1], sampling_params=GREEDY))
    threads = set(engine_threads()) - before
    assert len(threads) == 4
    watched = [weakref.ref(part) for part in (engine, client, facade, engine.client._core.kv, stream)]
    del engine, client, facade, stream
    gc.collect()
    for thread in threads:
        thread.join(WAIT)
    del thread
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)
    assert [ref() for ref in watched] == [None] * 5


def test_shutdown_frees_the_engine_but_not_the_trainers_weights(counting: Any, make_engine: Any) -> None:
    """After shutdown the KV memory is gone while the shared parameters are what they were, and a new engine
    can share them."""
    before = {name: param.detach().clone() for name, param in counting.named_parameters()}
    engine = make_engine(counting)
    engine.generate(input_ids=[1], sampling_params=GREEDY)
    core = engine.client._core
    assert core.kv.nbytes > 0
    engine.shutdown()
    assert core.kv.nbytes == 0 and not core.source.store.weights
    assert all(torch.equal(before[name], param) for name, param in counting.named_parameters())
    again = make_engine(counting)
    assert again.generate(input_ids=[1], sampling_params=GREEDY)["output_ids"] == [2, 3, 4, 5]


def test_two_engines(tiny: Any, counting: Any, make_engine: Any, step_gate: Any, pool: Any) -> None:
    """G9: two engines in one process, of one module and of different ones, know nothing of each other: rids,
    caches, versions, stuck steps, shutdown."""
    one, two = make_engine(counting), make_engine(counting)
    other = make_engine(tiny.successor(lambda token: (token + 2) % 256))
    ask: dict[str, Any] = dict(input_ids=[10], sampling_params=GREEDY, rid="same")
    with step_gate(one) as gate:
        blocked = pool.submit(one.generate, **ask)
        gate.wait()
        assert two.generate(**ask)["output_ids"] == [11, 12, 13, 14]
        assert other.generate(**ask)["output_ids"] == [12, 14, 16, 18]
        two.abort()
        two.flush_cache()
        two.weights_changed("two's")
        gate.open()
    assert blocked.result(WAIT)["output_ids"] == [11, 12, 13, 14]
    assert [tiny.state(e)["weight_version"] for e in (one, two, other)] == ["default", "two's", "default"]
    two.shutdown()
    assert one.generate(**ask)["output_ids"] == [11, 12, 13, 14]
    one.shutdown()
    assert other.generate(**ask)["output_ids"] == [12, 14, 16, 18]


def test_two_engines_see_one_modules_step(tiny: Any, make_engine: Any) -> None:
    """G9: engines that share one module both follow what the trainer writes into it."""
    model = tiny.successor()
    one, two = make_engine(model), make_engine(model)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(3, 0))
    for engine in (one, two):
        engine.weights_changed()
        assert engine.generate(input_ids=[10], sampling_params=GREEDY)["output_ids"] == [14, 18, 22, 26]
