"""A train step with float32 master weights while the engine sleeps, and the engine awake around it."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gpu_suite.machine import Machine
from gpu_suite.models import config, engine, prompts, shapes
from tokenspeed_rl import Engine


def run(machine: Machine, found: dict[str, Any]) -> None:
    """Generate, sleep, train, wake, update, generate: twice, the first time to warm up."""
    name, shape = next(iter(shapes(machine).items()))
    rows, length, tokens = (2, 16, 1 << 12) if machine.dry else (4, 1024, 1 << 20)
    model_config = config(shape)
    with torch.device(machine.device):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=machine.cuda)
    ids = torch.tensor(prompts(rows, length, shape.vocab), device=machine.device)
    with engine(machine, model_config, max_total_tokens=tokens) as made:
        for _ in range(2):
            found |= cycle(machine, made, model, optimizer, ids)
    found["model"], found["rows"], found["length"] = name, rows, length
    found["headlines"] = [
        f"{name}: sleep {found['sleep_seconds'] * 1e3:.0f} ms, train {found['train_seconds'] * 1e3:.0f} ms, "
        f"wake {found['wake_seconds'] * 1e3:.0f} ms, update {found['update_seconds'] * 1e3:.0f} ms; "
        f"peak {found['peak_bytes'] / 1e9:.1f} GB, engine awake {found['engine_bytes'] / 1e9:.1f} GB"
    ]


def cycle(
    machine: Machine, made: Engine, model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor
) -> dict[str, Any]:
    """One step of a trainer's day."""
    generate(made, ids)
    awake = machine.used()
    sleep = machine.seconds(made.release_memory_occupation)
    asleep = machine.used()
    if machine.cuda:
        torch.cuda.reset_peak_memory_stats()
    train = machine.seconds(lambda: train_step(model, optimizer, ids))
    peak = torch.cuda.max_memory_reserved() if machine.cuda else 0
    optimizer.zero_grad(set_to_none=True)
    wake = machine.seconds(made.resume_memory_occupation)
    update = machine.seconds(lambda: made.update_weights_from_tensor(dict(model.named_parameters())))
    first = machine.seconds(lambda: generate(made, ids))
    return {
        "sleep_seconds": sleep,
        "train_seconds": train,
        "wake_seconds": wake,
        "update_seconds": update,
        "generate_seconds": first,
        "engine_bytes": awake - asleep,
        "asleep_bytes": asleep,
        "peak_bytes": peak,
    }


def train_step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    """Next-token loss under autocast to bfloat16; gradients and moments are float32."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()


def generate(made: Engine, ids: torch.Tensor) -> None:
    """A few tokens of each row."""
    params = {"n": 4, "max_new_tokens": 16, "ignore_eos": True}
    outputs = made.generate(input_ids=ids.tolist(), sampling_params=params, return_logprob=True)
    assert all(len(output["output_ids"]) == 16 for output in outputs)
