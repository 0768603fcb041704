"""Time ops against plain torch.

python -m tokenspeed_rl_kernels.bench [op ...] [--dtype bf16] [--threads 1] [--device cpu]
"""

import argparse
import sys

import torch

from tokenspeed_rl_kernels.bench.subjects import SUBJECTS, Subject, setting
from tokenspeed_rl_kernels.bench.timing import copy_bandwidth, seconds
from tokenspeed_rl_kernels.registry import INTERPRETED

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> int:
    """Print a line per op and shape; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tokenspeed_rl_kernels.bench", description="Time ops against plain torch."
    )
    parser.add_argument("ops", nargs="*", metavar="op", help=f"of {', '.join(SUBJECTS)}; all without it")
    parser.add_argument("--dtype", choices=DTYPES, help="bf16 on a GPU, fp32 on the CPU")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.ops) - SUBJECTS.keys()):
        parser.error(f"no such op: {', '.join(unknown)}; there are {', '.join(SUBJECTS)}")
    if INTERPRETED:
        parser.error("TRITON_INTERPRET=1 is set, and the interpreter's speed tells nothing; unset it")
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    dtype = DTYPES[arguments.dtype or ("bf16" if on_gpu else "fp32")]
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {arguments.threads} threads"
    bandwidth = copy_bandwidth(device) if on_gpu else None
    print(
        f"{where}, {dtype}, torch {torch.__version__}"
        + (f", copy {bandwidth / 1e9:.0f} GB/s" if bandwidth else "")
    )
    place = setting(device, dtype)
    for op in arguments.ops or SUBJECTS:
        print(f"\n{op:44}{'us':>10}{'torch us':>10}{'faster':>8}{'GB/s':>8}{'GFLOP/s':>9}{'of copy':>9}")
        with torch.inference_mode():
            for subject in SUBJECTS[op](place):
                ours, torchs = seconds(subject.ours, subject.torchs, device=device)
                print(_line(subject, ours, torchs, bandwidth), flush=True)
    return 0


def _line(subject: Subject, ours: float, torchs: float, bandwidth: float | None) -> str:
    rate = subject.bytes / ours
    flops = f"{subject.flops / ours / 1e9:9.1f}" if subject.flops else f"{'-':>9}"
    share = f"{rate / bandwidth:9.0%}" if bandwidth else f"{'-':>9}"
    times = f"{ours * 1e6:10.1f}{torchs * 1e6:10.1f}{torchs / ours:7.2f}x"
    return f"  {subject.name:42}{times}{rate / 1e9:8.2f}{flops}{share}"


if __name__ == "__main__":
    sys.exit(main())
