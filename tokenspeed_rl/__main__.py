"""python -m tokenspeed_rl {env,generate,plot,replay}: the machine, text out of a model, a run's curves, and
dumped requests once more."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tokenspeed_rl import __version__
from tokenspeed_rl.errors import ConfigError, TokenSpeedError

_LIBRARIES = (
    "torch", "transformers", "triton", "safetensors", "numpy", "accelerate", "deepspeed", "hydra-core",
    "reasoning-gym",
)  # fmt: skip
_GIB = 2**30


def env() -> None:
    """Print versions, devices, threads and memory as one table."""
    rows = [
        ("tokenspeed_rl", __version__),
        ("python", platform.python_version()),
        ("system", platform.platform()),
    ]
    rows += [(name, _version(name)) for name in _LIBRARIES]
    rows += [*_machine(), *_devices()]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def generate(arguments: argparse.Namespace) -> None:
    """Print each prompt with its completion, and tokens per second."""
    from tokenspeed_rl import Engine, SamplingParams

    params = SamplingParams(
        max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature, seed=arguments.seed
    )
    with Engine(arguments.model, dtype=arguments.dtype, device=arguments.device) as engine:
        start = time.perf_counter()
        results = engine.generate(arguments.prompt, params)
        seconds = time.perf_counter() - start
    for prompt, result in zip(arguments.prompt, results, strict=True):
        print(f"{prompt}{result['text']}\n")
    tokens = sum(result["meta_info"]["completion_tokens"] for result in results)
    print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s", file=sys.stderr)


def plot(arguments: argparse.Namespace) -> None:
    """Draw curve.png of a run, as the recipes do at its end, out of its metrics.jsonl; print the path."""
    from tokenspeed_rl.tracking import plot_curves

    folder: Path = arguments.run
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        raise ConfigError(
            "the folder must hold the metrics.jsonl of a run", got=str(folder), fix="Try runs/<name>."
        )
    history = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    logged = dict.fromkeys(name for row in history for name in row if name != "step")
    plot_curves(history, arguments.metrics or list(logged), folder / "curve.png", title=folder.resolve().name)
    print(folder / "curve.png")


def replay(arguments: argparse.Namespace) -> int:
    """Run the requests of a dump again and print what differs; 0 if nothing does, else 1."""
    from tokenspeed_rl import Engine
    from tokenspeed_rl.replay import compare, read_dump, replay, report

    every = read_dump(arguments.dump)[: arguments.limit]
    samples = [sample for sample in every if sample["meta_info"].get("lora") is None]
    if len(samples) < len(every):
        print(
            f"{len(every) - len(samples)} of {len(every)} samples are of adapters, which a directory lacks: "
            "tokenspeed_rl.replay.replay(engine, samples) runs them on an engine that shares theirs"
        )
    with Engine(arguments.model, dtype=arguments.dtype, device=arguments.device) as engine:
        differences = [compare(*pair) for pair in zip(samples, replay(engine, samples), strict=True)]
    print(report(differences, arguments.tolerance))
    return 0 if differences and all(each.within(arguments.tolerance) for each in differences) else 1


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> Iterator[tuple[str, str]]:
    import torch

    yield "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    settings = {
        name: os.environ[name] for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in os.environ
    }
    yield "openmp", ", ".join(f"{name}={value}" for name, value in settings.items()) or "defaults"
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = [line.split() for line in meminfo.read_text().splitlines()]
        kib = {words[0]: int(words[1]) for words in lines}
        free, total = kib["MemAvailable:"] * 1024 / _GIB, kib["MemTotal:"] * 1024 / _GIB
        yield "memory", f"{free:.1f} of {total:.1f} GiB available"


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield f"cuda:{index}", f"{name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    if not torch.cuda.is_available():
        yield "cuda", "none: the engine runs on the CPU"


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dtype", default="auto", help="of the weights; default: auto, the model's own")
    command.add_argument("--device", default="auto", help="default: auto, CUDA where there is one")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tokenspeed_rl", description="An inference engine for trainers."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="versions, devices, threads, memory")
    command = commands.add_parser("generate", help="complete prompts with a model")
    command.add_argument("model", help="Hugging Face directory or hub id")
    command.add_argument("prompt", nargs="+", help="texts to complete, in one batch")
    command.add_argument("--max-new-tokens", type=int, default=64, help="of each; default: 64")
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    command.add_argument("--seed", type=int, help="of the draws; default: the engine's")
    _add_settings(command)
    command = commands.add_parser("plot", help="draw curve.png out of a run's metrics.jsonl")
    command.add_argument("run", type=Path, help="folder of the run")
    command.add_argument("--metrics", nargs="+", help="which ones; all by default")
    command = commands.add_parser(
        "replay",
        help="run dumped requests again and compare",
        epilog="Exit status: 0 if all are the same, 1 if not, 2 if refused.",
    )
    command.add_argument("dump", type=Path, help="a file of dump_requests_folder, or the folder")
    command.add_argument("--model", required=True, help="Hugging Face directory or hub id")
    command.add_argument("--limit", type=_positive, help="only so many samples, from the first")
    command.add_argument("--tolerance", type=float, default=1e-3, help="of a logprob; default: 0.001")
    _add_settings(command)
    return parser


def main() -> int:
    """Run one command; the exit status is 0, 1 for a replay that differs, or 2 for what is refused."""
    arguments = _parser().parse_args()
    try:
        if arguments.command == "env":
            env()
        elif arguments.command == "generate":
            generate(arguments)
        elif arguments.command == "replay":
            return replay(arguments)
        else:
            plot(arguments)
    except TokenSpeedError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
