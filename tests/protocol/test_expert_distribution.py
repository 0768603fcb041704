"""What start, stop and dump of the expert distribution record do, against a recount by router logits."""

from __future__ import annotations

import json
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import EngineShutdownError, EngineStateError
from tokenspeed_rl.lifecycle.expert_distribution import KEPT_STEPS, ExpertDistribution

PROMPTS = [Tiny.prompt(length, seed=length) for length in (3, 21, 40)]
VERBS = ("start", "stop", "dump")


def recount(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """[layers with experts, E] of the tokens of all sequences."""
    rows = [row for ids in sequences for row in Tiny.experts(model, ids)]
    return [
        [Counter(e for row in rows for e in row[layer])[expert] for expert in range(model.config.num_experts)]
        for layer in range(len(rows[0]))
    ]


def generate(engine: Engine, prompts: Sequence[Sequence[int]], count: int = 6) -> list[list[int]]:
    """Sequences of all tokens that were computed: all but the last."""
    params = {"temperature": 0, "max_new_tokens": count}
    results = engine.generate(input_ids=prompts, sampling_params=params)
    return [[*p, *r["output_ids"]][:-1] for p, r in zip(prompts, results, strict=True)]


def state(engine: Engine) -> Any:
    engine.flush_cache()  # answered between two steps, so that the last one has been counted
    return Tiny.state(engine)["expert_distribution"]


@pytest.fixture(scope="module")
def moe() -> PreTrainedModel:
    return Tiny.model("moe")


@pytest.fixture
def engine(moe: PreTrainedModel, make_engine: Callable[..., Engine], tmp_path: Path) -> Engine:
    return make_engine(moe, enable_prefix_caching=False, expert_distribution_dir=str(tmp_path / "dumps"))


@pytest.mark.parametrize("family", ["moe", "mixtral"])
@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 7, "page_size": 4}])
def test_start_counts_every_computed_token(
    make_engine: Callable[..., Engine], family: str, options: dict[str, Any]
) -> None:
    """Issue 4, item 3: tokens per layer and expert, in total and per step, as transformers' router logits
    choose them, however the batches were made up."""
    model = Tiny.model(family)
    engine = make_engine(model, enable_prefix_caching=False, **options)
    engine.start_expert_distribution_record()
    sequences = generate(engine, PROMPTS)
    found = state(engine)
    record = found["record"]
    assert found["recording"] and found["last_dump"] is None
    assert record["counts"] == recount(model, sequences)
    assert record["layers"] == [0, 1] and record["num_experts"] == model.config.num_experts
    assert record["tokens"] == sum(map(len, sequences))
    steps = record["last_steps"]
    assert [step["step"] for step in steps] == list(range(record["steps"]))
    assert np.array_equal(sum(np.array(step["counts"]) for step in steps), record["counts"])
    for step in steps:
        assert all(sum(row) == step["tokens"] * record["experts_per_token"] for row in step["counts"])


def test_layers_without_experts_are_left_out(make_engine: Callable[..., Engine]) -> None:
    """Issue 4, item 3: a mixed model's record says which layers its rows are of."""
    model = Tiny.model("moe", mlp_only_layers=[0], num_hidden_layers=3)
    engine = make_engine(model, enable_prefix_caching=False)
    engine.start_expert_distribution_record()
    sequences = generate(engine, PROMPTS)
    record = state(engine)["record"]
    assert record["layers"] == [1, 2] and record["counts"] == recount(model, sequences)


def test_stop_ends_the_count(engine: Engine, moe: PreTrainedModel) -> None:
    """Contract 2: what runs after stop is not counted, what was counted stays, another start goes on."""
    engine.start_expert_distribution_record()
    first = generate(engine, PROMPTS[:1])
    engine.stop_expert_distribution_record()
    generate(engine, PROMPTS)
    stopped = state(engine)
    assert not stopped["recording"] and stopped["record"]["counts"] == recount(moe, first)
    engine.start_expert_distribution_record()
    second = generate(engine, PROMPTS[1:])
    assert state(engine)["record"]["counts"] == recount(moe, [*first, *second])


def test_dump_writes_the_record_and_begins_another(engine: Engine, moe: PreTrainedModel) -> None:
    """Contract 2: the file, readable by its owner alone, is what the internal state says of the last dump;
    recording goes on with nothing counted."""
    engine.start_expert_distribution_record()
    sequences = generate(engine, PROMPTS)
    record = state(engine)["record"]
    engine.dump_expert_distribution_record()
    after = state(engine)
    assert after["recording"] and after["record"]["steps"] == 0 and not np.any(after["record"]["counts"])
    path = Path(after["last_dump"]["path"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == after["last_dump"]["record"] == record
    assert record["counts"] == recount(moe, sequences)
    again = generate(engine, PROMPTS[1:])
    engine.stop_expert_distribution_record()
    engine.dump_expert_distribution_record()
    second = state(engine)["last_dump"]
    assert second["path"] != str(path) and second["record"]["counts"] == recount(moe, again)
    assert len(list(path.parent.iterdir())) == 2


def test_without_a_folder_a_dump_is_kept(make_engine: Callable[..., Engine], moe: PreTrainedModel) -> None:
    """Contract 7: `expert_distribution_dir=None` writes no file."""
    engine = make_engine(moe)
    engine.start_expert_distribution_record()
    generate(engine, PROMPTS[:1])
    engine.dump_expert_distribution_record()
    found = state(engine)["last_dump"]
    assert found["path"] is None and found["record"]["steps"] == 6


def test_the_members_of_the_client(engine: Engine, moe: PreTrainedModel) -> None:
    """Contract 2: the asyncio members do the same, and raise what they can't answer with None."""
    client, run = engine.client, engine.llm.run
    assert run(client.start_expert_distribution_record()) is None
    with pytest.raises(EngineStateError, match="recorded already"):
        run(client.start_expert_distribution_record())
    sequences = generate(engine, PROMPTS)
    assert run(client.stop_expert_distribution_record()) is None
    assert run(client.dump_expert_distribution_record()) is None
    assert state(engine)["last_dump"]["record"]["counts"] == recount(moe, sequences)


def test_what_is_out_of_order_is_refused(engine: Engine) -> None:
    """Rule 5: start twice, stop without start, dump of nothing: each with a way out; nothing changes."""
    with pytest.raises(EngineStateError, match=r"is not being recorded.*start_expert"):
        engine.stop_expert_distribution_record()
    with pytest.raises(EngineStateError, match=r"no step was recorded.*not recording"):
        engine.dump_expert_distribution_record()
    engine.start_expert_distribution_record()
    with pytest.raises(EngineStateError, match=r"no step was recorded.*'recording'"):
        engine.dump_expert_distribution_record()
    generate(engine, PROMPTS[:1])
    with pytest.raises(EngineStateError, match=r"recorded already.*stop_expert"):
        engine.start_expert_distribution_record()
    assert state(engine)["recording"] and state(engine)["record"]["steps"] == 6


@pytest.mark.parametrize("verb", VERBS)
def test_a_model_without_experts(counter: Engine, verb: str) -> None:
    """Rule 5: there is nothing to be counted, so it is refused; the state says None."""
    with pytest.raises(EngineStateError, match="no experts"):
        getattr(counter, f"{verb}_expert_distribution_record")()
    assert Tiny.state(counter)["expert_distribution"] is None


@pytest.mark.parametrize("verb", VERBS)
def test_after_shutdown(engine: Engine, verb: str) -> None:
    """Contract 5: after shutdown they raise EngineShutdownError."""
    engine.shutdown()
    with pytest.raises(EngineShutdownError):
        getattr(engine, f"{verb}_expert_distribution_record")()


def test_a_file_that_cannot_be_written(engine: Engine, moe: PreTrainedModel, tmp_path: Path) -> None:
    """Rule 5: the record stays until it is written."""
    (tmp_path / "dumps").write_text("in the way")
    engine.start_expert_distribution_record()
    sequences = generate(engine, PROMPTS)
    with pytest.raises(EngineStateError, match="could not be written"):
        engine.dump_expert_distribution_record()
    assert state(engine)["last_dump"] is None
    (tmp_path / "dumps").unlink()
    engine.dump_expert_distribution_record()
    found = state(engine)["last_dump"]
    assert json.loads(Path(found["path"]).read_text())["counts"] == recount(moe, sequences)


def test_only_recorded_steps_pay(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 4, item 3: nothing is gathered in a step that isn't recorded."""
    decoder, asked = engine.client._core.source.decoder, []
    forward = decoder.forward

    def spy(batch: Any, kv: Any, *, routes: Any) -> Any:
        asked.append(routes is not None)
        return forward(batch, kv, routes=routes)

    monkeypatch.setattr(decoder, "forward", spy)
    generate(engine, PROMPTS, 3)
    engine.start_expert_distribution_record()
    generate(engine, PROMPTS, 3)
    engine.stop_expert_distribution_record()
    generate(engine, PROMPTS, 3)
    assert asked == [False] * 3 + [True] * 3 + [False] * 3


def test_the_record_outlives_pause_sleep_and_updates(engine: Engine, moe: PreTrainedModel) -> None:
    """Contract 5: recording is no axis of the life cycle, and none of its calls ends it."""
    engine.start_expert_distribution_record()
    sequences = generate(engine, PROMPTS[:1])
    with engine.paused("retract"):
        engine.weights_changed()
    engine.release_memory_occupation()
    engine.resume_memory_occupation()
    sequences += generate(engine, PROMPTS[1:])
    assert state(engine)["record"]["counts"] == recount(moe, sequences)


def test_a_record_keeps_its_last_steps() -> None:
    """Issue 4, item 3: the record is bounded; its totals are of every step."""
    record = ExpertDistribution([0], 2, 1)
    record.start()
    for number in range(KEPT_STEPS + 7):
        record.add(number, np.array([[number, 0]]))
    snapshot = record.snapshot()
    assert snapshot is not None
    found = snapshot["record"]
    assert found["steps"] == KEPT_STEPS + 7 and found["counts"] == [[sum(range(KEPT_STEPS + 7)), 0]]
    assert [step["step"] for step in found["last_steps"]] == list(range(7, KEPT_STEPS + 7))
    assert found["tokens"] == sum(range(KEPT_STEPS + 7))
