"""Embeddings and scores, as an engine's blocking verb."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenspeed_rl.client_base import make_request
from tokenspeed_rl.llm import LLM
from tokenspeed_rl.requests import EmbeddingReqInput
from tokenspeed_rl.sampling_params import check_timeout


class ScoreVerbs:
    """What reads hidden states instead of generating."""

    llm: LLM

    def encode(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        input_ids: Any = None,
        wait: bool = False,
        timeout: float | None = None,
        use_tqdm: bool = False,
        **request_fields: Any,
    ) -> Any:
        """Embed or score one prompt (a dict comes back) or a list of prompts (a list comes back).

        A causal LM gives `{"embedding": [floats], "meta_info": ...}`: the last token's hidden state after the
        final norm, at length 1. A reward model gives `{"score": ...}`, a value model the same with a score
        for each token. A score is a float where the model has one label, else a list of floats: its logits,
        as they are. `meta_info` is that of a generation of no token.

        Args:
            prompt: text; or `input_ids`: token ids. Exactly one of the two.
            wait: wait for the wake, the resume or valid weights instead of raising.
            timeout: seconds, after which the requests are aborted.
            use_tqdm: show a progress bar that counts prompts.
            request_fields: other fields of `EmbeddingReqInput`.

        Raises:
            RequestError: malformed, or longer than the context or the KV cache; nothing was queued.
            EngineStateError: asleep, paused or about to sleep. WeightsInvalidError: no complete set of
                weights. EngineTimeoutError: the timeout passed.
        """
        obj = make_request(EmbeddingReqInput, request_fields, text=prompt, input_ids=input_ids)
        check_timeout(timeout)
        run = self.llm.generate_with_bar if use_tqdm else self.llm.generate
        return run(obj, timeout, wait=wait)
