"""From a transformers config to the spec of its family."""

from typing import Any

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.models.families import FAMILIES
from tokenspeed_rl.models.hf_config import decoder_spec
from tokenspeed_rl.models.spec import DecoderSpec


def spec_from_config(hf_config: Any) -> DecoderSpec:
    """The spec of a transformers config of a supported causal language model.

    The family follows from ``model_type``, as in transformers; ``architectures``, if any, must name its
    causal LM.

    Raises:
        ConfigError: another architecture, with a list of those supported, or features that aren't, by name.
    """
    named = getattr(hf_config, "architectures", None) or []
    for family in FAMILIES:
        if family.model_type == hf_config.model_type and (not named or family.architecture in named):
            return decoder_spec(hf_config, family.architecture, family.options(hf_config))
    raise ConfigError(
        "the model's architecture isn't supported",
        got=", ".join(named) or hf_config.model_type,
        fix=f"Supported: {', '.join(family.architecture for family in FAMILIES)}.",
    )
