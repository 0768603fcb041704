"""Multi-turn sessions, for asyncio. Opening and closing is done at once, in every state of the engine."""

from __future__ import annotations

from tokenspeed_rl.client_base import ClientBase, expect
from tokenspeed_rl.lifecycle.sessions import open_already
from tokenspeed_rl.requests import CloseSessionReqInput, OpenSessionReqInput


class SessionMembers(ClientBase):
    """Token sequences that turns continue; opening and closing waits for nothing."""

    def new_session(self, capacity: int, session_id: str | None = None) -> str | None:
        """As `open_session`, without a note of why it answers None. From any thread."""
        self.check_alive()
        return self._core.sessions.open(capacity, session_id)

    async def open_session(self, obj: OpenSessionReqInput) -> str | None:
        """Open a session and return its id; None, with the reason in `last_refusal`: it is open already.

        A session is a token sequence that turns continue, one at a time: requests with its id in
        `session_params`.

        The prompt of a turn is the session's tokens and the request's input: `prompt_tokens`, `prompt_ids`
        and `logprob_start_len` count from the session's first token; ids, logprobs, spans and text of the
        result are this turn's alone. Ids are appended as they are, never encoded again; text is tokenised
        without special tokens where the session has any tokens.

        A turn that ends in `stop` or `length` appends its input and all its `output_ids` (with
        `max_new_tokens=0` the input alone), before its caller is told. Any other end leaves the session as it
        was: an abort, logits that are not finite, a refused submission, a timeout, a stream left before its
        last message, also where the last token was there already when the caller left, unless another turn
        has begun since.

        A prompt and an explicit `max_new_tokens` that exceed the session's capacity are refused; without the
        latter the turn ends in `length` there. A capacity beyond the model's context is never reached.

        Former turns' KV comes out of the prefix cache, in whole pages. So a turn computes the session again
        after an update, a release or a flush, and always with `enable_prefix_caching=False`.

        Raises:
            RequestError: the capacity is no positive integer, the id no string or empty.
        """
        asked = expect(obj, OpenSessionReqInput)
        opened = self.new_session(asked.capacity_of_str_len, asked.session_id)
        if opened is None:
            self._refused(open_already(asked.session_id))
        return opened

    def end_session(self, session_id: str) -> None:
        """As `close_session`. From any thread."""
        self.check_alive()
        self._core.sessions.close(session_id)

    async def close_session(self, obj: CloseSessionReqInput) -> None:
        """Close a session and forget its tokens. A live turn is aborted, and whoever waits for it woken.

        Raises:
            RequestError: no such session is open.
        """
        self.end_session(expect(obj, CloseSessionReqInput).session_id)
