"""A kernel compiled for a GPU that needn't be there."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_rl_kernels.gpu.kernel import Spec

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""Triton's targets, by the name of the architecture: A100, H100 and H200, MI300."""


def compile_spec(spec: Spec, arch: str) -> Any:
    """Triton's compiled kernel: its code of all stages in ``asm``, other facts in ``metadata``.

    Raises:
        ValueError: an unknown architecture, or the spec's arguments aren't the kernel's.
    """
    if arch not in TARGETS:
        raise ValueError(f"unknown architecture: got {arch!r}; pass one of {', '.join(TARGETS)}")
    names, build = spec.kernel.arg_names, spec.build
    given = spec.types.keys() | build.constants.keys()
    if odd := sorted((given ^ set(names)) | (set(spec.aligned) - given)):
        raise ValueError(
            f"spec {spec.name!r} misfits its kernel: got {odd} on one side only; name all of {names}"
        )
    source = ASTSource(
        fn=spec.kernel,
        signature={name: spec.types.get(name, "constexpr") for name in names},
        constexprs=build.constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in spec.aligned},
    )
    options = {
        "num_warps": build.num_warps,
        "num_stages": build.num_stages,
        "enable_fp_fusion": build.fp_fusion,
    }
    return triton.compile(source, target=TARGETS[arch], options=options)
