"""Which code attends."""

import torch

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.layers.attention import AttentionBackend
from tokenspeed_rl.layers.torch_attention import TorchAttention
from tokenspeed_rl.layers.triton_attention import TritonAttention
from tokenspeed_rl_kernels.registry import INTERPRETED


def attention_backend(name: str, device: torch.device, heads: int) -> AttentionBackend:
    """The backend of this name, see `EngineConfig`, for a model of so many query heads.

    Raises:
        ConfigError: it can't run on this device.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name == "torch":
        return TorchAttention()
    if device.type != "cuda" and not INTERPRETED:
        raise ConfigError(
            f"attention_backend triton needs CUDA, and the device is {device.type}",
            got=name,
            fix="Leave it at auto; to have kernels interpreted, start Python with TRITON_INTERPRET=1.",
        )
    return TritonAttention(heads)
