"""Runs the sections one after another, and keeps what they find."""

import argparse
import json
import logging
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from common import table

from gpu_suite.machine import Machine

Found = dict[str, Any]
BUDGETS = {
    "bandwidth": 10,
    "correct": 120,
    "graphs": 50,
    "steps": 70,
    "ops": 60,
    "train": 40,
    "engine": 130,
}
"""Sections in order, and how many seconds each may take: they look at the clock themselves.

Kernels are compiled where they are met first, most of them in `correct`, and kept on disk: a section that ran
out of time is done sooner at `--resume`.
"""
MINUTES = 8.0
"""Of the whole run."""


@dataclass(slots=True)
class Record:
    """The file that results are kept in: written anew, whole, after each section."""

    path: Path
    sections: dict[str, Found]
    machine: Found

    @classmethod
    def open(cls, folder: Path, machine: Found, *, resume: bool) -> "Record":
        """`resume`: go on with what is there, if it is of this machine and these versions."""
        path = folder / "results.json"
        folder.mkdir(parents=True, exist_ok=True)
        kept = json.loads(path.read_text()) if resume and path.exists() else {}
        return cls(path, kept["sections"] if kept.get("machine") == machine else {}, machine)

    def keep(self, name: str, section: Found) -> None:
        """Add a section's."""
        self.sections[name] = section
        text = json.dumps({"machine": self.machine, "sections": self.sections}, indent=2)
        partial = self.path.with_suffix(".partial")
        partial.write_text(text + "\n")
        partial.replace(self.path)

    def done(self, name: str) -> bool:
        """Whether the section ended well before."""
        return self.sections.get(name, {}).get("status") == "ok"


def main(doc: str) -> int:
    """Run what is asked for; 1 where something failed."""
    options = _arguments(doc)
    device = torch.device("cpu" if options.dry_run else "cuda")
    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no GPU: pass --dry-run to try the script on the CPU")
        return 2
    torch.manual_seed(0)
    machine = Machine(device=device, dry=options.dry_run)
    record = Record.open(options.out, describe(device), resume=options.resume)
    end = time.monotonic() + 60 * options.minutes
    for name in options.only[options.only.index(options.after) + 1 if options.after else 0 :]:
        if record.done(name):
            continue
        section = _run(name, machine, record.sections.get("bandwidth", {}), end - time.monotonic())
        record.keep(name, section)
        print(f"{name}: {section['status']} after {section['seconds']:.1f} s", flush=True)
        if section["status"] == "failed" and not machine.alive():
            _go_on_elsewhere(name, (end - time.monotonic()) / 60)
    print(_summary(record, options.only))
    return int(not all(record.done(name) for name in options.only))


class Said(logging.Handler):
    """What engines say while a section runs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.messages.append(record.getMessage())


def _run(name: str, machine: Machine, bandwidth: Found, left: float) -> Found:
    """One section, whatever happens in it; `bandwidth`: the section of this name."""
    budget = min(BUDGETS[name], left)
    if budget < BUDGETS[name] / 2:
        return {"status": "no time", "seconds": 0.0, "found": {}}
    measured = bandwidth.get("found", {})
    machine.bandwidth = measured.get("bytes_per_second", machine.bandwidth)
    machine.launch = measured.get("launch_seconds", machine.launch)
    began, found = time.monotonic(), Found()
    machine.deadline = began + budget
    section: Found = {"status": "ok", "found": found}
    said = Said()
    found["warnings"] = said.messages
    logging.getLogger("tokenspeed_rl").addHandler(said)
    try:
        run: Callable[[Machine, Found], None] = import_module(f"gpu_suite.{name}").run
        run(machine, found)
    except Exception:
        section |= {"status": "failed", "error": traceback.format_exc()}
        print(section["error"], flush=True)
    finally:
        logging.getLogger("tokenspeed_rl").removeHandler(said)
    return {**section, "seconds": time.monotonic() - began, "budget": budget}


def _go_on_elsewhere(name: str, minutes: float) -> None:
    """Behind this section, in a process whose device is not lost: this one becomes it."""
    print("the device is lost to this process: going on in a new one", flush=True)
    more = ["--resume", f"--after={name}", f"--minutes={minutes}"]
    os.execv(sys.executable, [sys.executable, *sys.argv, *more])


def describe(device: torch.device) -> Found:
    """Hardware and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": name,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "triton", "transformers")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _summary(record: Record, names: list[str]) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in record.machine.items())
    lines = [
        [name, section["status"], f"{section['seconds']:.1f}", headline]
        for name, section in record.sections.items()
        if name in names
        for headline in section["found"].get("headlines") or ["-"]
    ]
    width = max(len(line[3]) for line in lines)
    lines = [[*line[:3], line[3].ljust(width)] for line in lines]
    return f"\n{machine}\n" + table(["section", "status", "seconds", "found".ljust(width)], lines)


def _arguments(doc: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json")
    parser.add_argument("--only", type=_sections, default=list(BUDGETS), help="sections, with commas")
    parser.add_argument("--resume", action="store_true", help="leave out sections that are done there")
    parser.add_argument("--after", choices=BUDGETS, help="begin behind this section")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the whole run")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, in toy shapes")
    return parser.parse_args()


def _sections(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in BUDGETS]:
        raise argparse.ArgumentTypeError(f"no such sections: {unknown}; there are {', '.join(BUDGETS)}")
    return names
