"""The settings that recipes share, and where Hydra finds them."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

from tokenspeed_rl.recipes.policy import PretrainedModel, SmolLM2, TinyModel
from tokenspeed_rl.recipes.reward import ModelReward, VerifierReward
from tokenspeed_rl.recipes.settings import setting
from tokenspeed_rl.recipes.task import TaskConfig
from tokenspeed_rl.sampling_params import SamplingParams


@dataclass(slots=True, kw_only=True)
class RolloutConfig:
    """What is drawn from the policy in one step."""

    prompts: int = setting(256, low=1)
    samples: int = setting(1, low=1)
    """Samples of each prompt."""
    max_new_tokens: int = setting(8, low=1)
    temperature: float = setting(1.0, above=0.0)
    mask_truncated: bool = False
    """Learn nothing from samples that ran into `max_new_tokens`."""

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(max_new_tokens=self.max_new_tokens, temperature=self.temperature)


@dataclass(slots=True, kw_only=True)
class TrainerConfig:
    """How gradients become steps."""

    steps: int = setting(80, low=1)
    """Rollouts, each followed by `epochs` passes over it."""
    epochs: int = setting(2, low=1)
    minibatch_size: int = setting(128, low=1)
    """Samples per optimiser step."""
    micro_batch_size: int = setting(128, low=1)
    """Samples per forward and backward pass: bounds the memory, doesn't change the result."""
    lr: float = setting(5e-4, above=0.0)
    warmup_steps: int = setting(5, low=1)
    """Steps over which the learning rate rises. It falls to 0 from the first to the last, on top of that."""
    max_grad_norm: float = setting(1.0, above=0.0)

    def lr_factor(self, step: int) -> float:
        """What `lr` is multiplied by in step 0, 1, ..."""
        return min(1.0, (step + 1) / self.warmup_steps) * max(0.0, 1.0 - step / self.steps)


@dataclass(slots=True, kw_only=True)
class EvaluationConfig:
    """How accuracy on the held-out problems is measured: greedily, and at the rollouts' temperature."""

    samples: int = setting(4, low=1)
    """Sampled responses per problem."""
    show_every: int = setting(20, low=1)
    """Steps between looks at what was drawn."""


def register(name: str, schema: type, *, algorithm: type | None = None) -> None:
    """Gives Hydra a recipe's schemas and those of the groups, as `<name>_schema` for YAML files."""
    store = ConfigStore.instance()
    store.store(name=f"{name}_schema", node=schema)
    if algorithm is not None:
        store.store(group="algorithm", name=f"{name}_schema", node=algorithm)
    for group, option, node in GROUPS:
        store.store(group=group, name=f"{option}_schema", node=node)


GROUPS: tuple[tuple[str, str, type], ...] = (
    ("model", "tiny", TinyModel),
    ("model", "smollm2", SmolLM2),
    ("model", "pretrained", PretrainedModel),
    ("reward", "verifier", VerifierReward),
    ("reward", "model", ModelReward),
    ("task", "task", TaskConfig),
    ("rollout", "rollout", RolloutConfig),
    ("trainer", "trainer", TrainerConfig),
)
