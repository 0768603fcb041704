"""Rows of captured decode steps: what the device holds is what a step needs, however little was copied."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_rl.core.batch import StepPlan
from tokenspeed_rl.core.decode_rows import INACTIVE, DecodeRows, bucket_for
from tokenspeed_rl.core.request import Request

CPU = torch.device("cpu")
MAX_ROWS, MAX_PAGES, SIZE, PER_READ = 8, 16, 2, 3


def on_device(rows: DecodeRows, name: str) -> list[Any]:
    found: list[Any] = getattr(rows, name).device.tolist()
    return found


def check(rows: DecodeRows, requests: list[Request], places: list[int], bucket: int) -> None:
    """Everything that the device holds for this step, against the requests alone."""
    assert len(set(places)) == len(places) and all(0 <= place < bucket for place in places)
    lens, tokens, tables = (on_device(rows, name) for name in ("lens", "tokens", "pages"))
    for request, row in zip(requests, places, strict=True):
        assert lens[row] == request.computed and tokens[row] == request.tokens[-1]
        assert tables[row][: len(request.pages)] == request.pages
        assert on_device(rows, "seeds")[row] == request.draw_seed
    assert all(lens[row] == INACTIVE for row in set(range(bucket)) - set(places))
    check_groups(rows, requests, places, bucket)


def check_groups(rows: DecodeRows, requests: list[Request], places: list[int], bucket: int) -> None:
    """Rows read a prefix together whose whole prompt pages are the same, as many of them as may."""
    order, lens, leads = (on_device(rows, name)[:bucket] for name in ("order", "prefix_lens", "leads"))
    assert sorted(order) == list(range(bucket))
    together: dict[int, set[int]] = {}
    for place, count in enumerate(leads):
        together |= {row: set(order[place : place + count]) for row in order[place : place + count]}
        assert all(lens[place] == other for other in lens[place : place + count])
    assert sum(leads) == bucket and set(together) == set(range(bucket))
    for request, row in zip(requests, places, strict=True):
        full = request.prompt_len // SIZE
        alike = {
            place
            for other, place in zip(requests, places, strict=True)
            if full and other.prompt_len // SIZE == full and other.pages[:full] == request.pages[:full]
        }
        shares = len(alike) > 1
        assert lens[order.index(row)] == (full * SIZE if shares else 0)
        assert together[row] <= (alike if shares else {row})
        assert len({frozenset(together[place]) for place in alike}) == -(-len(alike) // PER_READ)


events = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 6), st.integers(1, 3), st.integers(1, 9)),
    st.tuples(st.just("abort"), st.integers(0, 50)),
    st.tuples(st.just("retract"), st.integers(0, 50)),
    st.just(("weights",)),
    st.just(("step",)),
    st.just(("step",)),
    st.just(("step",)),
)


@settings(max_examples=200)
@given(script=st.lists(events, min_size=10, max_size=60), pages=st.integers(10, 30))
def test_the_device_knows_every_request(
    simulation: Callable[..., Any], script: list[Any], pages: int
) -> None:
    """Requests come, grow, end, lose their pages and return, with steps of other kinds in between: before
    every replay, the rows hold what the requests do."""
    sim = simulation(pages=pages, page_size=SIZE, max_running=MAX_ROWS, stops=True)
    rows = DecodeRows(MAX_ROWS, MAX_PAGES, SIZE, CPU, rows_per_read=PER_READ)
    draw: Callable[[Request], None] = sim._draw
    replayed: dict[Request, int] = {}

    def compute(plan: StepPlan, run: Callable[[StepPlan], None] = sim._compute) -> None:
        replayed.clear()
        if plan.decodes and not plan.chunks and not any(request.spared for request in plan.decodes):
            bucket = bucket_for(len(plan.decodes), MAX_ROWS)
            places = rows.place(plan.decodes, bucket)
            check(rows, plan.decodes, places, bucket)
            replayed.update(zip(plan.decodes, places, strict=True))
        run(plan)

    def draw_and_feed_back(request: Request) -> None:
        draw(request)
        if request in replayed:  # as a replayed step leaves the device
            row, token = replayed[request], request.tokens[-1]
            rows.lens.device[row] += 1
            rows.tokens.device[row] = token
            rows.advanced([row], [token])

    sim._compute, sim._draw = compute, draw_and_feed_back
    for name, *values in script:
        if name == "add":
            length, n, new = values
            sim.add(range(3, 3 + length), n=n, max_new=min(new, sim.capacity - length))
        elif name == "weights":
            sim.change_weights()
        elif name == "step":
            sim.step()
        else:
            live = [r for r in sim.live if name == "abort" or r in sim.scheduler.running]
            if live:
                getattr(sim, name)(live[values[0] % len(live)])
    sim.drain()


def test_little_is_copied(new_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step after a replay with the same requests, no new page among them, copies nothing at all."""
    rows = DecodeRows(MAX_ROWS, MAX_PAGES, SIZE, CPU, rows_per_read=PER_READ)
    requests = [
        new_request([1, 2, 3], prompt_len=2, computed=2, pages=[4 + 2 * n, 5 + 2 * n]) for n in range(3)
    ]
    places = rows.place(requests, 4)
    for request in requests:
        request.tokens.append(7)
        request.computed += 1
    rows.advanced(places, [7, 7, 7])
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    monkeypatch.setattr(torch.Tensor, "index_copy_", None)
    assert rows.place(requests, 4) == places


@pytest.mark.parametrize(
    ("rows", "bucket"), [(1, 1), (3, 4), (5, 8), (64, 64), (65, 80), (256, 256), (257, 300)]
)
def test_buckets(rows: int, bucket: int) -> None:
    """Few sizes, and never more than the most."""
    assert bucket_for(rows, 300) == bucket
