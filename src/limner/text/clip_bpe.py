"""OpenAI's byte-level BPE of CLIP, which published CLIP weights were trained with (Radford et al. 2021).

Unlike in `bpe.py`, a word does not keep its leading space: its last byte has the suffix `</w>`. The merges determine
the vocabulary: 256 bytes, the same with the suffix, one token per merge, and the tokens around a text.

Source: https://github.com/openai/CLIP (`clip/simple_tokenizer.py`). Texts are not passed through ftfy, which OpenAI
mends wrongly decoded text with; Hugging Face's fast tokenizer does not, either.
"""

from __future__ import annotations

import gzip
import html
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Regex, Tokenizer as Library, decoders, models, normalizers, pre_tokenizers

from limner.atomic_io import atomic_write_text, require_file
from limner.errors import UserError
from limner.json_files import read_json
from limner.text import PAD
from limner.text.bpe import BYTES, MAX_FILE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CLIPTokenizer"]

START, END, SUFFIX = "<|startoftext|>", "<|endoftext|>", "</w>"
MAX_MERGES = 48_894  # the published file lists more, which the vocabulary of 49,408 tokens leaves out
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"


class CLIPTokenizer:
    """A vocabulary of CLIP. `CLIPTokenizer.load` reads one.

    Args:
        merges: pairs of tokens, earliest first.

    Raises:
        UserError: a merge joins unknown tokens, or two merges give the same token.
    """

    def __init__(self, merges: Sequence[tuple[str, str]]) -> None:
        self.vocab = {token: i for i, token in enumerate([*BYTES, *(byte + SUFFIX for byte in BYTES)])}
        for a, b in merges:
            if a not in self.vocab or b not in self.vocab or a + b in self.vocab:
                raise UserError(f"its merge of {a[:40]!r} with {b[:40]!r} repeats a token or joins unknown tokens")
            self.vocab[a + b] = len(self.vocab)
        self.library = Library(models.BPE(vocab=self.vocab, merges=list(merges), end_of_word_suffix=SUFFIX))
        self.vocab |= {START: len(self.vocab), END: len(self.vocab) + 1}
        self.library.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        words = pre_tokenizers.Split(Regex(_WORDS), "removed", invert=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.library.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
        self.library.decoder = decoders.ByteLevel()

    @classmethod
    def load(cls, path: str | Path) -> CLIPTokenizer:
        """Read a `tokenizer.json` of `save` or of Hugging Face, or a list of merges after a first line, plain or
        compressed: `bpe_simple_vocab_16e6.txt.gz` or `merges.txt`. Raises `UserError` for any other file."""
        path = Path(path)
        try:
            if path.suffix != ".json":
                return cls(_read_merges(path))
            model = read_json(path, MAX_FILE_BYTES)["model"]
            pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
            tokenizer = cls([(a, b) for a, b in pairs])
            if not tokenizer.vocab.items() >= model["vocab"].items():
                raise UserError("its tokens have other numbers")
            return tokenizer
        except (KeyError, TypeError, ValueError, AttributeError, EOFError, zlib.error) as error:
            raise UserError(f"{path} is not a tokenizer of CLIP: {type(error).__name__} {error}") from None
        except UserError as error:
            raise UserError(f"{path} is not a tokenizer of CLIP: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the JSON format of the `tokenizers` library, without the tokens around a text."""
        atomic_write_text(Path(path), self.library.to_str(pretty=True))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the rows of an embedding table."""
        return len(self.vocab)

    def encode(self, captions: Sequence[str], length: int) -> Tensor:
        """Encode captions as int64 [B, length], each between the tokens START and END, `PAD` in unused positions.

        Longer captions are cut, with a warning, and END remains. Raises `UserError` for invalid Unicode.
        """
        import torch  # not at the top: importing `limner.text` does not need torch

        tokens = np.full((len(captions), length), PAD, dtype=np.int64)
        try:
            encodings = self.library.encode_batch([html.unescape(html.unescape(caption)) for caption in captions])
        except (UnicodeEncodeError, TypeError):
            raise UserError("a caption is not valid Unicode: check its encoding") from None
        for row, caption, encoding in zip(tokens, captions, encodings, strict=True):
            ids = [self.vocab[START], *encoding.ids, self.vocab[END]]
            if len(ids) > length:
                warnings.warn(f"a caption of {len(ids)} tokens was cut to {length}: {caption[:60]!r} ...", stacklevel=2)
                ids = [*ids[: length - 1], self.vocab[END]]
            row[: len(ids)] = ids
        return torch.from_numpy(tokens)


def _read_merges(path: Path) -> list[tuple[str, str]]:
    require_file(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"it cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise UserError(f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    lines = raw.decode().splitlines()[1 : 1 + MAX_MERGES]
    return [(a, b) for a, b in (line.split(" ") for line in lines)]
