"""Send a trainer's new weights to an engine in another process:

torchrun --nproc_per_node 2 recipes/weight_sync.py
"""

import logging

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from tokenspeed_rl import Engine
from tokenspeed_rl.weights import WeightsSender

HOST = "127.0.0.1"  # the trainer's address, as the engines reach it
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, eos_token_id=None
)
PROMPT, NEW_TOKENS = [5, 6, 7], 12


def train() -> None:
    """Rank 0: a model whose weights the engine hasn't got, and what transformers generates with them."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(CONFIG)
    with WeightsSender(HOST, 0, world_size=2, backend="gloo") as sender:
        dist.broadcast(torch.tensor([sender.master_port]), src=0)
        sender.send(model.named_parameters())
    greedy = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False)
    dist.broadcast(greedy[0, len(PROMPT) :], src=0)


def roll_out() -> None:
    """Rank 1: an engine with weights of its own, until the update."""
    dist.broadcast(port := torch.zeros(1, dtype=torch.int64), src=0)
    with Engine(CONFIG) as engine:
        engine.init_weights_update_group(
            master_address=HOST, master_port=port.item(), rank_offset=1, world_size=2, backend="gloo"
        )
        greedy = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
        before = engine.generate(input_ids=PROMPT, sampling_params=greedy)["output_ids"]
        named = dict(engine.named_parameters())
        engine.update_weights_from_distributed(
            names=list(named),
            dtype_names=["float32"] * len(named),
            shapes=[tensor.shape for tensor in named.values()],
            load_format="flattened_bucket",
        )
        after = engine.generate(input_ids=PROMPT, sampling_params=greedy)["output_ids"]
    dist.broadcast(expected := torch.zeros(NEW_TOKENS, dtype=torch.int64), src=0)
    logging.info("before %s\nafter  %s\nas the trainer's: %s", before, after, after == expected.tolist())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    train() if dist.get_rank() == 0 else roll_out()
    dist.destroy_process_group()
