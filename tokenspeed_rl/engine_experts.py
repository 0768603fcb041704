"""The record of expert distribution, as an engine's blocking verbs."""

from __future__ import annotations

from tokenspeed_rl.client_experts import ExpertMembers
from tokenspeed_rl.llm import LLM


class ExpertVerbs:
    """`ExpertMembers`, blocking; they raise the same errors."""

    client: ExpertMembers
    llm: LLM

    def start_expert_distribution_record(self) -> None:
        """Count how many tokens each expert computes, from the next step on."""
        self.llm.run(self.client.start_expert_distribution_record())

    def stop_expert_distribution_record(self) -> None:
        """Count no more; what was counted stays until it is dumped."""
        self.llm.run(self.client.stop_expert_distribution_record())

    def dump_expert_distribution_record(self) -> None:
        """Take the record away, into a file of `expert_distribution_dir` if that is set, and begin another.
        It is `get_internal_state()[0]["expert_distribution"]["last_dump"]` then."""
        self.llm.run(self.client.dump_expert_distribution_record())
