"""SamplingParams: how the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenspeed_rl.errors import RequestError, nearest

_MAX_SEED = 2**64 - 1
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


@dataclasses.dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to sample; everything is honoured or refused, and no default comes from the model.

    Construction checks only names; `validate` checks values and returns a normalised copy.
    """

    n: int = 1
    """Samples per prompt, at least 1. They share the prompt's computation and differ from each other."""
    max_new_tokens: int | None = None
    """Most tokens to generate; None: up to the context; 0: only score the prompt. Alias: `max_tokens`."""
    min_new_tokens: int = 0
    """Before so many tokens EOS and stop ids are not drawn, and stop strings do not end the request."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach this sum, in (0, 1]."""
    top_k: int = -1
    """Keep the k most likely tokens; -1 and 0 are off."""
    min_p: float = 0.0
    """Keep tokens at least this likely, as a share of the most likely one's probability, in [0, 1]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per time it was generated."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit if it was generated at all."""
    repetition_penalty: float = 1.0
    """Divides a positive, multiplies a negative logit of each token of prompt and output; 1 is off."""
    stop: str | Sequence[str] | None = None
    """Strings that end the request, also across token borders; they need a tokenizer. Becomes a tuple."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the request, beside the model's EOS ids. Becomes a tuple."""
    ignore_eos: bool = False
    """The model's EOS ids do not end the request; `stop_token_ids` still do."""
    skip_special_tokens: bool = True
    """Leave special tokens out of `text`; `output_ids` has them always."""
    no_stop_trim: bool = False
    """Leave the stop string or token that ended the request in `text`."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> number added to its logit; -inf bans it. Keys may be strings of digits, as in JSON."""
    seed: int | None = None
    """Keys the draws, with sample index and position; None: engine seed and number of the request."""
    stream_interval: int = 1
    """Tokens per streamed message, at least 1; the first and the last come at once."""

    if TYPE_CHECKING:
        max_tokens: dataclasses.InitVar[int | None] = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping of field names (and `max_tokens`).

        Raises:
            RequestError: an unknown key, naming the nearest valid one.
        """
        return cls(**{str(key): value for key, value in values.items()})

    @classmethod
    def coerce(cls, value: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """`value` as SamplingParams: a mapping is read by `from_dict`, None is the defaults.

        Raises:
            RequestError: anything else.
        """
        if value is None:
            return cls()
        if isinstance(value, SamplingParams):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise RequestError(
            "sampling_params must be SamplingParams or a dict of its fields",
            got=value,
            fix="Pass SamplingParams(temperature=0.7), for example.",
        )

    def validate(self, *, vocab_size: int | None = None, has_tokenizer: bool = True) -> SamplingParams:
        """A checked and normalised copy: numbers as int and float, `stop` and `stop_token_ids` as tuples.

        Args:
            vocab_size: rows of the model's embedding (padding included); None: ids have no upper bound.
            has_tokenizer: whether stop strings can be matched at all.

        Raises:
            RequestError: the first rule that is broken.
        """
        max_new, stop_ids = self.max_new_tokens, () if self.stop_token_ids is None else self.stop_token_ids
        if max_new is not None:
            max_new = check_integer("max_new_tokens", max_new, low=0)
        checked = dataclasses.replace(
            self,
            n=check_integer("n", self.n, low=1),
            max_new_tokens=max_new,
            min_new_tokens=check_integer("min_new_tokens", self.min_new_tokens, low=0),
            temperature=check_number("temperature", self.temperature, low=0.0, high=_FLOAT32_MAX),
            top_p=check_number("top_p", self.top_p, above=0.0, high=1.0),
            top_k=check_integer("top_k", self.top_k, low=-1),
            min_p=check_number("min_p", self.min_p, low=0.0, high=1.0),
            frequency_penalty=check_number("frequency_penalty", self.frequency_penalty),
            presence_penalty=check_number("presence_penalty", self.presence_penalty),
            repetition_penalty=check_number("repetition_penalty", self.repetition_penalty, above=0.0),
            stop=_stop_strings(self.stop, has_tokenizer),
            stop_token_ids=check_token_ids("stop_token_ids", stop_ids, vocab_size),
            logit_bias=_logit_bias(self.logit_bias, vocab_size),
            seed=None if self.seed is None else check_integer("seed", self.seed, low=0, high=_MAX_SEED),
            stream_interval=check_integer("stream_interval", self.stream_interval, low=1),
        )
        for name in ("ignore_eos", "skip_special_tokens", "no_stop_trim"):
            check_bool(name, getattr(self, name))
        if max_new is not None and checked.min_new_tokens > max_new:
            raise RequestError(
                f"min_new_tokens must be at most max_new_tokens, {max_new}",
                got=checked.min_new_tokens,
                fix="Lower min_new_tokens or raise max_new_tokens.",
            )
        return checked


def check_token_ids(name: str, ids: Iterable[Any], vocab_size: int | None) -> tuple[int, ...]:
    """`ids` as a tuple of ints, each within the vocabulary (or only non-negative, when its size is None).

    Raises:
        RequestError: something that is no integer (a bool is none), or an id out of range, naming it.
    """
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise RequestError(f"{name} must be a list of token ids", got=ids, fix="Pass a list of ints.")
    found = tuple(ids)
    if not all(type(i) is int for i in found):
        found = tuple(check_integer(f"{name}[{at}]", i) for at, i in enumerate(found))
    if found and (min(found) < 0 or (vocab_size is not None and max(found) >= vocab_size)):
        bad = next(i for i in found if i < 0 or (vocab_size is not None and i >= vocab_size))
        limit = "at least 0" if vocab_size is None else f"in 0 .. {vocab_size - 1}, the model's vocabulary"
        raise RequestError(
            f"{name} must be {limit}", got=bad, fix="Check that ids and model come from the same tokenizer."
        )
    return found


def check_bool(name: str, value: object) -> None:
    """Refuse anything but True and False.

    Raises:
        RequestError: `value` is no bool.
    """
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False", got=value, fix="Pass a bool.")


def check_integer(name: str, value: Any, *, low: int | None = None, high: int | None = None) -> int:
    """`value` as an int (numpy's are welcome, bools are not) within `low .. high`.

    Raises:
        RequestError: no integer, or out of range.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise RequestError(f"{name} must be an integer", got=value, fix="Pass an int.")
    if number.bit_length() > 64:
        raise RequestError(f"{name} must fit in 64 bits", got=value, fix="Pass a smaller number.")
    if (low is not None and number < low) or (high is not None and number > high):
        limit = f"at least {low}" if high is None else f"in {low} .. {high}"
        raise RequestError(f"{name} must be {limit}", got=number, fix=f"Pass an int that is {limit}.")
    return number


def check_timeout(timeout: Any) -> float | None:
    """None (no limit), or a number of seconds as a float.

    Raises:
        RequestError: negative, above 30 years, or no number.
    """
    return None if timeout is None else check_number("timeout", timeout, low=0.0, high=1e9)


def check_number(
    name: str, value: Any, *, low: float | None = None, above: float | None = None, high: float | None = None
) -> float:
    """`value` as a float within the limits.

    Raises:
        RequestError: no finite real number (a bool is none), or out of range.
    """
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f"{name} must be a finite number", got=value, fix="Pass a float.")
    limits = [
        (low is None or number >= low, f"at least {low}"),
        (above is None or number > above, f"above {above}"),
        (high is None or number <= high, f"at most {high}"),
    ]
    broken = [limit for holds, limit in limits if not holds]
    if broken:
        raise RequestError(f"{name} must be {broken[0]}", got=value, fix=f"Pass a number {broken[0]}.")
    return number


def _stop_strings(stop: object, has_tokenizer: bool) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise RequestError(
                "stop must be a non-empty string or a list of them", got=stop, fix="None is no stop string."
            )
    if strings and not has_tokenizer:
        raise RequestError(
            "stop strings need a tokenizer, and this engine has none",
            got=stop,
            fix="Use stop_token_ids, or give the engine a tokenizer.",
        )
    return strings


def _logit_bias(bias: object, vocab_size: int | None) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise RequestError("logit_bias must map token ids to numbers", got=bias, fix="Pass {token_id: bias}.")
    keys = [int(k) if isinstance(k, str) and k.isascii() and k.isdigit() else k for k in bias]
    ids = check_token_ids("logit_bias keys", keys, vocab_size)
    if len(set(ids)) < len(ids):
        raise RequestError("logit_bias must name each token once", got=bias, fix="Drop the repeated id.")
    values = [_bias_value(token, value) for token, value in zip(ids, bias.values(), strict=True)]
    return dict(zip(ids, values, strict=True))


def _bias_value(token: int, value: Any) -> float:
    if value == -math.inf:
        return -math.inf
    return check_number(f"logit_bias[{token}]", value)


_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
_init = SamplingParams.__init__


def _init_with_alias(self: SamplingParams, **fields: Any) -> None:
    """The dataclass's own constructor, plus `max_tokens` and a typed error for unknown fields."""
    for name in fields:
        if name not in _FIELDS and name != "max_tokens":
            raise RequestError(
                f"{name!r} is no field of SamplingParams", fix=nearest(name, (*_FIELDS, "max_tokens"))
            )
    alias = fields.pop("max_tokens", None)
    if alias is not None:
        if fields.get("max_new_tokens", alias) not in (None, alias):
            raise RequestError(
                "max_tokens is an alias of max_new_tokens, and they differ",
                got={"max_tokens": alias, "max_new_tokens": fields["max_new_tokens"]},
                fix="Give one of them.",
            )
        fields["max_new_tokens"] = alias
    _init(self, **fields)


if not TYPE_CHECKING:
    # At run time an InitVar leaves its default on the class, and `params.max_tokens` would read as None.
    SamplingParams.__init__ = _init_with_alias
    SamplingParams.max_tokens = property(lambda self: self.max_new_tokens, doc="Alias of max_new_tokens.")
