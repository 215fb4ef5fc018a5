"""Multi-token prediction against its definition (DeepSeek-AI, 2024: DeepSeek-V3, section 2.2), written out around
transformers' decoder layer and without a cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from baton_model.batch import ForwardBatch
from baton_model.cache import CacheShape, open_cache
from baton_model.errors import InvalidBatch, InvalidConfig, MissingTensor
from baton_model.loaders import load_model
from baton_model.parallel import SOLO, RankGroup
from rank_threads import on_ranks
from small_deepseek import SmallDeepseek

TOLERANCE = 1e-4
PAGE_SIZE = 8
TABLE = [3, 8, 0, 5, 11, 2, 9, 7, 1, 10, 4, 6]


class Reference:
    """The model and its modules by transformers' own code, every token at once."""

    def __init__(self, small: SmallDeepseek, directory: Path) -> None:
        self.small = small
        self.model = DeepseekV3ForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        norm = DeepseekV3RMSNorm(self.small.hidden, eps=self.model.config.rms_norm_eps)
        norm.weight.data = torch.from_numpy(self.small.state[f"{name}.weight"])
        return norm(x)

    def _layer(self, number: int) -> DeepseekV3DecoderLayer:
        prefix, state = f"model.layers.{number}.", self.small.state
        own = {
            name.removeprefix(prefix): torch.from_numpy(tensor)
            for name, tensor in state.items()
            if name.startswith(prefix) and ".experts." not in name
        }
        for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight", "eh_proj.weight"):
            del own[name]

        def stacked(*parts: str) -> torch.Tensor:
            names = [f"{prefix}mlp.experts.{i}" for i in range(self.small.experts)]
            each = [np.concatenate([state[f"{name}.{part}_proj.weight"] for part in parts]) for name in names]
            return torch.from_numpy(np.stack(each))

        own["mlp.experts.gate_up_proj"], own["mlp.experts.down_proj"] = stacked("gate", "up"), stacked("down")
        layer = DeepseekV3DecoderLayer(self.model.config, number)
        layer.load_state_dict(own, strict=True)
        return layer.eval()

    @torch.inference_mode()
    def drafts(self, ids: list[int]) -> list[torch.Tensor]:
        """Logits `[len(ids) - k, vocabulary]` of module k, for each."""
        model, tokens = self.model.model, torch.tensor(ids)
        hidden, results = model(tokens[None], use_cache=False).last_hidden_state[0], []
        for k in range(1, self.small.mtp + 1):
            number = self.small.layers + k - 1
            name, count = f"model.layers.{number}", len(ids) - k
            joined = torch.cat(
                (
                    self._norm(f"{name}.enorm", model.embed_tokens(tokens[k:])),
                    self._norm(f"{name}.hnorm", hidden[:count]),
                ),
                dim=-1,
            )
            x = (joined @ torch.from_numpy(self.small.state[f"{name}.eh_proj.weight"]).T)[None]
            positions = torch.arange(count)[None]
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
            x = self._layer(number)(
                x, attention_mask=mask, position_ids=positions, position_embeddings=model.rotary_emb(x, positions)
            )
            hidden = self._norm(f"{name}.shared_head.norm", x[0])
            results.append(self.model.lm_head(hidden))
        return results


def drafts(directory: Path, ids: list[int], group: RankGroup = SOLO) -> list[torch.Tensor]:
    """The same by Baton: a prompt in two chunks, the second of which begins within a page, then decodes."""
    model = load_model(directory, "float32", group=group, mtp=True)
    shape = model.cache_shape
    memory = bytearray(shape.layers * len(TABLE) * PAGE_SIZE * shape.head_dim * 4)
    cache = open_cache(memory, shape, order="MLA", pages=len(TABLE), page_size=PAGE_SIZE, dtype=torch.float32)
    results: list[list[torch.Tensor]] = [[] for _ in model.mtp]
    start = 0
    for size in (len(ids) - 50, 18, *[1] * 32):
        part = ids[start : start + size]
        hidden = model.forward(ForwardBatch.build([(part, start)], [TABLE]), cache)
        for k, module in enumerate(model.mtp, 1):
            # The last tokens of all have no successors to be fed.
            part, hidden = part[: len(ids) - k - start], hidden[: len(ids) - k - start]
            if not part:
                break
            following = torch.tensor(ids[start + k : start + k + len(part)])
            hidden = module.forward(ForwardBatch.build([(part, start)], [TABLE]), cache, hidden, following)
            results[k - 1].append(model.logits(hidden))
        start += size
    return [torch.cat(rows) for rows in results]


def tokens(count: int) -> list[int]:
    return torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("query_rank", [12, None])
def test_prefill_and_decodes(tmp_path, modules, query_rank):
    small = SmallDeepseek(mtp=modules, query_rank=query_rank)
    directory, ids = small.write_hugging_face(tmp_path), tokens(90)
    expected, found = Reference(small, directory).drafts(ids), drafts(directory, ids)
    assert len(found) == modules
    for k, (logits, reference) in enumerate(zip(found, expected, strict=True), 1):
        assert logits.shape == reference.shape == (90 - k, 64)
        assert reference.std(0).mean() > 0.1
        assert (logits - reference).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_has_the_drafts_of_the_whole_model(tmp_path, ranks):
    directory, ids = SmallDeepseek(mtp=1).write_hugging_face(tmp_path), tokens(70)
    (whole,) = drafts(directory, ids)
    found = [rows for (rows,) in on_ranks(ranks, lambda group: drafts(directory, ids, group))]
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert (found[0] - whole).abs().max().item() < TOLERANCE


def test_modules_are_loaded_only_when_asked_for(tmp_path):
    directory = SmallDeepseek(layers=2, mtp=1).write_hugging_face(tmp_path)
    without, with_module = load_model(directory, "float32"), load_model(directory, "float32", mtp=True)
    assert without.cache_shape == CacheShape(2, 1, 20, latent=True) and not without.mtp
    assert with_module.cache_shape == CacheShape(3, 1, 20, latent=True)


def test_modules_that_are_not_there(tmp_path):
    with pytest.raises(InvalidConfig, match="no modules for multi-token prediction"):
        load_model(SmallDeepseek().write_hugging_face(tmp_path / "none"), "float32", mtp=True)
    directory = SmallDeepseek(layers=3).write_hugging_face(tmp_path / "declared", num_nextn_predict_layers=1)
    load_model(directory, "float32")
    with pytest.raises(MissingTensor, match=r"model\.layers\.3\."):
        load_model(directory, "float32", mtp=True)


def test_what_does_not_belong_together_is_refused(tmp_path):
    model = load_model(SmallDeepseek(mtp=1).write_hugging_face(tmp_path), "float32", mtp=True)
    memory = bytearray(4 * PAGE_SIZE * 20 * 4)
    cache = open_cache(memory, model.cache_shape, order="MLA", pages=1, page_size=PAGE_SIZE, dtype=torch.float32)
    batch = ForwardBatch.build([([1, 2, 3], 0)], [[0]])
    for hidden, following in ((torch.zeros(2, 32), torch.zeros(3)), (torch.zeros(3, 32), torch.zeros(2))):
        with pytest.raises(InvalidBatch, match="don't belong to a batch of 3 tokens"):
            model.mtp[0].forward(batch, cache, hidden, following.to(torch.int64))
    assert not any(memory)
