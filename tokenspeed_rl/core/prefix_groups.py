"""Which decode rows share the pages of their prompt: plain Python, no tensor."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tokenspeed_rl.core.request import Request


class PrefixGroup(NamedTuple):
    """Rows whose first tokens lie in the very same pages."""

    rows: tuple[int, ...]
    """Two or more, places in the batch."""
    pages: tuple[int, ...]


def prefix_groups(requests: Sequence[Request], page_size: int) -> list[PrefixGroup]:
    """Groups of requests whose prompts' full pages are the same, in order of their first rows."""
    members: dict[int, list[int]] = defaultdict(list)
    for row, request in enumerate(requests):
        if full := request.prompt_len // page_size:
            members[request.pages[full - 1]].append(row)
    groups = []
    for rows in members.values():
        if len(rows) > 1:
            first = requests[rows[0]]
            groups.append(PrefixGroup(tuple(rows), tuple(first.pages[: first.prompt_len // page_size])))
    return groups
