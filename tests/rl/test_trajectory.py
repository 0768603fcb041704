"""Trajectory batches: what is where, and what survives selecting rows."""

import math
from typing import Any

import pytest
import torch

from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.rl.sample import Sample, VersionSpan
from tokenspeed_rl.rl.trajectory import TrajectoryBatch

PAD, EOS = 9, 5
STOP, LENGTH = {"type": "stop", "matched": EOS}, {"type": "length", "length": 3}


def sample(output_ids: list[int], *, prompt_ids: tuple[int, ...] = (1, 2), **fields: Any) -> Sample:
    logprobs = fields.pop("logprobs", [-0.5 - i for i in range(len(output_ids))])
    given = {"prompt": None, "group": 0, "index": 0, "finish_reason": STOP, "logprobs": logprobs, **fields}
    return Sample(prompt_ids=prompt_ids, output_ids=output_ids, **given)


def two_turns() -> Sample:
    """Actions, two observation tokens, actions."""
    return sample(
        [3, 4, 7, 7, 3, EOS],
        action_mask=[True, True, False, False, True, True],
        logprobs=[-1.0, -2.0, math.nan, math.nan, -3.0, -4.0],
        group=1,
        text="two turns",
        versions=(VersionSpan("0", 0, 4), VersionSpan("1", 4, 6)),
    )


def batch(**settings: Any) -> TrajectoryBatch:
    samples = [sample([3, EOS], index=0), sample([3, 3, 3], index=1, finish_reason=LENGTH), two_turns()]
    return TrajectoryBatch.from_samples(samples, [1.0, 0.0, 0.5], pad_token_id=PAD, **settings)


def test_layout() -> None:
    """H12: prompt, output with its EOS, padding; the action mask covers the EOS and no padding."""
    got = batch()
    assert got.input_ids.tolist() == [
        [1, 2, 3, 5, 9, 9, 9, 9],
        [1, 2, 3, 3, 3, 9, 9, 9],
        [1, 2, 3, 4, 7, 7, 3, 5],
    ]
    assert got.attention_mask.sum(1).tolist() == [4, 5, 8]
    assert got.attention_mask[0].tolist() == [True] * 4 + [False] * 4
    assert got.action_mask.int().tolist() == [
        [0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 1, 1],
    ]
    assert got.logprobs.tolist() == [
        [0, 0, -0.5, -1.5, 0, 0, 0, 0],
        [0, 0, -0.5, -1.5, -2.5, 0, 0, 0],
        [0, 0, -1, -2, 0, 0, -3, -4],
    ]
    assert got.input_ids.dtype == got.groups.dtype == torch.int64
    assert got.logprobs.dtype == got.rewards.dtype == torch.float32
    assert got.action_mask.dtype == got.attention_mask.dtype == got.truncated.dtype == torch.bool
    assert got.rewards.tolist() == [1.0, 0.0, 0.5]
    assert got.groups.tolist() == [0, 0, 1]
    assert got.texts == ["", "", "two turns"]
    assert got.finish_reasons == ["stop", "length", "stop"]
    assert got.versions[2] == (("0", 0, 4), ("1", 4, 6))
    assert len(got) == 3


def test_observations_are_no_actions() -> None:
    """H5: observation tokens are attended to, not learnt from, and their logprobs (here NaN) are dropped."""
    got = batch()
    assert got.attention_mask[2].all()
    assert got.action_mask[2].tolist() == [False, False, True, True, False, False, True, True]
    assert got.logprobs.isfinite().all()


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_truncated_samples_are_counted_and_kept_or_masked(mask_truncated: bool) -> None:
    """H12: a truncated completion is counted, keeps its reward, and teaches only where so configured."""
    got = batch(mask_truncated=mask_truncated)
    assert got.truncated.tolist() == [False, True, False]
    assert got.counts()["truncated"] == 1
    assert got.rewards[1] == 0.0
    assert got.action_mask[1].any().item() is not mask_truncated
    assert got.num_actions == got.counts()["actions"] == (6 if mask_truncated else 9)


def test_everything_truncated_and_masked() -> None:
    """H3: a batch of which nothing is left is a batch with no actions, not an error."""
    cut = sample([3, 3, 3], finish_reason=LENGTH)
    got = TrajectoryBatch.from_samples([cut, cut], [1.0, 0.0], pad_token_id=PAD, mask_truncated=True)
    assert got.num_actions == 0
    assert got.counts()["truncated"] == 2


def test_samples_without_reward_are_masked_and_counted() -> None:
    """H4: None is no reward, and not 0.0: its row has no action and its reward is NaN."""
    abort = {"type": "abort", "message": "stopped"}
    samples = [sample([3, EOS]), sample([3, EOS]), sample([], finish_reason=abort)]
    got = TrajectoryBatch.from_samples(samples, [0.0, None, None], pad_token_id=PAD)
    assert got.action_mask.any(1).tolist() == [True, False, False]
    assert got.rewards.isnan().tolist() == [False, True, True]
    assert got.counts() == {"samples": 3, "actions": 2, "truncated": 0, "aborted": 1, "unrewarded": 2}


def test_select_takes_rows_of_everything() -> None:
    """Rows of every tensor, of the samples and of what the trainer added move together."""
    whole = batch()
    whole.extra["advantages"] = torch.arange(24.0).view(3, 8)
    whole.seconds["generate"] = 1.5
    for index in ([2, 0], torch.tensor([2, 0])):
        part = whole.select(index)
        assert torch.equal(part.input_ids, whole.input_ids[[2, 0]])
        assert torch.equal(part.logprobs, whole.logprobs[[2, 0]])
        assert torch.equal(part.extra["advantages"], whole.extra["advantages"][[2, 0]])
        assert part.samples == (whole.samples[2], whole.samples[0])
        assert part.groups.tolist() == [1, 0]
    truncated = whole.select(whole.truncated)
    assert truncated.samples == (whole.samples[1],)
    assert len(whole.select([])) == 0
    with pytest.raises(RequestError, match="one entry per row"):
        whole.select(torch.tensor([True, False]))


def test_the_process_defaults_do_not_matter() -> None:
    """A trainer may have set another default device or dtype: batches are on the CPU, in their own dtypes."""
    expected = batch()
    with torch.device("meta"):
        torch.set_default_dtype(torch.float64)
        try:
            got = batch()
            shuffled = next(got.minibatches(3, torch.Generator("cpu").manual_seed(0)))
        finally:
            torch.set_default_dtype(torch.float32)
    for name in ("input_ids", "action_mask", "logprobs", "rewards", "groups", "truncated"):
        assert torch.equal(getattr(got, name), getattr(expected, name))
        assert getattr(got, name).dtype == getattr(expected, name).dtype
        assert getattr(shuffled, name).device.type == "cpu"


def test_to_moves_every_tensor() -> None:
    """`to` reaches the trainer's own tensors too, and leaves samples alone."""
    whole = batch()
    whole.extra["returns"] = torch.zeros(3)
    moved = whole.to("meta")
    tensors = (moved.input_ids, moved.attention_mask, moved.action_mask, moved.logprobs, moved.rewards)
    assert {t.device.type for t in (*tensors, moved.groups, moved.truncated, moved.extra["returns"])} == {
        "meta"
    }
    assert moved.samples is whole.samples


@pytest.mark.parametrize("size", [1, 3, 4, 7, 20])
def test_minibatches_hold_every_row_once(size: int) -> None:
    """H9: a batch that isn't divisible loses nothing; H8: the order is the generator's alone."""
    samples = [sample([3, EOS], group=i) for i in range(10)]
    whole = TrajectoryBatch.from_samples(samples, [float(i) for i in range(10)], pad_token_id=PAD)
    state = torch.get_rng_state()

    def order(seed: int | None) -> list[int]:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        parts = list(whole.minibatches(size, generator))
        assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
        assert 1 <= len(parts[-1]) <= size
        return [i for part in parts for i in part.groups.tolist()]

    assert order(None) == list(range(10))
    assert sorted(order(1)) == list(range(10))
    assert order(1) == order(1) != order(2)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RequestError, match="size"):
        next(whole.minibatches(0))


def output(index: int, ids: list[int], **extra: Any) -> dict[str, Any]:
    meta = {
        "id": "r",
        "index": index,
        "finish_reason": STOP,
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
        "output_token_logprobs": [(-0.25, i, None) for i in ids],
    }
    return {"text": "x", "output_ids": ids, "meta_info": {**meta, **extra}}


def test_from_outputs_groups_prompt_major() -> None:
    """The engine's results of a call, two samples for each of two prompts, become rows with their group."""
    outputs = [output(0, [3, 5]), output(1, [5]), output(0, [4, 4, 5]), output(1, [])]
    got = TrajectoryBatch.from_outputs(outputs, [[1], [2, 2]], [1.0, 2.0, 3.0, None], pad_token_id=PAD)
    assert got.groups.tolist() == [0, 0, 1, 1]
    assert got.input_ids.tolist() == [[1, 3, 5, 9, 9], [1, 5, 9, 9, 9], [2, 2, 4, 4, 5], [2, 2, 9, 9, 9]]
    assert got.logprobs[2].tolist() == [0, 0, -0.25, -0.25, -0.25]
    assert got.versions[2] == (VersionSpan("default", 0, 3),)
    assert [s.index for s in got.samples] == [0, 1, 0, 1]
    processed = output(0, [3], output_token_logprobs_processed=[(-0.75, 3, None)])
    got = TrajectoryBatch.from_outputs([processed], [[1]], [0.0], pad_token_id=PAD, logprob_kind="processed")
    assert got.logprobs.tolist() == [[0.0, -0.75]]


def test_what_is_no_batch_is_refused() -> None:
    """Missing rewards or logprobs and results that don't divide by the prompts are named, not padded over."""
    with pytest.raises(RequestError, match="2 rewards"):
        TrajectoryBatch.from_samples([sample([3])], [1.0, 2.0], pad_token_id=PAD)
    with pytest.raises(RequestError, match="at least one sample"):
        TrajectoryBatch.from_samples([], [], pad_token_id=PAD)
    with pytest.raises(RequestError, match="3 outputs for 2 prompts"):
        TrajectoryBatch.from_outputs([output(0, [3])] * 3, [[1], [2]], [1.0] * 3, pad_token_id=PAD)
    with pytest.raises(RequestError, match="output_token_logprobs_raw"):
        TrajectoryBatch.from_outputs([output(0, [3])], [[1]], [1.0], pad_token_id=PAD, logprob_kind="raw")
    with pytest.raises(RequestError, match="logprobs of sample 0 of prompt 0"):
        sample([3, 4], logprobs=[-1.0])
    with pytest.raises(RequestError, match="action_mask of sample 1 of prompt 4"):
        sample([3, 4], action_mask=[True], index=1, group=4)
