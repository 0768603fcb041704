"""Rotary position embedding: angles of every variant that the models use, as transformers computes them.

Sources: Su et al. 2021 (default); position interpolation, Chen et al. 2023 (linear); NTK-aware scaling
(dynamic); YaRN, Peng et al. 2023 (yarn); the Llama 3.1 release (llama3).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Parameters of one rotary embedding; those that a kind doesn't use keep their defaults."""

    kind: str
    """One of `KINDS`. ``dynamic`` stretches the angles of contexts beyond ``max_position`` by their length:
    cached keys would turn with every new token. It is refused there; up to there it is the default."""
    dim: int
    """Rotated dimensions of a head, even."""
    theta: float
    """Base of the wavelengths."""
    max_position: int
    """Positions that there are angles for."""
    factor: float = 1.0
    """How many times longer the context became: linear, yarn, llama3."""
    attention_factor: float = 1.0
    """Factor on cos and sin: yarn."""
    original_max_position: int = 0
    """Context before it became longer: yarn, llama3."""
    beta_fast: float = 32.0
    """Rotations within the original context above which a dimension is left alone: yarn."""
    beta_slow: float = 1.0
    """Rotations below which a dimension is fully interpolated: yarn."""
    truncate: bool = True
    """Whether the dimensions between the two are rounded to whole ones: yarn."""
    low_freq_factor: float = 1.0
    """Original context over the wavelength above which a dimension is fully interpolated: llama3."""
    high_freq_factor: float = 4.0
    """Original context over the wavelength below which a dimension is left alone: llama3."""


class RopeTable:
    """The angles' cos and sin by position, as `rope_write_kv` takes them; grows as positions are needed."""

    def __init__(self, spec: RopeSpec) -> None:
        self._spec = spec
        self._frequencies = inverse_frequencies(spec)
        self._table: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return 0 if self._table is None else self._table.nbytes

    def follow(self, frequencies: Tensor | None) -> None:
        """Use these [dim / 2] radians per position from now on; None: the spec's."""
        spec = self._spec
        self._frequencies = inverse_frequencies(spec) if frequencies is None else frequencies.float().cpu()
        self._table = None

    def cos_sin(self, length: int, device: torch.device) -> Tensor:
        """[L, dim] float32 with L >= length: cos of the dim / 2 angles of each position, then sin.

        Raises:
            ValueError: ``length`` is beyond the spec's ``max_position``.
        """
        limit = self._spec.max_position
        if length > limit:
            raise ValueError(f"position {length - 1} asked for: the model has {limit}; shorten the context")
        table = self._table
        if table is None or len(table) < length or table.device != device:
            rows = min(limit, max(1024, 1 << (length - 1).bit_length()))
            angles = torch.arange(rows, dtype=torch.float32, device="cpu").unsqueeze(1) * self._frequencies
            table = torch.cat((angles.cos(), angles.sin()), 1).mul_(self._spec.attention_factor).to(device)
            self._table = table
        return table


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """[dim / 2] float32 on the CPU: radians per position of each pair of dimensions."""
    wavelengths = spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32, device="cpu") / spec.dim)
    if spec.kind == "linear":
        return 1.0 / wavelengths / spec.factor
    if spec.kind == "yarn":
        return _yarn(spec, wavelengths)
    if spec.kind == "llama3":
        return _llama3(spec, 1.0 / wavelengths)
    return 1.0 / wavelengths


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The factor on cos and sin that YaRN takes unless the model names one."""

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def _yarn(spec: RopeSpec, wavelengths: Tensor) -> Tensor:
    """Fast dimensions as they are, slow ones interpolated, a linear ramp between."""

    def dimension(rotations: float) -> float:
        turns = spec.original_max_position / (rotations * 2 * math.pi)
        return spec.dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(spec.dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((pairs - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (spec.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _llama3(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Short wavelengths as they are, long ones interpolated, a smooth passage between."""
    wavelengths = 2 * math.pi / frequencies
    long, short = (spec.original_max_position / f for f in (spec.low_freq_factor, spec.high_freq_factor))
    smooth = spec.original_max_position / wavelengths - spec.low_freq_factor
    smooth = smooth / (spec.high_freq_factor - spec.low_freq_factor)
    between = (1 - smooth) * frequencies / spec.factor + smooth * frequencies
    interpolated = torch.where(wavelengths > long, frequencies / spec.factor, frequencies)
    return torch.where((wavelengths >= short) & (wavelengths <= long), between, interpolated)
