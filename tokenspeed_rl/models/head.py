"""What stands on top of the decoder: the logits of a language model, or a linear layer that scores."""

from dataclasses import dataclass
from typing import Any, Literal

from tokenspeed_rl.errors import ConfigError

Reading = Literal["embedding", "score", "values"]
"""What is read off hidden states: the last token's, normalised; a score there; a score at every token."""


@dataclass(frozen=True, slots=True)
class Head:
    """The last layer of a model, and what can be read with it."""

    reading: Reading = "embedding"
    labels: int = 0
    """Rows of ``score.weight``; 0: a language model, which has none."""
    bias: bool = False
    """Whether there is a ``score.bias``."""

    @property
    def generates(self) -> bool:
        """Whether there are logits to draw from."""
        return self.labels == 0


CAUSAL = Head()
"""A language model's."""
SUFFIXES: dict[str, Reading] = {
    "ForCausalLM": "embedding",
    "ForSequenceClassification": "score",
    "ForTokenClassification": "values",
}
"""How the names of transformers' classes with such a head end."""


def head_of(config: Any, suffix: str) -> Head:
    """The head of the class that ends in ``suffix``, made from ``config``.

    Raises:
        ConfigError: it would score nothing.
    """
    reading = SUFFIXES[suffix]
    if reading == "embedding":
        return CAUSAL
    if config.num_labels < 1:
        raise ConfigError("num_labels must be at least 1", got=config.num_labels, fix="Set it in the config.")
    bias = reading == "values" and bool(getattr(config, "token_classification_bias", True))
    return Head(reading, config.num_labels, bias)
