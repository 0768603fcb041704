"""The architecture, enforced: who may import whom."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import tokenspeed_rl

ROOT = Path(__file__).parents[2]
PLACES = {
    "tokenspeed_rl": ROOT / "tokenspeed_rl",
    "tokenspeed_rl.recipes": ROOT / "recipes",
    "tokenspeed_rl.configs": ROOT / "configs",
    "tokenspeed_rl_kernels": ROOT / "kernels" / "tokenspeed_rl_kernels",
}
LAYERS = [
    {"tokenspeed_rl_kernels"},
    {"alias", "config", "sampling_params", "prompts", "requests", "errors", "protocol", "region"},
    {"cache", "memory", "weights", "distributed"},
    {"models", "layers", "lifecycle"},
    {"core"},
    {
        "engine",
        "async_llm",
        "llm",
        "client_base",
        "client_control",
        "client_experts",
        "client_profile",
        "client_sessions",
        "client_state",
        "client_weights",
        "engine_control",
        "engine_experts",
        "engine_profile",
        "engine_scores",
        "engine_sessions",
        "engine_state",
        "engine_weights",
        "explain",
        "explanation",
        "generate_stream",
    },
    {"rl", "integrations", "tracking", "display", "replay"},
    {"recipes", "configs", "__main__"},
]
PUBLIC = tokenspeed_rl._HOMES
LAYER_OF = {unit: height for height, units in enumerate(LAYERS) for unit in units}
ONLY_IN = {
    "hydra": {"recipes", "configs", "__main__"},
    "omegaconf": {"recipes", "configs", "__main__"},
    "deepspeed": {"integrations"},
    "accelerate": {"integrations"},
    "peft": {"integrations"},
    "triton": {"tokenspeed_rl_kernels"},
}
WITHOUT_TORCH = ("core.scheduler", "cache.page_pool", "cache.prefix_cache", "lifecycle.")


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether inside a function) of every import; `from a import b` is both a and a.b."""
    inner = {
        n
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
        for n in ast.walk(f)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from ((f"{node.module}.{alias.name}", node in inner) for alias in node.names)


def unit_of(name: str) -> str:
    """The part of the project that a dotted name, or a public name of the package, belongs to."""
    first, _, rest = name.partition(".")
    inside = rest.partition(".")[0]
    return PUBLIC.get(inside, inside) if first == "tokenspeed_rl" else first


def all_imports() -> Iterator[tuple[str, str, bool]]:
    for package, folder in PLACES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            module = ".".join((package, *parts)).removesuffix(".__init__")
            if module != "tokenspeed_rl":  # its names are lazy, and only type checkers read its imports
                for target, local in imports(ast.parse(path.read_text())):
                    yield module, target, local


def test_imports_go_downward_only() -> None:
    """A reader may understand each layer without those above it; layer 2's packages stand alone."""
    wrong, edges = [], {}
    for module, target, local in all_imports():
        source, aim = unit_of(module), unit_of(target)
        assert source in LAYER_OF, f"{module} has no layer: give it one above"
        if aim not in LAYER_OF or aim == source:
            continue
        edges.setdefault(source, set()).add(aim)
        level = LAYER_OF[source]
        same_layer_ok = level in (1, 5, 6, 7) or (source, aim) == ("models", "layers")
        above = LAYER_OF[aim] > level or (LAYER_OF[aim] == level and not same_layer_ok)
        engine_inside = source == "rl" and aim not in ("protocol", "requests", "sampling_params", "errors")
        dodge = local and source != "__main__"
        if above or engine_inside or dodge:
            wrong.append(f"{module} imports {target}" + " inside a function" * dodge)
    assert not wrong, "\n".join(wrong)
    tuple(graphlib.TopologicalSorter(edges).static_order())  # raises on a cycle


def test_libraries_stay_where_they_belong() -> None:
    """An engine can be had without Hydra, DeepSpeed, Accelerate, PEFT; Triton is asked for in one place."""
    wrong = []
    for module, target, local in all_imports():
        library, unit = target.partition(".")[0], unit_of(module)
        eager = library in ("deepspeed", "accelerate", "peft") and not local
        plain = module.removeprefix("tokenspeed_rl.").startswith(WITHOUT_TORCH) and library == "torch"
        if unit not in ONLY_IN.get(library, {unit}) or eager or plain:
            wrong.append(f"{module} imports {target}")
    assert not wrong, "\n".join(wrong)
