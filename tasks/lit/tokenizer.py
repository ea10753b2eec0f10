"""Texts to tokens: open_clip's byte-pair encoding, or a SentencePiece file, after cleaning."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from open_clip.tokenizer import SimpleTokenizer, default_bpe, get_clean_fn

from dpn_cli.errors import DataError, DpnError
from dpn_cli.run.files import read_named

Clean = Literal["canonicalize", "lower", "whitespace"]
Tokens = npt.NDArray[np.int32]


class Tokenizer:
    """Texts to rows of `context` tokens; a longer text is cut, its end token kept.

    Without `model` it is open_clip's BPE of 49,408 tokens, padded with 0, as its `SimpleTokenizer` does. `model` is
    the content of a SentencePiece file: padded with the end token, no start token (big_vision's ``tokenize`` with a
    sticky end). `clean`: ``canonicalize`` takes punctuation and capitals off, ``lower`` capitals, ``whitespace``
    neither.

    Raises `DataError` for a file that is not a SentencePiece model, `DpnError` without the library.
    """

    def __init__(self, context: int, clean: Clean, model: bytes | None = None, name: str | None = None) -> None:
        self.context, self.clean, self.model = context, clean, model
        self.name = name or ("open_clip BPE" if model is None else "SentencePiece")
        self.clean_text = get_clean_fn(clean)
        self.digest = hashlib.sha256(Path(default_bpe()).read_bytes() if model is None else model).hexdigest()
        if model is None:
            self._bpe = _open_clip_bpe(context, clean)
            self.vocabulary, self.start = self._bpe.vocab_size, [self._bpe.sot_token_id]
            self.end, self.pad = self._bpe.eot_token_id, 0
        else:
            self._pieces = _sentencepiece(model, self.name)
            self.vocabulary, self.start = self._pieces.vocab_size(), list[int]()
            self.end = self.pad = self._pieces.eos_id()
            if self.end < 0:
                raise DataError(f"--tokenizer {self.name}: the model has no end token")

    def to_dict(self) -> dict[str, Any]:
        """Return what tells this tokenizer from others."""
        return {
            "name": self.name,
            "kind": "bpe" if self.model is None else "sentencepiece",
            "digest": self.digest,
            "vocabulary": self.vocabulary,
            "context": self.context,
            "clean": self.clean,
        }

    def encode(self, texts: Sequence[str]) -> tuple[Tokens, int]:
        """Return tokens (n, context), and how many texts were longer."""
        tokens, cut = np.full((len(texts), self.context), self.pad, dtype=np.int32), 0
        for row, text in zip(tokens, texts, strict=True):
            ids = self._bpe.encode(text) if self.model is None else self._pieces.encode(self.clean_text(text))
            room = self.context - len(self.start) - 1
            cut += len(ids) > room
            ids = [*self.start, *ids[:room], self.end]
            row[: len(ids)] = ids
        return tokens, cut


def open_tokenizer(file: str | None, context: int, clean: Clean) -> Tokenizer:
    """Return open_clip's tokenizer, or that of a SentencePiece file. Raises `DataError` for a file that is none."""
    if file is None:
        return Tokenizer(context, clean)
    path = Path(file).expanduser()
    model = read_named(path, f"--tokenizer {file}", "leave it out for open_clip's byte-pair encoding")
    return Tokenizer(context, clean, model, path.name)


@cache
def _open_clip_bpe(context: int, clean: Clean) -> SimpleTokenizer:
    """Return open_clip's tokenizer; reading its table of merges takes a tenth of a second."""
    return SimpleTokenizer(context_length=context, clean=clean)


def _sentencepiece(model: bytes, name: str) -> Any:
    try:
        from sentencepiece import SentencePieceProcessor
    except ModuleNotFoundError as error:
        raise DpnError(
            f"--tokenizer {name}: needs the library sentencepiece: pip install 'dpn-cli[sentencepiece]'"
        ) from error
    try:
        return SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise DataError(f"--tokenizer {name}: not a SentencePiece model") from error
