"""docs/states.md, written out of the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tests.lifecycle.states import FALSE, OK, STATE, WAITS, Condition, Row, Table

HEAD = """# What happens if I call X in state Y?

An engine is somewhere on three axes that don't move each other:

| axis | values | moved by |
|---|---|---|
| admission | `running`, or paused: `abort`, `wait`, `keep`, `retract` | `pause`, `resume` |
| residency | `weights`, `kv_cache`, `cuda_graph`, each resident or asleep | release and resume of memory |
| validity | a complete set of weights of some version, or invalid | updates; a release without backup |

Requests run when all three allow it: running, everything resident, weights valid. So waking lifts no pause,
resuming wakes nothing, an update does neither; requests that can't run stay queued, in their order. A pause
with `abort` ends what is there with what it has, `wait` runs it to its end, `keep` freezes it with its KV,
`retract` returns it to the queue without its KV; a pause on a paused engine does that to whatever is there
by then.

A pause that waits, and a release on a running engine, *drain*: they answer once nothing that can run is
left (so at once where something sleeps or the weights are invalid). While they do, requests that come are
held back and other calls are served. Cancelling the caller, or its timeout, withdraws the drain; so does
`resume`, whereupon the pause answers `False` and the release raises `EngineStateError`.

Weights are the engine's own, or shared with a trainer's module. Own ones survive the release of `weights`
with `weights_backup="cpu"`; without it they are invalid until a complete update. Shared ones aren't touched
by a release and stay valid. They are invalid once the module's parameters are found to have *moved* to
other memory, which is looked for at `weights_changed`, and at a new request, a resume or a wake where
`weights` is resident then; or when `weights_changed` finds a module that computes something else (a hook,
a replaced projection, another `top_k`, `scaling` or `variance_epsilon`), which it refuses with `ConfigError`
until it is undone. LoRA adapters that moved, or were deleted, are found as moved parameters are, but
`weights_changed` reads them anew.

Weights may also come in pieces: `partial=True` with a `weight_version`. From the first piece they are
invalid, until pieces of that version together have brought every weight. A piece of another version starts
over. `partial=True` without a version changes some weights of a valid set, which stays valid.

Sessions are tokens, no KV: nothing on this page changes what one holds, and they are opened and closed at
once in every state. A turn is a request like any other; one that a pause, an update, a wake or the session's
end aborts is not kept. After an update, a release of `kv_cache` or a flush a turn computes its session again.

## How to read the tables

Find the call, then go from left to right: **the first column that describes the engine and has an entry
says what happens**. An empty entry doesn't matter; the last column is what happens otherwise. What is
neither `ok` nor "waits" has changed nothing (but that weights found to have moved are invalid).

- ok: done. Waits: done as soon as the engine can; the caller waits, others are served.
- `False`: refused. Members that answer a `bool` or a tuple return it, with the reason in
  `get_internal_state()[0]["last_refusal"]` and, of a tuple, the error as `.report`.
- All others are errors that are raised. A `WeightsInvalidError` is an `EngineStateError`.
- The tables are about well-formed calls: a malformed one is a `RequestError`, or `False`, in any state.
- A call without `AsyncLLM` or `Engine` before it is a member of both, or of the one that has it.
- *During an update*: it has written half and not returned, and the call comes from elsewhere. *Inside an
  update's iterator*: the iterator of named tensors itself makes the call.
- *Moved*: as above. *Draining*: a pause that waits, or a release, has not been answered yet.
"""


def page(tables: Iterable[Table]) -> str:
    """The whole page."""
    return HEAD + "".join("\n" + "\n".join(_section(table)) + "\n" for table in tables)


def _section(table: Table) -> Iterator[str]:
    columns = list(_merged(table))
    yield f"## {table.title}"
    yield ""
    yield _line(["call", *(_title(group) for group in columns), "otherwise"])
    yield "|" + "---|" * (len(columns) + 2)
    for row in table.rows:
        last = f"{_shown(row, row.otherwise.kind)}: {row.otherwise.why}"
        yield _line([row.title, *(_entry(row, group[0]) for group in columns), last])
    yield ""
    for group in columns:
        yield f"- *{_title(group)}*: {_reasons(table, group[0])}."


def _reasons(table: Table, column: Condition) -> str:
    """Why, for each entry of the column; whose reason it is, where there are several."""
    entries: dict[str, dict[str, None]] = {}
    for row in table.rows:
        if column in row.cells:
            cell = row.cells[column]
            entries.setdefault(cell.why, {})[_shown(row, cell.kind)] = None
    if len(entries) == 1:
        return next(iter(entries))
    return ". ".join(f"{', '.join(kinds)}: {why}" for why, kinds in entries.items())


def _merged(table: Table) -> Iterator[list[Condition]]:
    """Neighbours with the same entries are one column."""
    group: list[Condition] = []
    for column in table.columns:
        if group and any(row.cells.get(group[0]) != row.cells.get(column) for row in table.rows):
            yield group
            group = []
        group.append(column)
    yield group


def _title(group: Sequence[Condition]) -> str:
    return " or ".join(column.title for column in group)


def _entry(row: Row, column: Condition) -> str:
    return _shown(row, row.cells[column].kind) if column in row.cells else ""


def _shown(row: Row, kind: str) -> str:
    if kind == STATE and row.calls[0].answers:
        kind = FALSE
    return kind if kind in (OK, WAITS) else f"`{kind}`"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
