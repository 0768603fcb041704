"""What no kernel may exceed, and what some must have, whatever the version of Triton."""

from tokenspeed_rl_kernels.aot.figures import Figures
from tokenspeed_rl_kernels.gpu.kernel import Spec

REGISTERS = 128
"""Per thread: half of what a thread can have, so that two programs of 8 warps live on a processor."""
SHARED = 100 * 1024
"""Bytes: two programs on an H100, one on an A100."""


def faults(spec: Spec, arch: str, figures: Figures) -> list[str]:
    """What is wrong with a spec's figures, in words; nothing if the list is empty."""
    nvidia = arch.startswith("sm_")
    found = []
    if figures.stack or figures.spills:
        found.append(f"spills: {figures.stack} bytes of stack, {figures.spills} spills")
    if nvidia and figures.registers > REGISTERS:
        found.append(f"{figures.registers} registers, more than {REGISTERS}")
    if figures.shared > SHARED:
        found.append(f"{figures.shared} bytes of shared memory, more than {SHARED}")
    if nvidia and spec.wants_async and "16" not in figures.async_copies:
        found.append(f"nothing copied asynchronously by 16 bytes: {figures.async_copies or 'no copies'}")
    if nvidia and not spec.wants_mma and figures.matrix:  # of float32: TF32, where AMD's are exact
        found.append(f"unwanted matrix instructions: {figures.matrix}")
    if spec.wants_mma and not figures.matrix:
        found.append("no matrix instructions")
    if spec.wants_mma and nvidia and (wrong := [kind for kind in figures.matrix if not _right(spec, kind)]):
        found.append(f"matrix instructions of another kind: {wrong}")
    return found


def _right(spec: Spec, kind: str) -> bool:
    """Of the inputs' dtype, and of 16 rows if it must round like every other of our kernels."""
    wants_bf16 = "*bf16" in spec.types.values()
    shapes = ("HMMA.16816.F32", "HGMMA.64x") if spec.may_wgmma else ("HMMA.16816.F32",)
    return kind.startswith(shapes) and kind.endswith(".BF16") == wants_bf16
