"""The engine's weights: where they lie, how they get there, which version they are, whose memory it is."""

from tokenspeed_rl.weights.bucket import FlattenedBucket, buckets, flatten
from tokenspeed_rl.weights.checkpoint import load_checkpoint, randomise, read_checkpoint
from tokenspeed_rl.weights.difference import differing_scalings, differing_weights
from tokenspeed_rl.weights.digest import checksum
from tokenspeed_rl.weights.incoming import Incoming, check_update, read_tensors
from tokenspeed_rl.weights.mapping import Part, Slot
from tokenspeed_rl.weights.model_files import (
    eos_token_ids,
    find_model,
    load_tokenizer,
    read_config,
    resolve_dtype,
)
from tokenspeed_rl.weights.receipt import Receipt
from tokenspeed_rl.weights.sharing import SharedWeights, share
from tokenspeed_rl.weights.store import WeightStore
from tokenspeed_rl.weights.structure import unwrap
from tokenspeed_rl.weights.transport.sender import WeightsSender
from tokenspeed_rl.weights.update import WeightUpdate
from tokenspeed_rl.weights.watch import watch

__all__ = [
    "FlattenedBucket",
    "Incoming",
    "Part",
    "Receipt",
    "SharedWeights",
    "Slot",
    "WeightStore",
    "WeightUpdate",
    "WeightsSender",
    "buckets",
    "check_update",
    "checksum",
    "differing_scalings",
    "differing_weights",
    "eos_token_ids",
    "find_model",
    "flatten",
    "load_checkpoint",
    "load_tokenizer",
    "randomise",
    "read_checkpoint",
    "read_config",
    "read_tensors",
    "resolve_dtype",
    "share",
    "unwrap",
    "watch",
]
