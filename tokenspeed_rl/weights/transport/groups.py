"""The weight groups that one engine has joined, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from tokenspeed_rl.errors import RequestError, nearest
from tokenspeed_rl.requests import InitWeightsUpdateGroupReqInput
from tokenspeed_rl.weights.transport.group import WeightsGroup
from tokenspeed_rl.weights.transport.rendezvous import uncancelled


class Groups:
    """An engine's weight groups. Any thread; only `init` waits, and none of the others waits for it."""

    def __init__(self) -> None:
        self._groups: dict[str, WeightsGroup | None] = {}  # None: being joined
        self._lock = threading.Lock()

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
        """
        name = obj.group_name
        with self._lock:
            held = self._groups.get(name)
            joining = name in self._groups and held is None
            if not joining:
                self._groups[name] = None
        if joining or (held is not None and held.alive()):
            if held is not None:
                self._settle(name, held)
            raise RequestError(
                f"a weight group of that name is {'there already' if held else 'being joined'}",
                got=name,
                fix="Call destroy_weights_update_group first, or take another group_name.",
            )
        try:
            if held is not None:
                held.close()
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
            self._settle(name, None)
            raise
        self._settle(name, group)
        return group

    def get(self, name: str) -> WeightsGroup:
        """The group of that name, broken or not.

        Raises:
            RequestError: there is none.
        """
        with self._lock:
            group = self._groups.get(name)
            if group is None:
                raise self._unknown(name)
            return group

    def destroy(self, name: str) -> None:
        """Leave a group; a transfer under way in it fails.

        Raises:
            RequestError: there is none of that name.
        """
        with self._lock:
            group = self._groups.get(name)
            if group is None:
                raise self._unknown(name)
            del self._groups[name]
        group.close()

    def close_all(self) -> None:
        """Leave every group."""
        with self._lock:
            groups = [group for group in self._groups.values() if group is not None]
            self._groups.clear()
        for group in groups:
            group.close()

    def names(self) -> list[str]:
        """Names of the groups joined, broken ones included."""
        with self._lock:
            return [name for name, group in self._groups.items() if group is not None]

    def _settle(self, name: str, group: WeightsGroup | None) -> None:
        """Put what came of joining in its place."""
        with self._lock:
            if group is None:
                self._groups.pop(name, None)
            else:
                self._groups[name] = group

    def _unknown(self, name: str) -> RequestError:
        names = [other for other, group in self._groups.items() if group is not None]
        fix = nearest(name, names) if names else "Call init_weights_update_group first."
        return RequestError("there is no weight group of that name", got=name, fix=fix)
