"""The tool itself: what it reads out of machine code, what it refuses."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from tokenspeed_rl_kernels.aot import figures, specs
from tokenspeed_rl_kernels.aot.__main__ import main
from tokenspeed_rl_kernels.aot.compilation import compile_spec
from tokenspeed_rl_kernels.aot.limits import faults
from tokenspeed_rl_kernels.gpu.kernel import TYPES, Build, Spec


@triton.jit
def product_kernel(a, b, c, inner, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c [M, N] of a [M, inner] and b [N, inner]."""
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[:, None], tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, inner, K):
        left = tl.load(a + m * inner + start + k)
        total = tl.dot(left, tl.load(b + n * inner + start + k).T, total)
    tl.store(c + m * N + tl.arange(0, N), total)


def product(dtype=torch.bfloat16, rows=16, columns=64, aligned=True, **build):
    """A pipelined product, which wants matrix instructions and asynchronous copies."""
    return Spec(
        name="product",
        kernel=product_kernel,
        types={"a": f"*{TYPES[dtype]}", "b": f"*{TYPES[dtype]}", "c": "*fp32", "inner": "i32"},
        aligned=("a", "b", "c", "inner") if aligned else (),
        build=Build(constants={"M": rows, "N": columns, "K": 64}, **build),
        wants_mma=True,
        wants_async=True,
    )


def found(spec, arch="sm_90"):
    made = figures.figures_of(compile_spec(spec, arch))
    return made, " ".join(faults(spec, arch, made))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.bfloat16, "HMMA.16816.F32.BF16"), (torch.float16, "HMMA.16816.F32")]
)
def test_reads_copies_and_matrix_instructions(arch, dtype, kind):
    """Of a product: its kind of matrix instruction, its copies of 16 bytes, shared memory for its stages."""
    made, wrong = found(product(dtype), arch)
    assert not wrong
    assert set(made.matrix) == {kind} and set(made.async_copies) == {"16"}
    assert made.shared >= 2 * (16 + 64) * 64 * 2 and 0 < made.registers < made.instructions


def test_reads_amd():
    """Matrix instructions, registers and shared memory, from the assembly's text."""
    made, wrong = found(product(), "gfx942")
    assert not wrong and all(kind.startswith("v_mfma_") for kind in made.matrix)
    assert made.matrix and made.registers > 16 and made.instructions > 100 and made.shared > 0


def test_finds_what_breaks_a_limit():
    """Each limit can be broken: unknown alignment, 64 rows on sm_90, TF32, too much in too few registers."""
    assert "nothing copied asynchronously by 16 bytes" in found(product(aligned=False))[1]
    assert "of another kind: ['HGMMA" in found(product(rows=64))[1]
    assert not found(replace(product(rows=64), may_wgmma=True))[1]
    assert "of another kind: ['HMMA.1688.F32.TF32']" in found(product(torch.float32))[1]
    assert "unwanted matrix instructions" in found(replace(product(), wants_mma=False))[1]
    made, wrong = found(product(rows=64, columns=128, num_warps=1, num_stages=6), "sm_80")
    assert made.registers == 255 and "255 registers, more than 128" in wrong
    assert made.stack > 0 and made.spills > 0 and "bytes of stack" in wrong
    assert "bytes of shared memory, more than" in wrong


def test_misfits_are_refused():
    """An unknown architecture; a spec that lacks an argument of its kernel, or has one too many."""
    with pytest.raises(ValueError, match="unknown architecture: got 'sm_1'"):
        compile_spec(product(), "sm_1")
    types = dict.fromkeys(("a", "b", "c"), "*bf16") | {"outer": "i32"}
    with pytest.raises(ValueError, match=r"misfits its kernel: got \['inner', 'outer'\]"):
        compile_spec(replace(product(), types=types), "sm_90")


def test_table_and_exit_status(monkeypatch, capsys, tmp_path):
    """A row per kernel and what is wrong with it below; 0 only if nothing is; figures as JSON."""
    good, bad = replace(product(), name="good product"), replace(product(aligned=False), name="bad product")
    monkeypatch.setattr(
        "tokenspeed_rl_kernels.aot.__main__.all_specs", lambda: {s.name: s for s in (good, bad)}
    )

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["aot", "--arch", "sm_90", *arguments])
        return main(), capsys.readouterr().out.splitlines()

    status, lines = run("--kernel", "good", "--json", str(tmp_path / "golden.json"))
    assert status == 0 and len(lines) == 3 and lines[2].startswith("good product")
    assert '"good product": {"registers":' in (tmp_path / "golden.json").read_text()
    status, lines = run()
    assert status == 1 and lines[4].startswith("  ^ nothing copied")
    with pytest.raises(SystemExit):
        run("--kernel", "no such kernel")
    assert "no spec has 'no such kernel' in its name" in capsys.readouterr().err


def test_interpreted_kernels_are_refused(monkeypatch, capsys):
    """Kernels that Triton was told to interpret can't be compiled: said so, instead of a failure far away."""
    monkeypatch.setattr(specs, "INTERPRETED", True)
    monkeypatch.setattr(sys, "argv", ["aot"])
    with pytest.raises(SystemExit):
        main()
    assert "TRITON_INTERPRET=1 is set: nothing can be compiled" in capsys.readouterr().err


def test_missing_tools_are_named(monkeypatch):
    """Without NVIDIA's tools beside Triton: which is missing, and what to do."""

    class Bare:
        def __getattr__(self, name):
            raise RuntimeError(f"Cannot find {name}")

    compiled = compile_spec(product(), "sm_90")
    monkeypatch.setattr(figures, "knobs", SimpleNamespace(nvidia=Bare()))
    with pytest.raises(RuntimeError, match="no cuobjdump beside Triton's NVIDIA backend; install"):
        figures.figures_of(compiled)
