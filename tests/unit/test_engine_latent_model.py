"""A model with a latent cache as the model process runs it."""

from __future__ import annotations

import time

import pytest

from baton_engine.baton_runner import load_model
from baton_engine.executor import Executor, cache_layout
from baton_engine.messages import EngineSpec, Sampling, SequenceStart, StepItem, StepPlan
from baton_kv.layout import PageLayout
from baton_model.loaders import load_model as load_weights
from paged_runner import PagedRunner
from small_deepseek import SmallDeepseek

PROMPT = (7, 3, 9, 9, 1, 4)


def test_its_cache_is_latent_whatever_order_the_spec_asks_for(tmp_path):
    directory = SmallDeepseek(layers=2).write_hugging_face(tmp_path)
    spec = EngineSpec(model_path=str(directory), order="NHD", page_size=4, pages=6)
    runner = load_model(spec, lambda stage, fraction: None)
    layout = cache_layout(spec, runner.facts)
    assert layout == PageLayout("MLA", layers=2, pages=6, page_size=4, kv_heads=1, head_dim=16 + 4, element_size=4)

    executor = Executor(runner, layout)
    executor.warm_up()
    tokens, feed, start = [], PROMPT, 0
    for step in range(5):
        starts = (SequenceStart(1, (5, 2, 3), Sampling(temperature=0)),) if step == 0 else ()
        plan = StepPlan(step=step, starts=starts, items=(StepItem(1, start, feed, sample=True, prefill=step == 0),))
        tokens += executor.run(plan, time.monotonic_ns()).token_ids
        feed, start = (tokens[-1],), start + len(feed)

    logits = PagedRunner(load_weights(directory, "float32"), pages=3).run("only", (*PROMPT, *tokens[:-1]), [])
    assert logits[len(PROMPT) - 1 :].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("generation", [2, 3])
def test_a_small_checkpoint_is_of_its_generation(tmp_path, generation):
    model = load_weights(SmallDeepseek(generation=generation, query_rank=None).write_hugging_face(tmp_path), "bfloat16")
    assert model.config.family == f"deepseek_v{generation}"
    assert model.config.latent is not None and model.config.latent.query_rank is None
