"""Decoder-only language models: one decoder, and a short file per family for what it adds."""

from tokenspeed_rl.models.decoder import Decoder
from tokenspeed_rl.models.families import FAMILIES, module_classes
from tokenspeed_rl.models.head import Head, Reading
from tokenspeed_rl.models.live_module import config_faults, module_faults
from tokenspeed_rl.models.registry import spec_from_config
from tokenspeed_rl.models.slots import slots
from tokenspeed_rl.models.spec import DecoderSpec

__all__ = [
    "FAMILIES",
    "Decoder",
    "DecoderSpec",
    "Head",
    "Reading",
    "config_faults",
    "module_classes",
    "module_faults",
    "slots",
    "spec_from_config",
]
