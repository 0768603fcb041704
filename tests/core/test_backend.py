"""Which code attends, and what is refused where it can't run."""

import pytest
import torch

from tokenspeed_rl.core import backend
from tokenspeed_rl.core.backend import attention_backend
from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.layers.torch_attention import TorchAttention
from tokenspeed_rl.layers.triton_attention import TritonAttention

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def test_auto_is_what_the_device_has() -> None:
    """Kernels on a GPU, torch on a CPU; either may be asked for by name where it runs."""
    assert isinstance(attention_backend("auto", CPU, torch.float64, 4), TorchAttention)
    assert isinstance(attention_backend("auto", CUDA, torch.bfloat16, 4), TritonAttention)
    assert isinstance(attention_backend("torch", CUDA, torch.bfloat16, 4), TorchAttention)


def test_refused_where_it_cant_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """H14: no GPU and no interpreter, or weights that no kernel computes with: refused, with a way out."""
    monkeypatch.setattr(backend, "INTERPRETED", False)
    with pytest.raises(ConfigError, match=r"needs CUDA, and the device is cpu .*TRITON_INTERPRET=1"):
        attention_backend("triton", CPU, torch.float32, 4)
    with pytest.raises(ConfigError, match=r"weights are torch.float64 .*Cast the model"):
        attention_backend("auto", CUDA, torch.float64, 4)
