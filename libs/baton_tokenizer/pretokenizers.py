"""How each byte-level BPE family splits text before merging.

GGUF names the family in `tokenizer.ggml.pre`; Hugging Face spells it out in tokenizer.json. The two must agree to the
last digit: a family that is not in the table is refused, because the wrong split gives plausible text and wrong ids.
The rules are those of the families' own tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _tiktoken_like(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


@dataclass(frozen=True)
class Family:
    """One way of splitting text.

    ignore_merges: a word that is in the vocabulary as a whole is taken whole, whatever the merges say.
    adds_bos: whether a prompt starts with the begin-of-sequence token where the file does not say.
    """

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


_GPT2 = Family(lambda: pre_tokenizers.ByteLevel(add_prefix_space=False))
_SMOLLM = Family(_digits_then_bytes)
_LLAMA3 = Family(lambda: _split(_tiktoken_like(r"\p{N}{1,3}")), ignore_merges=True, adds_bos=True)
_QWEN2 = Family(lambda: _split(_tiktoken_like(r"\p{N}")), normalizer=normalizers.NFC)
_DEEPSEEK_V3 = Family(
    lambda: _split(
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    ),
    adds_bos=True,
)

FAMILIES: dict[str, Family] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": _DEEPSEEK_V3,
}
"""`tokenizer.ggml.pre` -> family."""
