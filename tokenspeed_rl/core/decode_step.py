"""One decode step over inputs at fixed addresses: metadata, forward, draw, and the way of the draw back."""

import torch

from tokenspeed_rl.cache.kv_cache import LooseKV
from tokenspeed_rl.core.decode_rows import DecodeRows
from tokenspeed_rl.layers.forward_batch import ForwardBatch
from tokenspeed_rl.models import Decoder
from tokenspeed_rl_kernels import sample, step_metadata
from tokenspeed_rl_kernels.step_decode import StepDecode

KINDS = ("raw", "sampling", "processed")
"""Of logprobs, in the order of `DecodeStep.logprobs`."""


class DecodeStep:
    """The step of the first rows of `inputs`. Called, it computes one token for each that is active.

    It asks nothing of the device and allocates nothing that outlives it, so a CUDA graph may record it.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: LooseKV,
        inputs: DecodeRows,
        decode: StepDecode,
        *,
        rows: int,
        context: int,
    ) -> None:
        """`decode` is of all rows of `inputs`; `context` is the most tokens of one."""
        device = inputs.tokens.device.device
        self._decoder = decoder
        self._kv = kv
        self._inputs = inputs
        self._rows = rows
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        """What was drawn; -1 where nothing could be."""
        self.logprobs = torch.zeros(len(KINDS), rows, dtype=torch.float32, device=device)
        """Of the drawn tokens, a row of it for each of `KINDS`."""
        self._decode = decode.first(rows)
        self._batch = _batch(inputs, self._decode, rows, context)

    def __call__(self) -> None:
        """Compute it."""
        inputs, batch = self._inputs, self._batch
        step_metadata(
            batch.decode_lens,
            batch.decode_pages,
            self._decode.work,
            batch.positions,
            batch.slots,
            page_size=self._kv.k[0].shape[2],
            advance=True,
        )
        logits = self._decoder.logits(self._decoder.forward(batch, self._kv))
        columns = (inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seeds)
        heat, top_k, top_p, min_p, seeds = (column.device[: self._rows] for column in columns)
        drawn = sample(logits, heat, top_k, top_p, min_p, seeds, batch.decode_lens.long())
        self.tokens.copy_(drawn.tokens)
        batch.token_ids.copy_(drawn.tokens.clamp(min=0))
        torch.stack((drawn.logprob_raw, drawn.logprob_sampling, drawn.logprob_processed), out=self.logprobs)


def _batch(inputs: DecodeRows, decode: StepDecode, rows: int, context: int) -> ForwardBatch:
    """The rows as the decoder takes them."""
    device = inputs.tokens.device.device
    none = torch.zeros(1, 0, dtype=torch.int32, device=device)
    return ForwardBatch(
        token_ids=inputs.tokens.device[:rows],
        positions=torch.zeros(rows, dtype=torch.int64, device=device),
        slots=torch.full((rows,), -1, dtype=torch.int64, device=device),
        length=context,
        num_decode=rows,
        decode_pages=decode.page_table,
        decode_lens=decode.seq_lens,
        decode=decode,
        shared=None,
        prefill_pages=none[:0],
        prefill_starts=none[0].new_zeros(1),
        prefill_lens=none[0],
    )
