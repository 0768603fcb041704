"""Multi-turn sessions as an engine's blocking verbs."""

from __future__ import annotations

from tokenspeed_rl.client_sessions import SessionMembers
from tokenspeed_rl.lifecycle.sessions import open_already


class SessionVerbs:
    """`SessionMembers`, at once, whatever else goes on. Where the client answers None, this raises why."""

    client: SessionMembers

    def open_session(self, capacity_of_str_len: int, session_id: str | None = None) -> str:
        """Open a session: a token sequence that `generate(..., session_params={"id": ...})` continues, turn
        by turn, as `AsyncLLM.open_session` says.

        Args:
            capacity_of_str_len: most tokens it may hold (the name is historical).
            session_id: None: a random one.

        Returns:
            Its id.

        Raises:
            RequestError: no positive capacity, no string, or that session is open already.
        """
        opened = self.client.new_session(capacity_of_str_len, session_id)
        if opened is None:
            raise open_already(session_id)
        return opened

    def close_session(self, session_id: str) -> None:
        """Close a session and forget its tokens. A live turn is aborted, and whoever waits for it woken.

        Raises:
            RequestError: no such session is open.
        """
        self.client.end_session(session_id)
