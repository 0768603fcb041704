"""From a transformers config to the spec of its family."""

import dataclasses
from typing import Any

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.models.families import FAMILIES
from tokenspeed_rl.models.head import SUFFIXES, head_of
from tokenspeed_rl.models.hf_config import decoder_spec
from tokenspeed_rl.models.spec import DecoderSpec


def spec_from_config(hf_config: Any, live: str = "") -> DecoderSpec:
    """The spec of a transformers config of a supported family.

    The family follows from ``model_type``, as in transformers; the head from ``architectures``, which, if
    any, must name one of its classes. Without them it is a causal LM.

    Args:
        hf_config: of a directory, of the caller's making, or a live module's.
        live: name of that module's class. Where it is one of the family's, it counts, and not
            ``architectures``, which may still be those of the checkpoint that the module began from.

    Raises:
        ConfigError: another architecture, with a list of those supported, or features that aren't, by name.
    """
    named = getattr(hf_config, "architectures", None) or []
    for family in FAMILIES:
        if family.model_type != hf_config.model_type:
            continue
        own = {family.name + suffix: suffix for suffix in SUFFIXES}
        named = [live] if live in own else named
        architecture = next((name for name in own if not named or name in named), None)
        if architecture is not None:
            spec = decoder_spec(hf_config, architecture, family.options(hf_config))
            head = head_of(hf_config, own[architecture])
            return dataclasses.replace(spec, head=head, tied=spec.tied and head.generates)
    raise ConfigError(
        "the model's architecture isn't supported",
        got=", ".join(named) or hf_config.model_type,
        fix=f"Supported: {', '.join(family.architecture for family in FAMILIES)}; "
        "and ForSequenceClassification, ForTokenClassification of the same families.",
    )
