"""One step's inputs to the decoder, as tensors."""

from dataclasses import dataclass

from torch import Tensor

from tokenspeed_rl.layers.lora import AdaptedRows
from tokenspeed_rl_kernels.step_decode import StepDecode


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """Tokens of one step, flat: first the decode rows (one token each), then the prefill chunks, one by one.

    All tensors lie on the model's device: ``T`` tokens, ``R`` prefill requests, ``n`` and ``m`` pages.
    Within a layer every token's key and value is written before any attention reads the cache, so a request
    may read pages that another request of the same step writes."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, absolute position of each token in its request."""
    length: int
    """All positions are below it."""
    slots: Tensor
    """[T] int64, page * page_size + offset; < 0: nothing is written."""
    num_decode: int
    """Tokens [0, num_decode) are decode rows, one token each; the rest is prefill."""
    decode_pages: Tensor
    """[num_decode, n] int32."""
    decode_lens: Tensor
    """[num_decode] int32, context length including this token."""
    shared: tuple[Tensor, Tensor, Tensor] | None
    """(prefix_pages [G, m], prefix_lens [G], group_of_row [num_decode]) int32, as `paged_decode` takes it."""
    prefill_pages: Tensor
    """[R, m] int32."""
    prefill_starts: Tensor
    """[R + 1] int32, offsets into the prefill tokens (starts at 0)."""
    prefill_lens: Tensor
    """[R] int32, context length including this chunk."""
    decode: StepDecode | None = None
    """Of the decode rows, where it is kept from step to step; None: made by whatever needs it."""
    adapted: tuple[AdaptedRows, ...] = ()
    """The rows that adapters are for, by adapter."""
