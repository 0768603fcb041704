"""What every call does in every state: the one table behind docs/states.md and the tests.

`python -m tests.lifecycle.state_table` prints the page.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tests.lifecycle.states import (
    ENDED,
    FALSE,
    INVALID,
    MODES,
    OK,
    STATE,
    TAGS,
    WAITS,
    Call,
    Condition,
    Outcome,
    Row,
    State,
    Table,
    borrowed,
    by_tag,
    calls,
    gone,
    nothing_left,
    pauses,
    releases,
    running,
    updated,
    wakes,
)
from tests.lifecycle.states_page import page

# Columns


def _wakes_moved(state: State, call: Call) -> bool:
    left = state.asleep - frozenset(call.tags or TAGS)
    return state.shared and not state.valid and left != state.asleep and "weights" not in left


over = Condition("after shutdown", lambda state, _: state.moment == "ended")
inside = Condition("inside an update's iterator", lambda state, _: state.moment == "inside")
updating = Condition("during an update", lambda state, _: state.moment in ("updating", "inside"))
moved = Condition(
    "shared and moved, `weights` resident",
    lambda state, _: state.shared and not state.valid and "weights" not in state.asleep,
)
moved_back = Condition("shared and moved, `weights` resident after it", _wakes_moved)
no_weights = Condition("`weights` asleep", lambda state, _: "weights" in state.asleep)
asleep = Condition("anything asleep", lambda state, _: bool(state.asleep))
awake = Condition("nothing named asleep", lambda s, call: not s.asleep & frozenset(call.tags or TAGS))
so_already = Condition(
    "a tag named is that already",
    lambda s, call: bool(
        frozenset(call.tags) & (s.asleep if "release" in call.member else set(TAGS) - s.asleep)
    ),
)
shared = Condition("shared weights", lambda state, _: state.shared)
own = Condition("own weights", lambda state, _: not state.shared)
invalid = Condition("weights invalid", lambda state, _: not state.valid)
paused = Condition("paused", lambda state, _: state.admission in MODES)
draining = Condition("draining", lambda state, _: state.draining)

# Outcomes

ended = Outcome(ENDED, "the engine is gone; who was waiting got this too")
in_iterator = Outcome(STATE, "it would wait for the update, and the update for it")
in_update = Outcome(STATE, "one change of weights or memory at a time; call it when the update has returned")
in_drain = Outcome(
    STATE, "one drain at a time; wait for it, abort the requests, or resume, which withdraws it"
)
has_moved = Outcome(INVALID, "the engine would read stale memory; call `share_weights(module)` again")
needs_weights = Outcome(STATE, "there is no memory to read or write; wake `weights` first")
not_valid = Outcome(INVALID, "the weights are no complete set; a complete update makes them one")
fine = Outcome(OK, "at any time")
held = Outcome(WAITS, "queued; it runs when nothing that makes it wait is left")
blocked = Outcome(STATE, "a blocked caller could not put it right; `wait=True` waits")


# Calls

UPDATES = ("update_weights_from_tensor", "update_weights_from_distributed", "update_weights_from_disk")
GROUPS = ("init_weights_update_group", "destroy_weights_update_group")
READS = ("get_weights_by_name", "weights_checksum", "named_parameters", "explain")
EXPERTS = tuple(f"{verb}_expert_distribution_record" for verb in ("start", "stop", "dump"))
PROFILE = ("start_profile", "stop_profile")
SESSIONS = ("open_session", "close_session")
STATUS = ("get_load", "get_internal_state", "flush_cache")
ATTRIBUTES = (
    *("server_args", "model_config", "tokenizer", "model_path", "served_model_name", "is_generation"),
    *("is_image_gen", "last_receive_tstamp", "gracefully_exit"),
)

# The table

after: Mapping[Condition, Outcome] = {over: ended}
alone = {**after, inside: in_update, updating: in_update}

GENERATE = Table(
    "Generate, embed, score",
    [over, inside, moved, asleep, invalid, paused, draining, updating],
    [
        Row(
            "`AsyncLLM.generate_request`; `Engine.generate`, `chat`, `async_generate`, `encode` with "
            "`wait=True`; also as a turn of a session, or of an `EmbeddingReqInput`",
            [
                *calls("AsyncLLM", "generate_request"),
                *calls("AsyncLLM", "generate_request", arguments="session_params"),
                *calls("AsyncLLM", "generate_request", arguments="EmbeddingReqInput"),
                *calls("Engine", "generate", "async_generate", "chat", "encode", arguments="wait=True"),
            ],
            {
                **{over: ended, inside: in_iterator, moved: has_moved},
                **dict.fromkeys([asleep, invalid, paused, draining, updating], held),
            },
            Outcome(OK, "runs at once"),
        ),
        Row(
            "`Engine.generate`, `chat`, `async_generate`, `encode`; `LLM.generate`, `generate_stream`; also "
            "as a turn of a session",
            [
                *calls("Engine", "generate", "async_generate", "chat", "encode"),
                *calls("Engine", "generate", arguments="session_params"),
                *calls("LLM", "generate", "generate_stream"),
            ],
            {
                **{over: ended, inside: in_iterator, invalid: not_valid},
                **dict.fromkeys([asleep, paused, draining], blocked),
                updating: Outcome(WAITS, "an update ends by itself, so it is waited for"),
            },
            Outcome(OK, "runs at once"),
        ),
    ],
)
stops = {**after, inside: in_iterator, draining: in_drain}
settled = Outcome(OK, "whatever sleeps or is invalid; `wait` answers once nothing that can run is left")
PAUSE = Table(
    "Pause and resume",
    [over, inside, draining],
    [
        Row(
            "`AsyncLLM.pause_scheduler`", pauses("AsyncLLM", "pause_scheduler", answers=True), stops, settled
        ),
        Row(
            "`Engine.pause`, `Engine.paused`",
            [*pauses("Engine", "pause"), *pauses("Engine", "paused")],
            stops,
            settled,
        ),
        Row(
            "`AsyncLLM.resume_scheduler`, `Engine.resume`",
            [*calls("AsyncLLM", "resume_scheduler", then=running), *calls("Engine", "resume", then=running)],
            after,
            Outcome(OK, "the engine runs; a pending drain is withdrawn"),
        ),
    ],
)
already = Outcome(STATE, "it is released, or resident; name the others, or none for what is left")
given_back = Outcome(OK, "a running engine drains first; in a pause at once")
taken = Outcome(OK, "all that is asked for, or nothing and `OutOfMemoryError`")
frees = {**alone, inside: in_iterator, draining: in_drain}
takes = {**alone, inside: in_iterator, moved_back: has_moved}
MEMORY = Table(
    "Release and take back memory",
    [over, awake, inside, updating, draining, so_already, moved_back],
    [
        Row(
            "`release_memory_occupation(tags)`",
            by_tag(releases),
            {**frees, so_already: already},
            given_back,
        ),
        Row("`release_memory_occupation()`", releases(), frees, given_back),
        Row(
            "`resume_memory_occupation(tags)`",
            by_tag(wakes),
            {**takes, so_already: already},
            taken,
        ),
        Row("`resume_memory_occupation()`", wakes(), takes, taken),
        Row(
            "`Engine.resident(*tags)`",
            [Call("Engine", "resident", f'"{tag}"', (tag,)) for tag in TAGS] + calls("Engine", "resident"),
            {**takes, awake: Outcome(OK, "there is nothing to do, then or at the end")},
            Outcome(OK, "within, the memory is there; then what slept sleeps again"),
        ),
    ],
)
writes = {
    **{**alone, inside: in_update, no_weights: needs_weights},
    shared: Outcome(STATE, "they are a trainer's; write the module and call `weights_changed()`"),
}
written = Outcome(OK, "also paused or draining: what is in flight re-prefills, or under `keep` keeps its KV")
half = Outcome(STATE, "from its first write on the weights are neither the old nor the new")
WEIGHTS = Table(
    "Weights",
    [over, inside, updating, no_weights, own, shared, invalid],
    [
        Row(
            "`AsyncLLM.update_weights_from_tensor`, `_distributed`, `_disk`",
            calls("AsyncLLM", *UPDATES, answers=True, then=updated),
            writes,
            written,
        ),
        Row(
            "`Engine.update_weights_from_tensor`, `_distributed`, `_disk`",
            calls("Engine", *UPDATES, then=updated),
            writes,
            written,
        ),
        Row(
            "`weights_changed`",
            calls("Engine", "weights_changed"),
            {**alone, own: Outcome(STATE, "nothing is shared with this engine"), invalid: has_moved},
            Outcome(OK, "an update of 0 bytes, also asleep"),
        ),
        Row(
            "`watch`",
            calls("Engine", "watch"),
            {**after, own: Outcome(STATE, "nothing is shared with this engine")},
            fine,
        ),
        Row(
            "`share_weights`",
            calls("Engine", "share_weights", then=borrowed),
            alone,
            Outcome(OK, "also asleep: what sleeps of the trainer's is its own affair"),
        ),
        Row(
            "`get_weights_by_name`, `weights_checksum`, `named_parameters`, `explain`",
            [*calls("AsyncLLM", "get_weights_by_name"), *calls("Engine", *READS)],
            {**after, inside: half, updating: half, no_weights: needs_weights, invalid: not_valid},
            fine,
        ),
        Row(
            "`init_weights_update_group`, `destroy_weights_update_group`",
            [*calls("AsyncLLM", *GROUPS), *calls("Engine", *GROUPS)],
            after,
            fine,
        ),
    ],
)
REST = Table(
    "Everything else",
    [over],
    [
        Row(
            "`get_load`, `get_internal_state`, `memory_report`; `flush_cache` (after the running step)",
            [*calls("AsyncLLM", *STATUS), *calls("Engine", *STATUS, "memory_report")],
            after,
            fine,
        ),
        Row(
            "`open_session`; `close_session` (aborts a live turn)",
            [*calls("AsyncLLM", *SESSIONS), *calls("Engine", *SESSIONS)],
            after,
            fine,
        ),
        Row(
            "`start_`, `stop_`, `dump_expert_distribution_record`, each in its turn (after the running step)",
            [*calls("AsyncLLM", *EXPERTS), *calls("Engine", *EXPERTS)],
            after,
            fine,
        ),
        Row(
            "`drop_request_state`, `mark_server_up`, `mark_server_unhealthy` (then requests are refused)",
            calls("AsyncLLM", "drop_request_state", "mark_server_up", "mark_server_unhealthy"),
            after,
            fine,
        ),
        Row(
            "`abort_request`, `Engine.abort`; every `is_*`; attributes; `shutdown`",
            [
                *calls(
                    "AsyncLLM", "abort_request", "is_scheduler_paused", "is_sleeping", "is_server_starting"
                ),
                *calls("Engine", "is_paused", "is_sleeping"),
                *calls("Engine", "abort", then=nothing_left),
                *calls("AsyncLLM", *ATTRIBUTES),
                *calls("AsyncLLM", "shutdown", then=gone),
                *calls("Engine", "shutdown", then=gone),
            ],
            {},
            fine,
        ),
        Row(
            "`set_internal_state`, `configure_logging`",
            [
                *calls("AsyncLLM", "set_internal_state", answers=True),
                *calls("AsyncLLM", "configure_logging"),
                *calls("Engine", "set_internal_state", "configure_logging"),
            ],
            after,
            Outcome(OK, "at any time; nobody is aborted, whatever changes"),
        ),
        Row(
            "`start_profile`, `stop_profile`",
            [*calls("AsyncLLM", *PROFILE), *calls("Engine", *PROFILE)],
            after,
            Outcome(OK, "at any time; only steps are recorded, however long none is taken"),
        ),
    ],
)
TABLES = [GENERATE, PAUSE, MEMORY, WEIGHTS, REST]
CALLS = {str(call): call for table in TABLES for row in table.rows for call in row.calls}


def expected(state: State, call: Call) -> Outcome:
    """What happens, and why."""
    for table, row in ((each, row) for each in TABLES for row in each.rows):
        if call in row.calls:
            kind, why = table.outcome(row, state, call)
            return Outcome(FALSE if call.answers and kind == STATE else kind, why)
    raise KeyError(call)


if __name__ == "__main__":
    sys.stdout.write(page(TABLES))
