"""The character tokenizer: what goes in comes out, also after a trip over the disk."""

import string
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tokenspeed_rl.recipes.characters import UNKNOWN, character_tokenizer

TOKENIZER = character_tokenizer()


@given(st.text(alphabet=string.ascii_letters + string.digits + " \n:=+-*/<>.,'\"", max_size=40))
def test_one_token_per_character(text: str) -> None:
    """Prompts and answers of character tasks survive, spaces and line breaks included."""
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_token_id], skip_special_tokens=True) == text


def test_other_characters_are_unknown() -> None:
    """What isn't in the alphabet is one unknown token, not an error and not dropped."""
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER("aéb")["input_ids"]) == ["a", UNKNOWN, "b"]


def test_saved_beside_a_checkpoint(tmp_path: Path) -> None:
    """`AutoTokenizer` reads back a tokenizer of the same ids and special tokens."""
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert (loaded.pad_token_id, loaded.eos_token_id) == (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id)
    assert loaded.decode(loaded("s:a b=\n")["input_ids"]) == "s:a b=\n"
