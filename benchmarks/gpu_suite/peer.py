"""transformers' continuous batching, which is what `generate_batch` runs, with a length for each request."""

import dataclasses
import time
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config

from gpu_suite.machine import Machine


class Peer:
    """A model that serves requests as transformers does, with CUDA graphs.

    `generate_batch` has one `max_new_tokens` for all; its manager, used here as it uses it, takes one each.

    Raises:
        ImportError: this transformers has no such thing.
    """

    def __init__(self, machine: Machine, config: Qwen2Config, until: float) -> None:
        """`until`: on `time.monotonic`, when a run gives up."""
        from transformers import ContinuousBatchingConfig

        self._until = until
        self._settings = {"use_cuda_graph": True, "seed": 0, "return_logprobs": True}
        if machine.dry:
            self._settings |= {"num_blocks": 64, "max_batch_tokens": 256}
        self.attention = "flash_attention_2"
        """How it attends."""
        if not (machine.cuda and find_spec("flash_attn")):
            # The package isn't there, and nothing must be fetched in its place.
            names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
            self.attention = "sdpa" if "auto_switch_to_flash" in names else "paged|sdpa"
            self._settings |= {"auto_switch_to_flash": False} if self.attention == "sdpa" else {}
        with torch.device(machine.device):
            self._model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=self.attention
            ).eval()

    def weights(self) -> dict[str, Tensor]:
        """By transformers' names."""
        return dict(self._model.named_parameters())

    def run(self, prompts: list[list[int]], lengths: list[int]) -> list[float]:
        """Seconds after which each request had its tokens.

        Begin and end of the session, and the graphs that it captures first, are not in them.
        """
        from transformers import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        longest = max(lengths)
        sampling = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, max_new_tokens=longest)
        hints = WorkloadHints(
            max_prompt_length=max(map(len, prompts)),
            max_generated_length=longest,
            num_requests=len(prompts),
        )
        with self._model.continuous_batching_context_manager(
            generation_config=sampling,
            continuous_batching_config=ContinuousBatchingConfig(**self._settings),  # written to
            workload_hints=hints,
        ) as manager:
            try:
                return self._serve(manager, prompts, lengths)
            except BaseException:
                manager.stop(block=True, timeout=5, hard_stop=True)  # else it runs to the end
                raise

    def _serve(self, manager: Any, prompts: list[list[int]], lengths: list[int]) -> list[float]:
        began, ends = time.perf_counter(), dict[str, float]()
        asked = {
            manager.add_request(prompt, max_new_tokens=length): length
            for prompt, length in zip(prompts, lengths, strict=True)
        }
        while len(ends) < len(asked):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None or len(result.generated_tokens) != asked[result.request_id]:
                    raise RuntimeError(f"{result.request_id}: {result.error or 'another length than asked'}")
                ends[result.request_id] = time.perf_counter() - began
            elif result is None and not manager.is_running():
                raise RuntimeError("its thread has ended")
            if time.monotonic() > self._until:
                raise TimeoutError("its time was up")
        return list(ends.values())
