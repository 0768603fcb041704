"""Rewards out of a reward model that an engine serves."""

from contextlib import aclosing
from typing import Any

from tokenspeed_rl.errors import ConfigError, TokenSpeedError
from tokenspeed_rl.protocol import EngineClient
from tokenspeed_rl.requests import EmbeddingReqInput
from tokenspeed_rl.rl.sample import Sample


class RewardModel:
    """Scores prompt and output as one sequence. An async reward: the engine batches what is asked together.

    Args:
        client: an engine of a sequence classifier with one label, over the policy's token ids.

    Raises:
        ConfigError: the engine's model is another.
    """

    name = "reward model"

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        labels = getattr(client.model_config, "num_labels", 0)
        if client.is_generation or labels != 1:
            what = "generates" if client.is_generation else f"gives {labels} scores"
            raise ConfigError(
                "a reward model gives one score",
                got=f"an engine whose model {what}",
                fix="Serve a ...ForSequenceClassification with num_labels=1.",
            )

    async def __call__(self, sample: Sample) -> float:
        """The score; TokenSpeedError where it is no finite number, or one for each token."""
        request = EmbeddingReqInput(input_ids=[*sample.prompt_ids, *sample.output_ids])
        async with aclosing(self.client.generate_request(request)) as replies:
            result: dict[str, Any] = await anext(replies)
        score, reason = result["score"], result["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            raise TokenSpeedError(f"the reward model gave no score: {reason['message']}")
        if not isinstance(score, float):
            raise TokenSpeedError(
                "the model gives a value for each token, not one score",
                fix="Serve a ...ForSequenceClassification with num_labels=1.",
            )
        return score
