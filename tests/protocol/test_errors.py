"""The errors that callers catch and read."""

import copy
import inspect
import pickle

import pytest

from tokenspeed_rl import errors

EXAMPLES = [
    errors.ConfigError("page_size must be at least 1", got=0, fix="Set a positive number."),
    errors.RequestError("the prompt is empty"),
    errors.EngineStateError("the engine is paused", fix="Call resume()."),
    errors.WeightsInvalidError("the weights are incomplete"),
    errors.WeightUpdateError("2 tensors are missing", got=["a", "b"]),
    errors.OutOfMemoryError("KV does not fit", wanted=4096, free=1024, fix="Lower max_total_tokens."),
    errors.EngineTimeoutError("generate took longer than its timeout", got=1.5),
    errors.EngineDeadError("the loop failed"),
    errors.PeerFailedError(3, ValueError("bad reward"), fix="See that rank's log."),
    errors.EngineShutdownError("the engine was shut down"),
]


def test_examples_cover_the_hierarchy() -> None:
    """The tests below see every error of the module."""
    kinds = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)}
    assert kinds == {type(error) for error in EXAMPLES} | {errors.TokenSpeedError}


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (errors.ConfigError, (ValueError,)),
        (errors.RequestError, (ValueError,)),
        (errors.WeightsInvalidError, (errors.EngineStateError,)),
        (errors.OutOfMemoryError, (MemoryError,)),
        (errors.EngineTimeoutError, (TimeoutError,)),
    ],
)
def test_caught_as_builtins(kind: type[Exception], bases: tuple[type[Exception], ...]) -> None:
    """Code that catches Python's own ValueError, MemoryError or TimeoutError catches ours."""
    assert issubclass(kind, (errors.TokenSpeedError, *bases)) and all(
        issubclass(kind, base) for base in bases
    )


def test_message_says_what_got_fix() -> None:
    """The three parts stand in the message in this order, and apart as attributes; `got=None` is a value."""
    error = errors.ConfigError("page_size must be at least 1.", got=None, fix="Set 16.")
    assert str(error) == "page_size must be at least 1. (got None). Set 16."
    assert (error.what, error.got, error.fix) == ("page_size must be at least 1.", "None", "Set 16.")
    assert str(errors.RequestError("empty")) == "empty"


def test_memory_and_peer_errors_carry_their_figures() -> None:
    """A1, G4: wanted and free bytes, the failed rank and its cause can be read by code."""
    by_kind = {type(error): error for error in EXAMPLES}
    memory, peer = by_kind[errors.OutOfMemoryError], by_kind[errors.PeerFailedError]
    assert isinstance(memory, errors.OutOfMemoryError) and (memory.wanted, memory.free) == (4096, 1024)
    assert isinstance(peer, errors.PeerFailedError) and (peer.rank, peer.cause) == (
        3,
        "ValueError: bad reward",
    )
    assert "4,096 bytes wanted, 1,024 free" in str(memory) and "rank 3" in str(peer)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_pickle_and_copy_whole(error: errors.TokenSpeedError) -> None:
    """An error that crosses a process boundary keeps type, message and fields."""
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error) and str(twin) == str(error) and vars(twin) == vars(error)


def test_long_values_are_cut() -> None:
    """A prompt of a million ids doesn't fill the log."""
    assert len(str(errors.RequestError("too long", got=list(range(100_000))))) < 300


def test_unknown_names_get_a_hint() -> None:
    """The nearest valid name when one is near, all of them otherwise."""
    assert errors.nearest("temprature", ["temperature", "top_p"]) == "Did you mean 'temperature'?"
    assert errors.nearest("xyz", ["top_p", "n"]) == "Valid names: n, top_p."


def test_a_value_that_cannot_be_shown() -> None:
    """A message comes also of a value whose own `repr` fails."""
    assert "a int that can't be shown" in str(errors.RequestError("too large", got=10**5000))
