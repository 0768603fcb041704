"""The weight groups that one engine has joined, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from tokenspeed_rl.errors import EngineShutdownError, RequestError, nearest
from tokenspeed_rl.requests import InitWeightsUpdateGroupReqInput
from tokenspeed_rl.weights.transport.group import WeightsGroup
from tokenspeed_rl.weights.transport.rendezvous import uncancelled


class Groups:
    """An engine's weight groups. Any thread; only `init` waits, and none of the others waits for it."""

    def __init__(self) -> None:
        self._groups: dict[str, WeightsGroup | None] = {}  # None: being joined
        self._lock = threading.Lock()
        self._closed = False

    def init(
        self,
        obj: InitWeightsUpdateGroupReqInput,
        *,
        device: torch.device | str,
        tp_rank: int = 0,
        check: Callable[[], None] = uncancelled,
    ) -> WeightsGroup:
        """Join a group as rank `rank_offset + tp_rank`; one of that name that is broken is replaced.

        Args:
            check: polled while waiting for the sender; what it raises ends the wait.

        Raises:
            RequestError: a group of that name is there and healthy, or being joined. And what `WeightsGroup`
                raises.
            EngineShutdownError: all were closed, before or meanwhile.
        """
        name = obj.group_name
        self._claim(name)
        try:
            group = WeightsGroup(
                obj.master_address,
                obj.master_port,
                obj.rank_offset + tp_rank,
                obj.world_size,
                name,
                obj.backend,
                obj.timeout,
                device,
                check,
            )
        except BaseException:
            with self._lock:
                self._groups.pop(name, None)
            raise
        try:
            with self._lock:
                self._refuse_if_closed()
                self._groups[name] = group
        except EngineShutdownError:
            group.close()
            raise
        return group

    def _claim(self, name: str) -> None:
        """Keep others from joining a group of that name, in place of one that is broken."""
        with self._lock:
            held = self._groups.get(name)
        broken = held is not None and not held.alive()  # asks the sender: `held` is there to others meanwhile
        with self._lock:
            self._refuse_if_closed()
            now = self._groups.get(name)
            if name in self._groups and not (broken and now is held):
                raise RequestError(
                    f"a weight group of that name is {'there already' if now else 'being joined'}",
                    got=name,
                    fix="Call destroy_weights_update_group first, or take another group_name.",
                )
            self._groups[name] = None
        if broken and held is not None:
            held.close()

    def get(self, name: str) -> WeightsGroup:
        """The group of that name, broken or not.

        Raises:
            RequestError: there is none.
        """
        with self._lock:
            group = self._groups.get(name) if isinstance(name, str) else None
            if group is None:
                raise self._unknown(name)
            return group

    def destroy(self, name: str) -> None:
        """Leave a group; a transfer under way in it fails.

        Raises:
            RequestError: there is none of that name.
        """
        with self._lock:
            group = self._groups.get(name) if isinstance(name, str) else None
            if group is None:
                raise self._unknown(name)
            del self._groups[name]
        group.close()

    def close_all(self) -> None:
        """Leave every group, for good: none is joined any more."""
        with self._lock:
            self._closed = True
            groups = [group for group in self._groups.values() if group is not None]
            self._groups.clear()
        for group in groups:
            group.close()

    def names(self) -> list[str]:
        """Names of the groups joined, broken ones included."""
        with self._lock:
            return [name for name, group in self._groups.items() if group is not None]

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineShutdownError("the engine was shut down, and joins no weight group any more")

    def _unknown(self, name: str) -> RequestError:
        names = [other for other, group in self._groups.items() if group is not None]
        fix = nearest(name, names) if names else "Call init_weights_update_group first."
        return RequestError("there is no weight group of that name", got=name, fix=fix)
