"""Byte-pair subwords of sentences: text to ids and back."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from powernorm.errors import InputError
from powernorm.lab.data.subwords import END


class Subwords:
    """The subwords of one language, or of two at once.

    Words are joined by single spaces: which white space stood between them is not modeled. Every
    string can be encoded, since each byte is a subword. The subword with the id `END_ID` is the end
    mark, which no text encodes to.

    >>> subwords = Subwords.train(["no man is an island"], 260, tokenized=False)
    >>> subwords.decode(subwords.encode(["an  île"]))
    ['an île']

    Args:
        tokenizer: whose special tokens are the end mark alone.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A text that happens to contain "<eos>" is encoded letter by letter, not as the end mark.
        # This is not part of what a tokenizer keeps in its file.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], size: int, *, tokenized: bool) -> "Subwords":
        """Find the `size` subwords that spell the texts best; a small text may yield fewer.

        Args:
            texts: gone through once.
            size: number of subwords, at least 257.
            tokenized: only white space parts words, as in text that is tokens already.
        """
        tokenizer = Tokenizer(models.BPE())
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=not tokenized)
        tokenizer.pre_tokenizer = (
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pieces])
            if tokenized
            else pieces
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((_normalized(text) for text in texts), trainer)
        return cls(tokenizer)

    @classmethod
    def from_json(cls, content: str) -> "Subwords":
        """Return the subwords that `to_json` wrote.

        Raises:
            InputError: it did not write this.
        """
        try:
            return cls(Tokenizer.from_str(content))
        except Exception as error:  # whatever a damaged file makes the library raise
            raise InputError(
                f"The subwords cannot be read ({error}): expected what Subwords.to_json wrote."
            ) from error

    def to_json(self) -> str:
        """Return all that is needed to make them again."""
        return str(self._tokenizer.to_str())

    @property
    def size(self) -> int:
        """Return the number of subwords, the end mark included."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts, without end marks."""
        encodings = self._tokenizer.encode_batch_fast([_normalized(text) for text in texts])
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of ids, words between single spaces; end marks are passed over.

        Bytes that make no character, which a model may say, are replaced by U+FFFD.
        """
        texts = self._tokenizer.decode_batch([list(row) for row in ids], skip_special_tokens=True)
        return [_normalized(text) for text in texts]


def _normalized(text: str) -> str:
    return " ".join(text.split())
