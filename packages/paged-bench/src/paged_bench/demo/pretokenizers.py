"""The pre-tokenizers that byte-level vocabularies name in `tokenizer.ggml.pre`.

A GGUF file names its pre-tokenizer instead of carrying it. The names are grouped by how they split;
a name outside these groups is refused, because a wrong split gives plausible but different token ids.
"""

from __future__ import annotations

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_GPT2 = frozenset({"gpt-2", "gpt2", "olmo", "phi-2", "mpt", "jais"})
_SINGLE_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"})

# Contractions, words with one leading sign, up to three digits, runs of signs, line ends, spaces.
_LLAMA3_PATTERN = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

KNOWN = _GPT2 | _SINGLE_DIGITS | _LLAMA3


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of that name, which must be in `KNOWN`; bytes become printable characters."""
    if name in _GPT2:
        return ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _SINGLE_DIGITS:
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
    split = Split(Regex(_LLAMA3_PATTERN), behavior="isolated", invert=False)
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


def starts_with_bos(name: str) -> bool:
    """Whether a prompt starts with the BOS token when the file does not say."""
    return name in _LLAMA3


def ignores_merges(name: str) -> bool:
    """Whether a whole word that is in the vocabulary is taken without merging."""
    return name in _LLAMA3
