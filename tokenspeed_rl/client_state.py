"""How the engine is: load, state, health; and what of it can be set."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from tokenspeed_rl.client_base import ClientBase, expect
from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.core.watching.dump_files import prepare_beside, prepare_folder
from tokenspeed_rl.core.watching.tunables import LOGGING
from tokenspeed_rl.errors import EngineStateError, TokenSpeedError
from tokenspeed_rl.requests import ConfigureLoggingReq, GetLoadReqOutput, SetInternalStateReq


class StateMembers(ClientBase):
    """What is read here is a snapshot: it waits for nothing, not even for a step that hangs."""

    server_args: EngineConfig
    _status: str
    _since: float

    # Health

    def is_server_starting(self) -> bool:
        """Whether the constructor still runs."""
        return self._status == "starting"

    def mark_server_up(self) -> None:
        """Accept requests (again), once the watchdog finds nothing stuck."""
        self.check_alive()
        self._mark("up")

    def mark_server_unhealthy(self) -> None:
        """Refuse new requests until `mark_server_up`."""
        self.check_alive()
        self._mark("unhealthy")

    def check_healthy(self) -> None:
        """Raises EngineStateError where new requests are refused: the engine was marked unhealthy, or a step
        or command has not returned within `watchdog_timeout`."""
        if self._status == "unhealthy":
            raise EngineStateError(
                "the engine was marked unhealthy", fix="Call mark_server_up() when it is not."
            )
        if overdue := self._core.watch.watchdog.overdue:
            raise EngineStateError(
                f"the engine is stuck: {overdue}", fix="It accepts requests again once that returns."
            )

    def health(self) -> dict[str, Any]:
        """`status` ("starting", "up", "unhealthy"), the `reason` of the last, and for how many `seconds`."""
        if self._status == "up" and (overdue := self._core.watch.watchdog.overdue):
            return {"status": "unhealthy", "reason": str(overdue), "seconds": overdue.seconds}
        reason = "mark_server_unhealthy was called" if self._status == "unhealthy" else None
        return {"status": self._status, "reason": reason, "seconds": time.monotonic() - self._since}

    def _mark(self, status: str) -> None:
        if status != getattr(self, "_status", None):
            self._since = time.monotonic()
        self._status = status

    # Load and state

    def load(self) -> list[GetLoadReqOutput]:
        """Unfinished samples, how many of them are not running, and pages in use."""
        self.check_alive()
        core = self._core
        live, running = core.loop.num_live, len(core.scheduler.running)
        pages = core.cache.pool.num_used - core.cache.num_idle
        return [
            GetLoadReqOutput(
                dp_rank=0, num_reqs=live, num_waiting_reqs=max(0, live - running), num_pages=pages
            )
        ]

    async def get_load(self) -> list[GetLoadReqOutput]:
        """`load`."""
        return self.load()

    def internal_state(self) -> list[dict[Any, Any]]:
        """The engine as of now, as one dict that JSON can hold. From any thread, in every state, at once.

        - server_args: the settings, as they are now; status, health: see `health`; last_refusal: why the last
          call that answered "no" did.
        - The three axes: admission ("running" or the pause's mode) and draining (what waits for an empty
          engine, or None); residency (per tag "resident" or "released"); validity ("valid" or "invalid:
          why") and updating (whether a weight update is going on).
        - weight_version (label), weight_epoch (identity), weights_shared; adapters: ranks and bytes of each;
          weight_bytes, kv_bytes; memory: as `memory_report`.
        - Queues, in samples: num_live, num_running, num_waiting (what a drain holds back is in neither of
          these two). Retractions: num_retractions, of which num_preemptions for lack of pages, the others by
          pauses, releases and updates.
        - sessions: count, tokens they hold, live (turns going on).
        - pages of the KV cache: total, free, cached (kept for their content), idle (of these, in no use).
        - Totals: steps, prefill_tokens (computed), output_tokens, step_seconds, tokens_per_second; recent:
          the rates over the last ten seconds of stepping.
        - Samples that ended: num_finished, num_aborted, num_abandoned; prompt_tokens, cached_tokens and
          cache_hit_rate (of these tokens, what was there already) over those of them that were admitted.
        - expert_distribution: recording, the record so far and the last_dump; None without experts.
        - request_log: dumped, dropped (too many waited), dump_error; profile: its state ("idle", "waiting"
          for its first step, "running", "ended" by itself), steps recorded, files, error.
        """
        self.check_alive()
        state = self._core.snapshot()
        health = self.health()
        return [
            {
                "server_args": dataclasses.asdict(self.server_args),
                "status": health["status"],
                "health": health,
                "last_refusal": self.refusal,
                **state,
            }
        ]

    async def get_internal_state(self) -> list[dict[Any, Any]]:
        """`internal_state`."""
        return self.internal_state()

    # Settings

    async def change_settings(self, server_args: Mapping[str, Any], weight_version: str | None) -> None:
        """As `set_internal_state`, but a refusal raises: RequestError, ConfigError, EngineStateError."""
        self.check_alive()
        loop, tunables, folder = self._core.loop, self._core.tunables, None
        name = tunables.folder_to_prepare(server_args, weight_version)
        if name is not None:
            server_args = dict(server_args)  # the caller may write theirs while the folder is made
            folder = await asyncio.wrap_future(loop.open(partial(prepare_beside, name)))
        await self._command(partial(tunables.change, server_args, weight_version, folder))

    async def set_internal_state(self, obj: SetInternalStateReq) -> list[bool]:
        """Change settings between two steps, all or none: [True], or [False] with the reason in
        `last_refusal`. Requests in flight go on.

        `server_args` may have max_running_requests and chunked_prefill_size (from the next step on; what runs
        already isn't sent back), enable_prefix_caching (off: all is forgotten and nothing kept), mem_fraction
        and reserve_bytes (at the next wake; without `max_total_tokens`), log_level, watchdog_timeout, and
        what `configure_logging` sets; a dump's folder is made first, beside the loop. `weight_version` is
        another label for the same weights: cached KV stays good, and outputs in flight go on under it.
        """
        try:
            obj = expect(obj, SetInternalStateReq)
            await self.change_settings(obj.server_args, obj.weight_version)
        except TokenSpeedError as error:
            self._refused(error)
            return [False]
        return [True]

    def configure_logging(self, obj: ConfigureLoggingReq) -> None:
        """Log requests, or dump them, from the next that ends on; None leaves a setting as it is.

        A log line is at info through a logger of its own under `tokenspeed_rl`, whatever `log_level` is: any
        handler there or on the root logger shows it (`logging.basicConfig()` makes one). A dump is JSON lines
        that `python -m tokenspeed_rl replay` runs again; folder "" ends it. Both are written by another
        thread. A dump that can't be written any more stops: `get_internal_state()[0]["request_log"]`. The
        folder is made on the calling thread: where that hangs, the caller alone waits.

        Raises:
            RequestError, ConfigError: no such level, a folder that can't be written ...; nothing changed.
        """
        self.check_alive()
        asked = expect(obj, ConfigureLoggingReq)
        given = {name: getattr(asked, name) for name in LOGGING}
        fields = {name: value for name, value in given.items() if value is not None}
        name = self._core.tunables.folder_to_prepare(fields)
        folder = None if name is None else prepare_folder(name)
        self.check_alive()  # that may have taken long
        self._core.tunables.change(fields, folder=folder)
