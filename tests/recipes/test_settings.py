"""Settings: every YAML file works, and what is wrong with one is said in one line."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import Qwen3Config

from tokenspeed_rl.recipes.ppo import PPORecipe
from tokenspeed_rl.recipes.settings import complaint, one_line, parse
from tokenspeed_rl.recipes.sft import SFTRecipe

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
RECIPES = {"ppo": PPORecipe, "sft": SFTRecipe, "control": SFTRecipe}
SHARED = {"run_folder"}
OPTIONS = sorted(f"{path.parent.name}={path.stem}" for path in CONFIGS.glob("*/*.yaml"))

Composer = Callable[..., DictConfig]


def test_every_config_file_is_one_of_those_tested_here() -> None:
    """H14: no YAML file goes untested."""
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == RECIPES.keys() | SHARED
    assert OPTIONS


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_compose(composer: Composer, name: str) -> None:
    """H14: every recipe's YAML gives a whole, checked object."""
    cfg = parse(composer(name), RECIPES[name])
    assert cfg.name == f"{name}-tiny-seed0"
    assert cfg.folder == f"runs/{cfg.name}"


@pytest.mark.parametrize("choice", OPTIONS)
def test_options_compose(composer: Composer, tmp_path: Path, choice: str) -> None:
    """H14: every option of every group gives a whole, checked object."""
    rewards = Qwen3Config(architectures=["Qwen3ForSequenceClassification"], num_labels=1)
    rewards.save_pretrained(tmp_path)
    overrides = [choice.replace("preset", "model")]  # a preset is chosen by its model
    if choice.endswith("=pretrained"):
        overrides.append(f"model.path={tmp_path}")
    if choice == "reward=model":
        overrides.append(f"reward.path={tmp_path}")
    assert isinstance(parse(composer("ppo", *overrides), PPORecipe), PPORecipe)


@pytest.mark.parametrize("choice", [choice for choice in OPTIONS if not choice.startswith("preset")])
def test_yaml_holds_differences_only(choice: str) -> None:
    """Every setting has one home: a YAML file doesn't repeat what its dataclass says."""
    group, option = choice.split("=")
    values = yaml.safe_load((CONFIGS / group / f"{option}.yaml").read_text())
    (schema,) = values.pop("defaults")
    defaults = OmegaConf.to_container(ConfigStore.instance().load(f"{group}/{schema}.yaml").node)
    assert isinstance(defaults, dict)
    assert not [key for key, value in values.items() if value == defaults[key]]


WRONG = [
    ("sed=1", "sed"),
    ("trainer.stepz=1", "trainer.stepz"),
    ("+trainer.stepz=1", "trainer.stepz"),
    ("+model.layers=1", "model.layers"),
    ("seed=one", "seed"),
    ("trainer.steps=1.5", "trainer.steps"),
    ("rollout.mask_truncated=maybe", "rollout.mask_truncated"),
    ("name=[a]", "name"),
    ("seed=null", "seed"),
    ("seed=-1", "seed"),
    ("trainer.lr=0", "trainer.lr"),
    ("trainer.lr=nan", "trainer.lr"),
    ("trainer.lr=inf", "trainer.lr"),
    ("algorithm.clip_low=1", "algorithm.clip_low"),
    ("algorithm.kl_kind=k4", "algorithm.kl_kind"),
    ("imitation.wrong=1.2", "imitation.wrong"),
    ("model.num_heads=3", "model.num_heads"),
    ("model=huge", "model/huge"),
    ("engine.page_size=0", "engine.page_size"),
    ("engine.pages=3", "engine.pages"),
    ("task.dataset=nonsense", "task.dataset"),
    ("task.options.min_word_len=9", "task.dataset=spell_backward with options"),
    ("'task.prompt={wrd}'", "task.prompt"),
    ("'task.wrong_answer={wrd}'", "task.wrong_answer"),
    ("'task.answer=(x'", "task.answer"),
    ("task.answer=x", "task.answer"),
    ("model=pretrained", "model.path"),
    ("reward=model", "reward.path"),
    ("reward=human", "reward/human"),
    ("reward.path=somewhere", "reward.path"),
    ("nonsense", "nonsense"),
]


@pytest.mark.parametrize(("override", "key"), WRONG, ids=[override for override, _ in WRONG])
def test_wrong_settings_are_refused_in_one_line(composer: Composer, override: str, key: str) -> None:
    """H14: unknown key, wrong type, out of range: one line that names the key."""
    quoted = override.strip("'")
    name, _, value = quoted.partition("=")
    with pytest.raises((SystemExit, HydraException, OmegaConfBaseException)) as caught:
        parse(composer("ppo", f"{name}='{value}'" if quoted != override else override), PPORecipe)
    line = str(caught.value) if isinstance(caught.value, SystemExit) else one_line(caught.value)
    assert key in line
    assert "\n" not in line and len(line) < 400


TWO_RUNS = """
import runpy, sys
recipe = sys.argv[1]
for override in ("sed=1", "trainer.lr=-1"):
    sys.argv[1:] = [override, "model=smollm2", "model.cache=/nonexistent"]
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as end:
        print(end.code, file=sys.stderr)
"""


def test_the_process_ends_with_that_line(tmp_path: Path) -> None:
    """H14: what the user sees is that line alone; no model is built and no metrics are begun."""
    command = [sys.executable, "-c", TWO_RUNS, str(ROOT / "recipes" / "ppo.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "")
    first, second = done.stderr.splitlines()
    assert first == "config error: Key 'sed' not in 'PPORecipe'"
    assert second == "config error: trainer.lr must be above 0.0 (got -1.0)"
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_bounds() -> None:
    """Bounds say what they wanted, include their ends as written, and let None pass."""
    assert complaint(0.0, {"above": 0.0}) == "above 0.0"
    assert complaint(1, {"low": 1, "high": 1}) is None
    assert complaint(2, {"low": 1, "high": 1}) == "at most 1"
    assert complaint(float("nan"), {}) == "finite"
    assert complaint(None, {"low": 1}) is None
    assert complaint("c", {"choices": ("a", "b")}) == "one of a, b"


def test_recipes_shadow_no_library() -> None:
    """A script's folder comes first on the import path, so no file there may have a library's name."""
    code = "import importlib.util, sys; print([n for n in sys.argv[1:] if importlib.util.find_spec(n)])"
    names = [path.stem for path in (ROOT / "recipes").glob("*.py") if path.stem != "__init__"]
    command = [sys.executable, "-I", "-c", code, *names]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip() == "[]"
