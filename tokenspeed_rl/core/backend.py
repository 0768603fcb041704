"""Which code attends."""

import torch

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.layers.attention import AttentionBackend
from tokenspeed_rl.layers.torch_attention import TorchAttention
from tokenspeed_rl.layers.triton_attention import TritonAttention
from tokenspeed_rl_kernels.registry import INTERPRETED


def attention_backend(name: str, device: torch.device, dtype: torch.dtype, heads: int) -> AttentionBackend:
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
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"Triton kernels compute in float32, bfloat16 or float16, and the weights are {dtype}",
            got=name,
            fix="Cast the model, or pass dtype='float32'.",
        )
    return TritonAttention(heads)
