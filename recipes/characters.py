"""A tokenizer of single characters, built in code: what a tiny policy reads and writes."""

import string

from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def character_tokenizer(alphabet: str = string.printable.strip() + " \n") -> PreTrainedTokenizerFast:
    """One token per character of `alphabet`; ids 0, 1, 2 are padding, end of sequence and unknown.

    A real `PreTrainedTokenizerFast`: `save_pretrained` writes it, `AutoTokenizer` reads it back.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *dict.fromkeys(alphabet)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
