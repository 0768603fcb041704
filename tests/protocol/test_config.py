"""EngineConfig: every setting is honoured or refused."""

import dataclasses

import pytest
import torch
from omegaconf import OmegaConf

from tokenspeed_rl import EngineConfig
from tokenspeed_rl.config import from_overrides
from tokenspeed_rl.errors import ConfigError

CONTRACT = (
    "model_path revision served_model_name dtype compute_dtype device model_impl tp_size max_model_len "
    "max_running_requests page_size max_total_tokens mem_fraction reserve_bytes chunked_prefill_size "
    "enable_prefix_caching attention_backend enable_cuda_graph deterministic seed weight_version "
    "weights_backup skip_tokenizer_init load_format log_level"
)
MISSING_THERE = (
    "log_requests log_requests_level dump_requests_folder dump_requests_threshold watchdog_timeout "
    "expert_distribution_dir"
)


def test_has_every_field_and_good_defaults() -> None:
    """The fields are those that callers were promised, keyword only, and the defaults are valid."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert names == {*CONTRACT.split(), *MISSING_THERE.split()}
    assert from_overrides(None, {}) == EngineConfig()
    with pytest.raises(TypeError):
        EngineConfig("model")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "fp8"),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("compute_dtype", "bfloat16"),
        ("model_impl", "transformers"),
        ("tp_size", 2),
        ("deterministic", True),
        ("weights_backup", "disk"),
        ("attention_backend", "flash"),
        ("load_format", "pickle"),
        ("log_level", "loud"),
        ("expert_distribution_dir", ""),
        ("log_requests", "yes"),
        ("log_requests_level", 3),
        ("dump_requests_folder", None),
        ("dump_requests_threshold", 0),
        *[("watchdog_timeout", seconds) for seconds in (0, -1.0, float("inf"), float("nan"), "soon", True)],
        ("page_size", 0),
        ("page_size", True),
        ("max_model_len", 0),
        ("max_running_requests", -1),
        ("max_total_tokens", 1.5),
        ("chunked_prefill_size", "2048"),
        ("mem_fraction", 0.0),
        ("mem_fraction", 1.01),
        ("mem_fraction", float("nan")),
        ("reserve_bytes", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", None),
        ("enable_prefix_caching", 1),
        ("weight_version", ""),
        ("revision", ""),
        ("model_path", 3),
    ],
)
def test_refuses_by_name(name: str, value: object) -> None:
    """H14: out of range, mistyped or not yet supported: refused, naming field, value and a way out."""
    with pytest.raises(ConfigError) as caught:
        from_overrides(None, {name: value})
    message = str(caught.value)
    assert message.startswith(name) and repr(value) in message and message.endswith(".")
    assert message.count("\n") == 0


def test_reports_all_problems_at_once() -> None:
    """One run shows everything that needs fixing."""
    with pytest.raises(ConfigError) as caught:
        from_overrides(None, {"page_size": 0, "dtype": "fp8", "seed": "x", "deterministic": True})
    assert all(
        name in str(caught.value) for name in ("page_size", "dtype", "seed", "deterministic", "4 settings")
    )


def test_unknown_fields_name_the_nearest() -> None:
    """H14: a typo is refused with the name that was meant."""
    with pytest.raises(ConfigError, match=r"'page_sise' is no field .* 'page_size'"):
        from_overrides(EngineConfig(), {"page_sise": 16})


def test_overrides_leave_the_callers_config_alone() -> None:
    """A config used for two engines means the same to both."""
    mine = EngineConfig(page_size=8)
    made = from_overrides(mine, {"page_size": 32, "seed": 5})
    assert (made.page_size, made.seed, mine) == (32, 5, EngineConfig(page_size=8))
    assert from_overrides(mine, {}) == mine and from_overrides(mine, {}) is not mine
    with pytest.raises(ConfigError, match="must be an EngineConfig"):
        from_overrides({"page_size": 8}, {})


def test_takes_torch_objects() -> None:
    """`dtype=torch.bfloat16` and `device=torch.device(...)` are what trainer code has at hand."""
    made = from_overrides(None, {"dtype": torch.bfloat16, "device": torch.device("cuda", 1)})
    assert (made.dtype, made.device) == ("bfloat16", "cuda:1")
    with pytest.raises(ConfigError, match="dtype"):
        from_overrides(None, {"dtype": torch.int8})


def test_omegaconf_structures_it() -> None:
    """H14: recipes can put the engine's settings into YAML, typed, with unknown keys refused."""
    structured = OmegaConf.structured(EngineConfig)
    merged = OmegaConf.merge(structured, {"max_model_len": 512, "mem_fraction": "0.25"})
    assert OmegaConf.to_object(merged) == EngineConfig(max_model_len=512, mem_fraction=0.25)
    with pytest.raises(Exception, match="page_sise"):
        OmegaConf.merge(structured, {"page_sise": 1})
