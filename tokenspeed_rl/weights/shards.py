"""A checkpoint's safetensors files: which there are, and what their headers promise, checked first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tokenspeed_rl.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PREFIX_BYTES = 8  # little-endian length of the JSON header
_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of one value
_OTHERS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2}
_WIDE = {"I32": 4, "U32": 4, "I64": 8, "U64": 8, "C64": 8}
_ITEM_BYTES = _FLOATS | _OTHERS | _WIDE
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor a shard promises."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard: Path
    start: int = 0
    """Where in the shard its bytes start."""

    @property
    def is_float(self) -> bool:
        """Whether the values are plain floating point, not quantised."""
        return self.dtype in _FLOATS


def entries(directory: Path) -> list[Entry]:
    """Every tensor of the checkpoint in `directory`, shard by shard, in file order.

    Raises:
        ConfigError: no safetensors (pickle files are never read), an index that is malformed or points
            outside the directory, a missing shard, or a file whose header doesn't fit its size.
    """
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    if not (directory / INDEX).is_file():
        raise _no_checkpoint(directory)
    index = directory / INDEX
    weight_map = _weight_map(index)
    found: list[Entry] = []
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).is_file():
            count = sum(1 for owner in weight_map.values() if owner == shard)
            raise ConfigError(
                f"{directory / shard} is missing: {index.name} says it holds {count} tensors",
                fix="Copy or download the whole checkpoint again.",
            )
        found += read_header(directory / shard)
    places = {(entry.name, entry.shard.name) for entry in found}
    absent = [f"{name} in {shard}" for name, shard in weight_map.items() if (name, shard) not in places]
    if absent:
        raise ConfigError(
            f"{index} lists {len(absent)} tensors that are not where it says: {', '.join(absent[:3])}",
            fix="The index and the shards are of different checkpoints: copy both again.",
        )
    return found


def read_header(path: Path) -> list[Entry]:
    """The tensors that the safetensors file `path` holds, in file order; no tensor data is read.

    Raises:
        ConfigError: naming the file: a header larger than the file, one that isn't well-formed, or tensors
            outside of the file (a truncated copy).
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_PREFIX_BYTES), "little")
        if size < _PREFIX_BYTES or length > min(size - _PREFIX_BYTES, _HEADER_LIMIT):
            raise _broken(path, f"a header of {length:,} bytes in a file of {size:,}")
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _broken(path, "a header that is not JSON") from error
    if not isinstance(header, dict):
        raise _broken(path, "a header that is not a JSON object")
    header.pop("__metadata__", None)
    room = size - _PREFIX_BYTES - length
    spans = [(_span(path, name, fields, room), name, fields) for name, fields in header.items()]
    spans.sort(key=lambda item: item[0])
    end = 0
    for (start, stop), name, _ in spans:
        if start != end:
            raise _broken(
                path, f"{name} starting at byte {start:,} of the data, not at {end:,} where the last ends"
            )
        end = stop
    if end != room:
        raise _broken(path, f"{room:,} bytes of data where its tensors take {end:,}")
    begin = _PREFIX_BYTES + length
    return [
        Entry(name, tuple(fields["shape"]), fields["dtype"], path, begin + start)
        for (start, _), name, fields in spans
    ]


def _span(path: Path, name: str, fields: Any, room: int) -> tuple[int, int]:
    """Checked (start, stop) of one tensor within the `room` bytes of data."""
    try:
        dtype, shape, (start, stop) = fields["dtype"], fields["shape"], fields["data_offsets"]
        numbers = [*shape, start, stop]
    except (TypeError, KeyError, ValueError) as error:
        raise _broken(path, f"no dtype, shape and data_offsets for {name}") from error
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise _broken(path, f"shape {shape} and offsets {start}, {stop} for {name}")
    item = _ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item is None:
        raise _broken(path, f"dtype {dtype!r} for {name}")
    if stop > room:
        raise _broken(path, f"{name} ending at byte {stop:,} of {room:,}: the file is truncated")
    if stop - start != prod(shape) * item:
        raise _broken(path, f"{stop - start:,} bytes for {name}, {dtype} {shape}")
    return start, stop


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        pairs = dict(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{index} is no index of a safetensors checkpoint",
            fix="It must be JSON with a 'weight_map' object.",
        ) from error
    for name, shard in pairs.items():
        if not isinstance(shard, str) or not _is_plain(shard):
            raise ConfigError(
                f"{index} places {name} in a file that may not be read",
                got=shard,
                fix="Shards are *.safetensors files beside the index, named without '/', '\\' or '..'.",
            )
    return pairs


def _is_plain(shard: str) -> bool:
    return shard.endswith(".safetensors") and not any(part in shard for part in ("/", "\\", "..", "\0"))


def _broken(path: Path, found: str) -> ConfigError:
    return ConfigError(
        f"{path} is no intact safetensors file: {found}", fix="Copy or download the file again."
    )


def _no_checkpoint(directory: Path) -> ConfigError:
    names = sorted(path.name for path in directory.iterdir())
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if pickled:
        return ConfigError(
            f"{directory} has weights in pickle files only, which are never read: {', '.join(pickled[:3])}",
            fix="Save it as safetensors: AutoModelForCausalLM.from_pretrained(path).save_pretrained(path).",
        )
    return ConfigError(
        f"{directory} holds neither {SINGLE} nor {INDEX}",
        got=names[:20],
        fix="Point to a directory that save_pretrained wrote, or use load_format='dummy' for random weights.",
    )
