"""A tokenizer built from the vocabulary that the GGUF file itself carries.

Two kinds exist in llama files: byte-level BPE with explicit merges (`gpt2`) and SentencePiece BPE with
a score for each piece (`llama`), whose merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from paged_bench.demo.gguf_file import GgufFile
from paged_bench.demo.pretokenizers import KNOWN, ignores_merges, pre_tokenizer, starts_with_bos
from paged_bench.errors import ModelFileError, PromptError

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"
_KINDS = ("gpt2", "llama")


class TextCodec:
    """Text to token ids and back, as the model's file defines it.

    Args:
        file: The GGUF file.

    Raises:
        ModelFileError: A vocabulary of an unknown kind, or one that does not fit together.
    """

    def __init__(self, file: GgufFile) -> None:
        kind = file.key("tokenizer.ggml.model", str)
        if kind not in _KINDS:
            raise ModelFileError(
                "key 'tokenizer.ggml.model'",
                f"is {kind!r}, one of {', '.join(map(repr, _KINDS))} is required",
            )
        self._pieces = file.strings("tokenizer.ggml.tokens")
        build = _byte_level if kind == "gpt2" else _sentence_piece
        self._tokenizer, bos_default = build(file, self._pieces)
        self._add_special(file)
        self._bos = (
            _token_id(file, "bos", len(self._pieces))
            if file.key("tokenizer.ggml.add_bos_token", bool, bos_default)
            else None
        )
        self.stop_ids = frozenset(
            _token_id(file, name, len(self._pieces))
            for name in ("eos", "eot")
            if file.has_key(f"tokenizer.ggml.{name}_token_id")
        )

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt; control tokens written out in it count as such.

        Raises:
            PromptError: Not text, or without a single token.
        """
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise PromptError(f"prompt {text[:40]!a}", "is not valid UTF-8 text") from error
        if not ids:
            raise PromptError(f"prompt {text[:40]!r}", "is empty", "write at least one character")
        return ids if self._bos is None else [self._bos, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _add_special(self, file: GgufFile) -> None:
        kinds = file.integers("tokenizer.ggml.token_type")
        if len(kinds) != len(self._pieces):
            raise ModelFileError(
                "key 'tokenizer.ggml.token_type'", f"has {len(kinds)} entries for {len(self._pieces)} tokens"
            )
        special = [
            AddedToken(piece, special=kind == _CONTROL, normalized=False)
            for piece, kind in zip(self._pieces, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) and piece
        ]
        self._tokenizer.add_tokens(special)


def _token_id(file: GgufFile, name: str, count: int) -> int:
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.key(key, int)
    if not 0 <= value < count:
        raise ModelFileError(f"key {key!r}", f"is {value}, the vocabulary has {count} tokens")
    return value


def _vocabulary(pieces: Sequence[str]) -> dict[str, int]:
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        repeated = next(piece for index, piece in enumerate(pieces) if vocabulary[piece] != index)
        raise ModelFileError("key 'tokenizer.ggml.tokens'", f"holds {repeated!r} more than once")
    return vocabulary


def _byte_level(file: GgufFile, pieces: Sequence[str]) -> tuple[Tokenizer, bool]:
    name = file.key("tokenizer.ggml.pre", str)
    if name not in KNOWN:
        raise ModelFileError(
            "key 'tokenizer.ggml.pre'",
            f"names the pre-tokenizer {name!r}, known are {', '.join(sorted(KNOWN))}",
        )
    merges = [_pair(merge) for merge in file.strings("tokenizer.ggml.merges")]
    vocabulary = _vocabulary(pieces)
    try:
        tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=ignores_merges(name)))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ModelFileError(
            "key 'tokenizer.ggml.merges'", f"does not fit the vocabulary: {error}", "fetch the file again"
        ) from error
    tokenizer.pre_tokenizer = pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, starts_with_bos(name)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise ModelFileError("key 'tokenizer.ggml.merges'", f"holds {merge!r}, two pieces are required")
    return left, right


def _sentence_piece(file: GgufFile, pieces: Sequence[str]) -> tuple[Tokenizer, bool]:
    vocabulary = _vocabulary(pieces)
    scores = file.floats("tokenizer.ggml.scores")
    if len(scores) != len(pieces):
        raise ModelFileError(
            "key 'tokenizer.ggml.scores'", f"has {len(scores)} entries for {len(pieces)} tokens"
        )
    unknown = pieces[_token_id(file, "unknown", len(pieces))]
    tokenizer = Tokenizer(
        BPE(
            vocabulary,
            _merges_from_scores(vocabulary, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = file.key("tokenizer.ggml.add_space_prefix", bool, True)
    prefix = [normalizers.Prepend(_SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _merges_from_scores(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, the best-scored piece first."""
    merges: list[tuple[str, str]] = []
    for piece in sorted(vocabulary, key=lambda piece: -scores[vocabulary[piece]]):
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges.extend((left, right) for left, right in splits if left in vocabulary and right in vocabulary)
    return merges
