"""The inputs of decode steps at fixed addresses, a row per request, and what the host knows of them.

A step leaves behind what the next one begins with: lengths one longer, the drawn tokens as inputs. So only
what that doesn't tell is copied to the device: a row whose request is new or got a page, an ended one's end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed_rl.core.prefix_groups import prefix_groups
from tokenspeed_rl.core.request import Request

INACTIVE = -1
"""Length of a row that computes nothing, writes nothing and draws whatever comes."""


class Mirror:
    """A tensor on the device, and the host's copy of what it holds or is to hold."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, fill: int = 0) -> None:
        self.device = torch.full(tuple(shape), fill, dtype=dtype, device=device)
        self._staged = torch.full(tuple(shape), fill, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: npt.NDArray[np.generic] = self._staged.numpy()

    def upload(self, rows: int) -> None:
        """Bring the first `rows` rows to the device."""
        self.device[:rows].copy_(self._staged[:rows], non_blocking=True)

    def expect(self, values: npt.NDArray[np.generic]) -> None:
        """Bring these first rows to the device where the host's copy says that it has others."""
        if not np.array_equal(self.host[: len(values)], values):
            self.put(values)

    def put(self, values: npt.NDArray[np.generic]) -> None:
        """Bring these first rows to the device."""
        self.host[: len(values)] = values
        self.upload(len(values))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.device.nbytes


@dataclass(slots=True)
class _Placed:
    """A request in a row, and which of its pages the row's table has."""

    request: Request
    pages: list[int]
    """The request's own list: another object once it had to give up its pages."""
    count: int
    kept: int
    """The request's `kept_pages` then: one from there on may be another's of equal content by now, but not
    before a new page is there too."""


class DecodeRows:
    """At most `max_rows` requests, each of at most `max_pages` pages.

    A request keeps its row for as long as it decodes. `place` says which requests compute the next step.
    """

    def __init__(
        self, max_rows: int, max_pages: int, page_size: int, device: torch.device, *, rows_per_read: int
    ) -> None:
        """`rows_per_read`: how many rows at most read a prefix together, see `Sharing`."""

        def column(dtype: torch.dtype, fill: int = 0) -> Mirror:
            return Mirror((max_rows,), dtype, device, fill)

        self._page_size = page_size
        self._rows_per_read = rows_per_read
        self.tokens = column(torch.int64)
        self.lens = column(torch.int32, INACTIVE)
        self.pages = Mirror((max_rows, max_pages), torch.int32, device)
        self.order = column(torch.int32)
        self.prefix_lens = column(torch.int32)
        self.leads = column(torch.int32, 1)
        self.temperature = column(torch.float32, 1)
        self.top_k = column(torch.int32)
        self.top_p = column(torch.float32, 1)
        self.min_p = column(torch.float32)
        self.seeds = column(torch.int64)
        self._placed: list[_Placed | None] = [None] * max_rows
        self._rows: dict[Request, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(mirror.nbytes for mirror in vars(self).values() if isinstance(mirror, Mirror))

    def place(self, requests: Sequence[Request], bucket: int) -> list[int]:
        """Give each request a row below `bucket`, at least as many, and bring what is missing to the device.

        Returns:
            The row of each request. All others are inactive.
        """
        here = set(requests)
        gone = [request for request in self._rows if request not in here]
        for request in gone:
            self._placed[self._rows.pop(request)] = None
        if any(row >= bucket for row in self._rows.values()):
            self._placed, self._rows = [None] * len(self._placed), {}
        new = [request for request in requests if request not in self._rows]
        free = (row for row in range(bucket) if self._placed[row] is None)
        self._rows.update(zip(new, free, strict=False))
        if self._bring_pages(requests) or gone:
            self._bring_groups(bucket)
        if new:
            self._bring_parameters(new, bucket)
        self._bring_progress(bucket, new=bool(new))
        return [self._rows[request] for request in requests]

    def clear(self) -> None:
        """No request has a row."""
        self._placed, self._rows = [None] * len(self._placed), {}
        self._bring_progress(len(self._placed), new=False)

    def advanced(self, rows: Iterable[int], drawn: Sequence[int]) -> None:
        """A step was computed: what the device holds now in `rows`, whose draws were these."""
        for row, token in zip(rows, drawn, strict=True):
            self.lens.host[row] += 1
            self.tokens.host[row] = max(token, 0)

    def _bring_pages(self, requests: Sequence[Request]) -> bool:
        """The tables of those whose pages are not what they were; whether any has other ones altogether."""
        changed, others = [], False
        for request in requests:
            row, pages = self._rows[request], request.pages
            placed = self._placed[row]
            first = 0
            if placed is not None and placed.pages is pages:
                if placed.count == len(pages):
                    continue
                first = placed.kept
            others |= first == 0
            self.pages.host[row, first : len(pages)] = pages[first:]
            self._placed[row] = _Placed(request, pages, len(pages), request.kept_pages)
            changed.append(row)
        if changed:
            self._upload_tables(changed)
        return others

    def _upload_tables(self, rows: list[int]) -> None:
        width = max(placed.count for placed in self._placed if placed is not None)
        device = self.pages.device
        which = torch.tensor(rows, device=device.device)
        tables = torch.from_numpy(self.pages.host[rows, :width]).to(device.device)
        device[:, :width].index_copy_(0, which, tables)

    def _bring_groups(self, bucket: int) -> None:
        """Who shares a prefix, as `Sharing` says it."""
        placed = [(row, found.request) for row in range(bucket) if (found := self._placed[row]) is not None]
        groups = prefix_groups([request for _, request in placed], self._page_size)
        order = [placed[member][0] for group in groups for member in group.rows]
        alone = sorted(set(range(bucket)) - set(order))
        lens, leads = np.zeros(bucket, dtype=np.int32), np.ones(bucket, dtype=np.int32)
        start = 0
        for group in groups:
            count = len(group.rows)
            lens[start : start + count] = len(group.pages) * self._page_size
            leads[start : start + count] = 0
            for first in range(0, count, self._rows_per_read):
                leads[start + first] = min(self._rows_per_read, count - first)
            start += count
        self.order.expect(np.array([*order, *alone], dtype=np.int32))
        self.prefix_lens.expect(lens)
        self.leads.expect(leads)

    def _bring_parameters(self, new: Sequence[Request], bucket: int) -> None:
        for request in new:
            row, p = self._rows[request], request.params
            self.temperature.host[row] = p.temperature
            self.top_k.host[row] = min(p.top_k, 2**31 - 1)
            self.top_p.host[row] = p.top_p
            self.min_p.host[row] = p.min_p
            self.seeds.host[row] = request.draw_seed
        for column in (self.temperature, self.top_k, self.top_p, self.min_p, self.seeds):
            column.upload(bucket)

    def _bring_progress(self, bucket: int, *, new: bool) -> None:
        """Lengths and tokens. What a step left in an inactive row, as the one run to capture it does in all,
        the host doesn't know: a `new` request's token is always brought."""
        lens = np.full(bucket, INACTIVE, dtype=np.int32)
        tokens = np.zeros(bucket, dtype=np.int64)
        tokens[:] = self.tokens.host[:bucket]
        for request, row in self._rows.items():
            lens[row], tokens[row] = request.computed, request.tokens[-1]
        self.lens.expect(lens)
        (self.tokens.put if new else self.tokens.expect)(tokens)


def bucket_for(rows: int, most: int) -> int:
    """Rows that a step of so many is padded to: few sizes to capture, little padding."""
    if rows <= 4:
        bucket = 1 << (rows - 1).bit_length()
    else:
        unit = 8 if rows <= 64 else 16 if rows <= 256 else 64
        bucket = -(-rows // unit) * unit
    return min(bucket, most)
