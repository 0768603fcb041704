"""What a compiled kernel takes and is made of: read out of the machine code."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs

_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_NVIDIA_MATRIX = re.compile(r"(?:[A-Z]+MMA|WGMMA)\b.*")
_AMD_CODE = re.compile(r"^\t([vs]_\w+|ds_\w+|buffer_\w+|global_\w+|flat_\w+|scratch_\w+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one kernel, compiled for one architecture."""

    registers: int
    """Per thread."""
    stack: int
    """Bytes of local memory per thread."""
    spills: int
    """Instructions that move registers to local memory and back; on AMD, the vector registers spilled (scalar
    ones go to lanes of those, not to memory)."""
    shared: int
    """Bytes of shared memory per program."""
    async_copies: dict[str, int]
    """Asynchronous copies to shared memory in the code, by bytes per thread: "16", or less."""
    matrix: dict[str, int]
    """Matrix instructions in the code, by kind."""
    instructions: int


def figures_of(compiled: Any) -> Figures:
    """Read a kernel that `compile_spec` made.

    Raises:
        RuntimeError: the NVIDIA tools that Triton brings aren't there.
    """
    return _amd(compiled) if "amdgcn" in compiled.asm else _nvidia(compiled)


def _nvidia(compiled: Any) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(cubin))
        code = Counter(_SASS.findall(_tool("nvdisasm", "-c", "-ndf", str(cubin))))
    registers, stack, local = (int(n) for n in re.findall(r"\b(?:REG|STACK|LOCAL):(\d+)", usage))
    copies = Counter(_bytes_copied(name) for name in _repeated(code, r"LDGSTS\b"))
    return Figures(
        registers=registers,
        stack=stack + local,
        spills=len(list(_repeated(code, r"(?:LDL|STL)\b"))),
        shared=compiled.metadata.shared,
        async_copies=dict(sorted(copies.items())),
        matrix=_matching(code, _NVIDIA_MATRIX),
        instructions=code.total() - code["NOP"],
    )


def _amd(compiled: Any) -> Figures:
    text = compiled.asm["amdgcn"]
    code = Counter(_AMD_CODE.findall(text))

    def told(name: str) -> int:
        found = re.search(rf"^\s+(?:- )?\.{name}:\s+(\d+)", text, re.MULTILINE)
        assert found, f"no {name} in the assembly"
        return int(found.group(1))

    return Figures(
        registers=told("vgpr_count"),
        stack=told("private_segment_fixed_size"),
        spills=told("vgpr_spill_count"),
        shared=compiled.metadata.shared,
        async_copies={},
        matrix=_matching(code, re.compile(r"v_mfma_.*")),
        instructions=code.total(),
    )


def _tool(name: str, *args: str) -> str:
    try:
        path = getattr(knobs.nvidia, name).path
    except RuntimeError as error:
        fix = f"install a wheel of Triton that has it, or set TRITON_{name.upper()}_PATH"
        raise RuntimeError(f"no {name} beside Triton's NVIDIA backend; {fix}") from error
    return subprocess.run([path, *args], capture_output=True, text=True, check=True).stdout


def _repeated(code: Counter[str], pattern: str) -> Iterable[str]:
    return (name for name in code.elements() if re.match(pattern, name))


def _matching(code: Counter[str], pattern: re.Pattern[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(code.items()) if pattern.fullmatch(name)}


def _bytes_copied(name: str) -> str:
    bits = re.search(r"\.(64|128)$", name)
    return str(int(bits.group(1)) // 8 if bits else 4)
