"""The project as it is installed."""

import configparser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tokenspeed_rl

ROOT = Path(__file__).parents[2]
SHIPPED = (
    "tokenspeed_rl",
    "configs",
    "recipes",
    "kernels",
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


def options() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def python(*arguments: str, cwd: Path = ROOT, path: Path | None = None) -> str:
    """What a fresh interpreter prints, in folder `cwd`, with `path` in front of the installed packages."""
    env = os.environ if path is None else {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_package_list_equals_the_tree() -> None:
    """Nothing is left out of the wheel: every package of the tree is listed, and nothing else."""
    listed = options()["options"]["packages"].split()
    folders = dict(line.split(" = ") for line in options()["options"]["package_dir"].strip().splitlines())
    found = {
        ".".join((package, *path.parent.relative_to(ROOT / folder).parts))
        for package, folder in folders.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(found)
    modules = {p.parent for folder in folders.values() for p in (ROOT / folder).rglob("*.py")}
    assert not [m for m in modules if not (m / "__init__.py").exists()]


def test_kernels_folder_is_no_package() -> None:
    """Hugging Face ships a package named `kernels` that transformers imports; ours must not shadow it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_config_file_is_shipped() -> None:
    """H14: every YAML file of the tree is package data, whatever folder it is in."""
    patterns = [p.strip() for p in options()["options.package_data"]["tokenspeed_rl.configs"].split(",")]
    shipped = {path for pattern in patterns for path in (ROOT / "configs").glob(pattern)}
    assert shipped == {path for path in (ROOT / "configs").rglob("*") if path.suffix in (".yaml", ".yml")}


def test_versions_agree() -> None:
    """`tokenspeed_rl.__version__`, the installed metadata and the changelog name one version."""
    changelog = re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert tokenspeed_rl.__version__ == importlib.metadata.version("tokenspeed_rl") == changelog[0]


def test_public_names_load() -> None:
    """Every name in `__all__` is there, `dir` shows it, and an unknown one is an AttributeError."""
    assert set(tokenspeed_rl.__all__) <= set(dir(tokenspeed_rl))
    assert all(getattr(tokenspeed_rl, name) is not None for name in tokenspeed_rl.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tokenspeed_rl.no_such_name


def test_import_is_light() -> None:
    """Package, config, errors and structs load without torch, everything without the trainer's libraries."""
    code = """
import sys, tokenspeed_rl
from tokenspeed_rl import EngineClient, EngineConfig, SamplingParams, errors, requests
assert not {"torch", "transformers", "hydra", "deepspeed"} & set(sys.modules)
from tokenspeed_rl import *
trainers = {"hydra", "omegaconf", "deepspeed", "matplotlib", "reasoning_gym"}
print(sorted(trainers & set(sys.modules)))
"""
    assert python("-c", code) == "[]\n"


def test_import_changes_nothing_in_the_process() -> None:
    """F14, G1: import leaves RNGs, environment, threads, dtype, grad mode, logging and signals alone."""
    code = """
import logging, os, random, signal, threading
import numpy, torch, transformers
def state():
    return (
        dict(os.environ), threading.enumerate(), [signal.getsignal(s) for s in signal.valid_signals()],
        random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist(),
        torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
        logging.root.level, list(logging.root.handlers),
    )
before = state()
from tokenspeed_rl import *
import tokenspeed_rl.rl
print(state() == before)
"""
    assert python("-c", code) == "True\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the tree, built in a copy of it."""
    copy = tmp_path_factory.mktemp("tree")
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    python("-c", "from setuptools import build_meta; build_meta.build_wheel('dist')", cwd=copy)
    [path] = (copy / "dist").glob("*.whl")
    return path


def test_wheel_holds_two_packages_and_their_data(wheel: Path) -> None:
    """site-packages gains exactly `tokenspeed_rl` and `tokenspeed_rl_kernels`, on any platform."""
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [top] = [name for name in names if name.endswith("top_level.txt")]
        assert archive.read(top).decode().split() == ["tokenspeed_rl", "tokenspeed_rl_kernels"]
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"tokenspeed_rl", "tokenspeed_rl_kernels"}
    in_tree = {
        f"tokenspeed_rl/configs/{p.relative_to(ROOT / 'configs')}" for p in (ROOT / "configs").rglob("*.yaml")
    }
    assert in_tree | {"tokenspeed_rl/py.typed", "tokenspeed_rl/recipes/ppo.py"} <= names


def test_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    """H14: without a checkout `python -m` finds recipes and their configs, and `env` prints its table."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    where = "import tokenspeed_rl.recipes as r, tokenspeed_rl_kernels as k; print(r.__file__, k.__file__)"
    assert python("-c", where, cwd=tmp_path, path=site).count(str(site)) == 2
    job = python("-m", "tokenspeed_rl.recipes.ppo", "--cfg", "job", cwd=tmp_path, path=site)
    assert re.search(r"^seed: 0$", job, re.M)
    assert tokenspeed_rl.__version__ in python("-m", "tokenspeed_rl", "env", cwd=tmp_path, path=site)
