"""The small checkpoints of other tests: their tokenizer."""

from __future__ import annotations

from baton_tokenizer.tokenizer import load_tokenizer
from small_models import EOS, SmallModel


def test_a_small_checkpoint_has_a_tokenizer_of_its_whole_vocabulary(tmp_path):
    small = SmallModel(vocabulary=320)
    tokenizer = load_tokenizer(small.write_hugging_face(tmp_path, tokenizer=True))
    text = "the naïve 日本 fox\n\t12"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert set(tokenizer.eos_token_ids) == set(EOS)
    ordinary = [token for token in range(4, 320) if tokenizer.decode([token])]
    assert len(ordinary) == 316
