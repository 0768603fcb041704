"""An engine that is brought into any state of the table, and back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from tests.heads import EXACT, Heads
from tests.lifecycle.states import DRAINS, MODES, TAGS, State
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import TokenSpeedError, WeightsInvalidError, WeightUpdateError
from tokenspeed_rl.requests import GenerateReqInput
from tokenspeed_rl.weights import WeightsSender

FAMILY = "moe"
"""A model that has something for every call."""
WAIT = 20.0
PROMPT = list(b"states")
GROUP = "trainer"
FIELDS: dict[str, Any] = {
    "sampling_params": {"temperature": 0, "max_new_tokens": 3},
    "return_logprob": True,
}


class Driven:
    """One engine of a kind, made anew where a call ends it or changes whose its weights are."""

    def __init__(
        self, pool: ThreadPoolExecutor, sender: WeightsSender, path: str, *, shared: bool, backup: bool
    ) -> None:
        """`sender` is a trainer's in the group GROUP; `path` a checkpoint of the weights that the engine
        holds whenever they are valid."""
        self.module: PreTrainedModel = Tiny.model(FAMILY)
        self.reference = Tiny.model(FAMILY)
        self.weights = {name: p.detach().clone() for name, p in self.reference.named_parameters()}
        self.pool, self.sender, self.path = pool, sender, path
        self.waiting: list[Future[Any]] = []
        self._shared, self._backup = shared, "cpu" if backup else "none"
        self.engine: Any = None
        self.renew()

    def renew(self) -> None:
        """Another engine, at home."""
        self.close()
        model = self.module if self._shared else self.path
        tokenizer = Tiny.tokenizer()
        self.engine = Engine(
            model, tokenizer=tokenizer, device="cpu", max_total_tokens=1024, weights_backup=self._backup
        )
        self.loop = self.engine.client._core.loop
        self.joined = False

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()

    @property
    def group(self) -> dict[str, Any]:
        """The fields with which the sender's group is joined."""
        port = self.sender.master_port
        place = {"master_address": "127.0.0.1", "master_port": port, "group_name": GROUP}
        return {**place, "rank_offset": 1, "world_size": 2, "backend": "gloo", "timeout": WAIT}

    def join(self) -> None:
        """Be a member of the group."""
        if not self.joined:
            self.engine.init_weights_update_group(**self.group)
            self.joined = True

    def leave(self) -> None:
        """Be none."""
        if self.joined:
            self.engine.destroy_weights_update_group(GROUP)
            self.joined = False

    # There

    def go(self, state: State) -> None:
        """From home to `state`, but for its moment."""
        if not state.valid:
            self._invalidate()
        if state.asleep:
            self.engine.release_memory_occupation([tag for tag in TAGS if tag in state.asleep])
        if state.admission in MODES:
            self.engine.pause(state.admission)
        if state.draining:
            self._drain(state)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Within, an update on another thread has written half of the weights."""
        half, self._finish = threading.Event(), threading.Event()

        def stop() -> None:
            half.set()
            assert self._finish.wait(WAIT)

        update = self.pool.submit(self.engine.update_weights_from_tensor, self._interrupted(stop))
        assert half.wait(WAIT)
        try:
            yield
        finally:
            self._finish.set()
            with suppress(TokenSpeedError):  # shut down meanwhile
                update.result(WAIT)

    def inside(self, act: Callable[[], None]) -> None:
        """Run `act` in the iterator of an update, half of the weights written."""
        with suppress(TokenSpeedError):  # shut down in it
            self.engine.update_weights_from_tensor(self._interrupted(act))

    def _interrupted(self, act: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
        for at, pair in enumerate(self.weights.items()):
            if at == len(self.weights) // 2:
                act()
            yield pair

    def _invalidate(self) -> None:
        if self._shared:
            norm = self.module.model.norm.weight
            norm.data = norm.data.clone()
            with suppress(WeightsInvalidError):
                self.engine.weights_changed()
        else:

            def fail() -> None:
                raise ZeroDivisionError

            with suppress(WeightUpdateError):
                self.engine.update_weights_from_tensor(self._interrupted(fail))

    def _drain(self, state: State) -> None:
        loop: Any = self.loop
        loop._can_step = lambda: False  # what runs doesn't end by itself
        self.waiting.append(self.submit(GenerateReqInput(input_ids=PROMPT, **FIELDS)))
        if state.admission == DRAINS[0]:
            call = self.engine.pause, "wait"
        else:
            call = self.engine.release_memory_occupation, "kv_cache"
        with self.posted("open") as posted:
            self.waiting.append(self.pool.submit(*call))
            assert posted.wait(WAIT)
        self.settle()

    def submit(self, obj: GenerateReqInput) -> Future[Any]:
        """Submitted on return; its result comes later."""
        stream = self.engine.client.generate_request(obj)
        return self.pool.submit(lambda: self.engine.llm.run(stream.result()))

    @contextmanager
    def posted(self, door: str) -> Iterator[threading.Event]:
        """Gives an event: something came to the loop by that door."""
        come, enter = threading.Event(), getattr(self.loop, door)

        def note(*arguments: Any) -> Any:
            try:
                return enter(*arguments)
            finally:
                come.set()

        setattr(self.loop, door, note)
        try:
            yield come
        finally:
            setattr(self.loop, door, enter)

    def settle(self) -> None:
        """Until everything posted before, and the step after it, is done."""
        for _ in range(2):
            self.loop.call(lambda: None).result(WAIT)

    # Where it is

    def see(self, moment: str) -> tuple[State, int]:
        """The state, as the engine shows it, and the weights' epoch."""
        shown = Tiny.state(self.engine)
        admission, draining = shown["admission"], shown["draining"]
        if draining is not None:
            admission = DRAINS[0] if "pause" in draining else DRAINS[1]
        asleep = frozenset(tag for tag, residency in shown["residency"].items() if residency == "released")
        assert shown["updating"] is (moment in ("updating", "inside"))
        assert self.engine.is_sleeping() is bool(asleep)
        assert self.engine.is_paused() is (shown["admission"] != "running")
        state = State(admission, asleep, shown["validity"] == "valid", shown["weights_shared"], moment)
        return state, shown["weight_epoch"]

    # Back

    def home(self) -> None:
        """Running, resident and valid; what waited gets its result."""
        if self.loop.closing or self.engine.client._core.source.store.owned is self._shared:
            self.waiting.clear()
            return self.renew()
        engine, loop = self.engine, self.loop
        engine.client.mark_server_up()
        if self._shared:
            engine.share_weights(self.module)
        engine.resume()
        engine.resume_memory_occupation()
        if Tiny.state(engine)["validity"] != "valid":
            engine.update_weights_from_tensor(self.weights)
        vars(loop).pop("_can_step", None)
        self.settle()
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            with suppress(TokenSpeedError):  # a release that was withdrawn
                self.right(future.result(WAIT))

    def right(self, result: Any) -> None:
        """A generation or an embedding is what transformers computes, or was aborted."""
        for one in result if isinstance(result, list) else [result]:
            if not isinstance(one, dict) or one["meta_info"]["finish_reason"]["type"] == "abort":
                continue
            if "embedding" in one:
                assert Heads.gap(self.reference, PROMPT, one) < EXACT
            else:
                assert len(one["output_ids"]) == 3
                assert Tiny.gap(self.reference, PROMPT, one) < 1e-4

    def check(self) -> None:
        """It generates as it should, and nothing is left of anything."""
        self.right(self.engine.generate(input_ids=PROMPT, **FIELDS))
        assert Tiny.state(self.engine)["sessions"] == {"count": 0, "tokens": 0, "live": 0}
        Tiny.all_back(self.engine)
