"""Prompts as callers give them, one or a list, text or ids, checked and made uniform."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.sampling_params import SamplingParams, check_token_ids

_MESSAGE = '{"role": "user", "content": "..."}'


def is_batch(text: object, input_ids: object) -> bool:
    """Whether a list of prompts was given, also one of length 1."""
    if text is not None:
        return not isinstance(text, str)
    ids = _plain(input_ids)
    return _is_list(ids) and len(ids) > 0 and _is_list(_plain(ids[0]))


def split_prompts(
    text: object, input_ids: object, *, vocab_size: int | None, has_tokenizer: bool
) -> list[tuple[str | None, tuple[int, ...] | None]]:
    """One (text, ids) pair per prompt, exactly one of the two not None.

    Raises:
        RequestError: none or both given, an empty prompt, ids that are none or outside the vocabulary, text
            without a tokenizer.
    """
    if text is None and input_ids is None:
        raise RequestError("text or input_ids must be given", got=None, fix="Pass a prompt.")
    if text is not None and input_ids is not None:
        raise RequestError("only one of text and input_ids may be given", got=text, fix="Drop one of them.")
    if text is not None:
        return [(prompt, None) for prompt in _texts(text, has_tokenizer)]
    if not is_batch(None, input_ids):
        return [(None, _token_ids("input_ids", input_ids, vocab_size))]
    rows: Sequence[object] = _plain(input_ids)
    return [(None, _token_ids(f"input_ids[{at}]", row, vocab_size)) for at, row in enumerate(rows)]


def chat_ids(
    tokenizer: Any,
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] | None,
    chat_template: str | None,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any],
) -> Any:
    """Token ids of a conversation, or lists of them for a list of conversations, by the chat template.

    Raises:
        RequestError: no tokenizer, no messages, or something the template can't render.
    """
    if tokenizer is None:
        raise RequestError(
            "chat needs a tokenizer, and this engine has none", fix="Pass Engine(tokenizer=...)."
        )
    if not messages:
        raise RequestError("messages is empty", got=messages, fix=f"Pass [{_MESSAGE}].")
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
            tokenize=True,
            return_dict=False,
            **template_kwargs,
        )
    except Exception as error:  # of jinja, transformers or the template itself
        raise RequestError(
            f"the chat template refuses the messages: {error}", got=messages, fix=f"One is {_MESSAGE}."
        ) from error


def split_rids(rid: object, count: int, batch: bool) -> list[str]:
    """A request id for each of `count` prompts, random ones where none is given.

    Raises:
        RequestError: a list where one is wanted or the other way round, empty or repeated ids.
    """
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    found = _one_each("rid", rid, count, batch)
    if not all(isinstance(r, str) and r for r in found):
        raise RequestError("rid must be a non-empty string", got=rid, fix="Leave it out for a random one.")
    if len(set(found)) < count:
        raise RequestError("rids must differ from each other", got=rid, fix="Give each prompt its own.")
    return found


def split_sampling_params(
    given: object, count: int, batch: bool, *, vocab_size: int | None, has_tokenizer: bool
) -> list[SamplingParams]:
    """Validated parameters for each of `count` prompts.

    Raises:
        RequestError: a list of another length, or whatever `SamplingParams.validate` finds.
    """
    shared = given is None or isinstance(given, SamplingParams | Mapping)
    each: list[Any] = [given] if shared else _one_each("sampling_params", given, count, batch)
    params = [SamplingParams.coerce(one) for one in each]
    valid = [one.validate(vocab_size=vocab_size, has_tokenizer=has_tokenizer) for one in params]
    return valid * count if shared else valid


def _plain(value: Any) -> Any:
    """A tensor or array as lists and ints; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _texts(text: Any, has_tokenizer: bool) -> list[str]:
    texts = [text] if isinstance(text, str) else list(text) if _is_list(text) else []
    if not texts or not all(isinstance(t, str) and t for t in texts):
        raise RequestError(
            "text must be a non-empty string or a list of them",
            got=text,
            fix="Token ids go in input_ids; to begin from nothing, pass the BOS token there.",
        )
    if not has_tokenizer:
        raise RequestError(
            "a text prompt needs a tokenizer, and this engine has none",
            got=text,
            fix="Pass input_ids, or give the engine a tokenizer.",
        )
    return texts


def _token_ids(name: str, given: object, vocab_size: int | None) -> tuple[int, ...]:
    ids = _plain(given)
    if not _is_list(ids) or not ids:
        raise RequestError(
            f"{name} must be a non-empty list of token ids", got=given, fix="Pass at least one token."
        )
    return check_token_ids(name, ids, vocab_size)


def _one_each(name: str, given: Any, count: int, batch: bool) -> list[Any]:
    if not batch and not _is_list(given):
        return [given]
    if batch and _is_list(given) and len(given) == count:
        return list(given)
    want = f"a list of {count}, one for each prompt" if batch else "a single one, for a single prompt"
    raise RequestError(f"{name} must be {want}", got=given, fix=f"Match {name} to the prompts.")
