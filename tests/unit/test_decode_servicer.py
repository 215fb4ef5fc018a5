import asyncio

import grpc
import pytest
from baton.v1 import common_pb2

from baton_decode import servicer as module
from baton_decode.servicer import DecodeServicer
from baton_engine.messages import PositionLogprobs, Sampling, TokenLogprob
from baton_rpc import RemoteError
from conditions import settle, until
from decode_rig import decode_rig
from decode_rig import generate_request as request
from fake_agent import Gate


@pytest.fixture
def policy(request):
    return getattr(request, "param", "never")


@pytest.fixture
async def rig(monkeypatch, tmp_path, policy):
    async with decode_rig(monkeypatch, tmp_path, policy) as rig:
        yield rig


async def generate(rig, *arguments, **options):
    """The tokens, and the last message; checks that only that says how it ended."""
    if rig.prefill is not None and not rig.prefill.script:
        rig.prefill.script = ["fill"]
    messages = [message async for message in rig.stub.Generate(request(rig, *arguments, **options))]
    tokens = [token for message in messages for token in message.token_ids]
    assert not any(message.finish_reason for message in messages[:-1])
    assert messages[-1].usage.completion_tokens == len(tokens)
    await rig.idle()
    return tokens, messages[-1], messages


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return RemoteError.from_rpc(caught.value)


def total(metric, **labels):
    return sum(
        sample.value
        for family in metric.collect()
        for sample in family.samples
        if sample.name.endswith(("_total", "_count")) and labels.items() <= sample.labels.items()
    )


async def test_the_last_prompt_token_is_the_first_step_here(rig):
    tokens, last, messages = await generate(rig, tokens=10, max_tokens=3)
    assert tokens == [1, 1, 1] and len(messages) == 4
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert last.usage.prompt_tokens == 10
    first = rig.engine.plans[0]
    assert [(item.start, item.token_ids, item.sample, item.prefill) for item in first.items] == [(9, (9,), True, False)]
    assert len(rig.engine.plans) == 3
    (run,) = rig.prefill.runs
    assert list(run.request.pages) == list(first.starts[0].pages[:3])
    assert total(rig.metrics.requests, outcome="ok") == 1 and total(rig.metrics.generated_tokens) == 3


async def test_it_is_not_in_a_step_before_its_pages_have_arrived(rig):
    call = rig.stub.Generate(request(rig))
    run = await rig.prefill.run()
    await settle()
    assert not rig.engine.plans
    rig.agent.fill(run.key)
    await rig.engine.begun(0)
    run.succeed()
    assert len([message async for message in call]) == 4
    await rig.idle()


async def test_a_prompt_of_one_token_transfers_nothing(rig):
    tokens, last, _ = await generate(rig, tokens=1, workers=[])
    assert len(tokens) == 3 and not rig.prefill.runs and not rig.agent.calls["OpenInbox"]
    assert not last.timeline.local_prefill and last.timeline.prefill_worker == ""


@pytest.mark.parametrize("tokens", [1, 4, 5, 8, 9])
async def test_one_token_is_exactly_one_token(rig, tokens):
    drawn, last, _ = await generate(rig, tokens=tokens, max_tokens=1)
    assert drawn == [1] and last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert len(rig.engine.plans) == 1
    assert len(rig.engine.plans[0].starts[0].pages) == -(-tokens // 4)  # the drawn token is never written


async def test_an_end_of_sequence_ends_it_even_as_the_first_token(rig):
    rig.engine.token = 99
    tokens, last, _ = await generate(rig)
    assert tokens == [99] and last.finish_reason == common_pb2.FINISH_REASON_STOP


async def test_a_stop_token_ends_it(rig):
    rig.engine.token = 42
    tokens, last, _ = await generate(rig, stop_token_ids=[41, 42])
    assert tokens == [42] and last.finish_reason == common_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize("token", [99, 42])
async def test_ignore_eos_ignores_all_of_them(rig, token):
    rig.engine.token = token
    tokens, last, _ = await generate(rig, ignore_eos=True, stop_token_ids=[42])
    assert len(tokens) == 3 and last.finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_log_probabilities_come_with_their_tokens(rig):
    rig.engine.logprobs = PositionLogprobs(TokenLogprob(1, -0.5), (TokenLogprob(1, -0.5), TokenLogprob(2, -1.5)))
    _, _, messages = await generate(rig, logprobs=2, max_tokens=2)
    for message in messages[:-1]:
        (position,) = message.logprobs
        assert position.sampled.token_id == 1 and position.sampled.logprob == -0.5
        assert [top.token_id for top in position.top] == [1, 2]
    assert not messages[-1].logprobs


async def test_sampling_reaches_the_engine_and_defaults_are_the_documented_ones(rig):
    await generate(rig, temperature=0.0, top_p=0.5, top_k=7, seed=2**63 + 1, logprobs=0)
    assert rig.engine.plans[0].starts[0].sampling == Sampling(0.0, 0.5, 7, 2**63 + 1, 0)
    steps = len(rig.engine.plans)
    await generate(rig)
    sampling = rig.engine.plans[steps].starts[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (1.0, 1.0, 0, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 0}, "INVALID_REQUEST"),
        ({"max_tokens": 0}, "INVALID_REQUEST"),
        ({"tokens": 100, "max_tokens": 29}, "CONTEXT_LENGTH_EXCEEDED"),
        ({"tokens": 60, "max_tokens": 30}, "EXCEEDS_PAGE_POOL"),
        ({"temperature": -0.1}, "INVALID_REQUEST"),
        ({"temperature": float("nan")}, "INVALID_REQUEST"),
        ({"temperature": float("inf")}, "INVALID_REQUEST"),
        ({"top_p": 0.0}, "INVALID_REQUEST"),
        ({"top_p": 1.1}, "INVALID_REQUEST"),
        ({"top_p": float("nan")}, "INVALID_REQUEST"),
        ({"logprobs": 21}, "INVALID_REQUEST"),
    ],
)
async def test_what_can_never_be_served_is_refused_before_anything_is_held(rig, changes, reason):
    error = await failure(rig.stub.Generate(request(rig, **changes)))
    assert (error.status, error.reason) == ("INVALID_ARGUMENT", reason)
    assert not rig.prefill.runs
    await rig.idle()
    assert total(rig.metrics.requests, outcome=reason.lower()) == 1


async def test_a_token_outside_the_vocabulary_is_refused(rig):
    message = request(rig)
    message.prompt_token_ids[3] = 100
    assert (await failure(rig.stub.Generate(message))).fields == {"token_id": "100"}


async def test_exactly_the_context_is_served(rig):
    tokens, _, _ = await generate(rig, tokens=60, max_tokens=5)
    assert len(tokens) == 5


async def test_the_timeline_says_where_the_time_went(rig):
    call = rig.stub.Generate(request(rig))
    run = await rig.prefill.run()
    rig.agent.fill(run.key)
    stats = common_pb2.TransferStats(bytes=77)
    chunks = [common_pb2.ChunkTiming(tokens=9, compute_us=5)]
    run.succeed(queue_us=6, chunks=chunks, transfer=stats)
    timeline = [message async for message in call][-1].timeline
    assert (timeline.decode_worker, timeline.prefill_worker, timeline.prefill_retries) == ("d0", "p0", 0)
    assert (timeline.prefill_queue_us, list(timeline.chunks), timeline.transfer) == (6, chunks, stats)
    assert timeline.inbox_us > 0 and timeline.first_decode_step_us == 5000
    assert timeline.time_to_first_token_us >= timeline.inbox_us + timeline.reserve_us
    assert timeline.inter_token_us > 0 and not timeline.local_prefill
    await rig.idle()


async def test_whoever_ends_the_generation_itself_knows_the_timeline_so_far(rig):
    rig.engine.automatic = False
    call = rig.stub.Generate(request(rig, max_tokens=4))
    run = await rig.prefill.run()
    rig.agent.fill(run.key)
    messages = []
    for step in range(3):
        await rig.engine.begun(step)
        rig.engine.finish()
        messages.append(await call.read())
        if step == 0:
            run.succeed(queue_us=6)
            await until(lambda: len(rig.worker.background) == 0, "the prefill worker's account")
    first, second, third = messages
    assert first.usage.prompt_tokens == 10 and first.usage.completion_tokens == 1
    assert first.timeline.time_to_first_token_us > 0 and first.timeline.prefill_worker == "p0"
    assert (first.timeline.prefill_queue_us, second.timeline.prefill_queue_us) == (0, 6)
    assert not third.HasField("usage") and not third.HasField("timeline")
    await rig.engine.begun(3)
    call.cancel()
    rig.engine.finish()
    await rig.idle()


async def test_an_account_that_does_not_come_is_left_out(rig, monkeypatch):
    monkeypatch.setattr(module, "ACCOUNT_WAIT_S", 0.01)
    call = rig.stub.Generate(request(rig))
    run = await rig.prefill.run()
    rig.agent.fill(run.key)
    timeline = [message async for message in call][-1].timeline
    assert timeline.prefill_worker == "p0" and not timeline.HasField("transfer")
    run.succeed()
    await rig.idle()


async def test_without_prefill_the_policy_never_is_an_error(rig):
    rig.prefill.script = ["UNAVAILABLE", "UNAVAILABLE"]
    error = await failure(rig.stub.Generate(request(rig)))
    assert (error.status, error.reason) == ("UNAVAILABLE", "PREFILL_UNAVAILABLE")
    assert (await failure(rig.stub.Generate(request(rig, workers=[])))).reason == "PREFILL_UNAVAILABLE"
    await rig.idle()
    assert not rig.engine.plans and total(rig.metrics.local_prefills) == 0


@pytest.mark.parametrize("policy", ["fallback"], indirect=True)
async def test_the_policy_fallback_computes_here_and_counts_it(rig):
    rig.prefill.script = ["UNAVAILABLE", "UNAVAILABLE"]
    tokens, last, _ = await generate(rig, tokens=14)
    assert len(tokens) == 3 and last.timeline.local_prefill
    assert [chunk.tokens for chunk in last.timeline.chunks] == [8, 6]
    assert total(rig.metrics.local_prefills, cause="test") == 1
    assert (await generate(rig, workers=[]))[1].timeline.local_prefill
    assert total(rig.metrics.local_prefills, cause="none_offered") == 1
    assert not (await generate(rig))[1].timeline.local_prefill


@pytest.mark.parametrize("policy", ["fallback"], indirect=True)
@pytest.mark.parametrize("refusal", ["RESOURCE_EXHAUSTED QUEUE_FULL", "INVALID_ARGUMENT EXCEEDS_PAGE_POOL"])
async def test_the_policy_fallback_covers_prefill_workers_without_room(rig, refusal):
    rig.prefill.script = [refusal, refusal]
    tokens, last, _ = await generate(rig)
    assert len(tokens) == 3 and last.timeline.local_prefill
    assert total(rig.metrics.local_prefills, cause=refusal.split()[1].lower()) == 1


@pytest.mark.parametrize("policy", ["fallback"], indirect=True)
async def test_the_policy_fallback_computes_nothing_that_is_wrong(rig):
    rig.prefill.script = ["INVALID_ARGUMENT"]
    assert (await failure(rig.stub.Generate(request(rig)))).reason == "TEST"
    assert not rig.engine.plans


async def test_the_callers_deadline_reaches_the_prefill_worker(rig):
    call = rig.stub.Generate(request(rig), timeout=20)
    run = await rig.prefill.run()
    assert 0 < run.time_left < 21  # the wire has a clock of its own
    call.cancel()
    await rig.idle()


@pytest.mark.parametrize("policy", ["always"], indirect=True)
async def test_the_policy_always_needs_no_agent(rig):
    tokens, last, _ = await generate(rig)
    assert len(tokens) == 3 and last.timeline.local_prefill and last.timeline.prefill_worker == ""
    assert total(rig.metrics.local_prefills) == 0


async def test_a_refusal_by_prefill_passes_through(rig):
    rig.prefill.script = ["INVALID_ARGUMENT"]
    error = await failure(rig.stub.Generate(request(rig)))
    assert (error.status, error.reason) == ("INVALID_ARGUMENT", "TEST")
    await rig.idle()


async def test_a_client_that_leaves_while_its_pages_arrive(rig):
    gate = rig.agent.before["CloseInbox"] = Gate()
    call = rig.stub.Generate(request(rig))
    run = await rig.prefill.run()
    call.cancel()
    await gate.entered.wait()
    await until(lambda: run.cancelled)
    await until(lambda: rig.pool.free == rig.pool.total - 3, "only what a write may touch is held")
    gate.open()
    await rig.idle()
    assert not rig.engine.plans and total(rig.metrics.requests, outcome="cancelled") == 1


async def test_a_client_that_leaves_in_the_queue(rig):
    await rig.host.reserver.reserve("other", 16, None)
    call = rig.stub.Generate(request(rig))
    await until(lambda: rig.host.reserver.waiting)
    call.cancel()
    await until(lambda: not rig.host.reserver.waiting)
    rig.host.reserver.release("other")
    await rig.idle()


async def test_a_client_that_leaves_while_tokens_come(rig):
    rig.engine.automatic = False
    call = rig.stub.Generate(request(rig, tokens=1, max_tokens=40))
    await rig.engine.begun(0)
    rig.engine.finish()
    await rig.engine.begun(1)
    assert list((await call.read()).token_ids) == [1]
    call.cancel()
    await until(lambda: total(rig.metrics.requests, outcome="cancelled") == 1)
    await settle()
    assert rig.pool.free == rig.pool.total - 10  # the step still writes them
    rig.engine.finish()
    await rig.idle()
    assert len(rig.engine.plans) == 2


async def test_a_client_that_leaves_between_two_messages(rig):
    """The generator is suspended where it gave a token; its clean-up must not wait for the garbage collector."""
    servicer = DecodeServicer(rig.worker, rig.worker.section, rig.metrics, None)

    class Context:
        def time_remaining(self):
            return None

    rig.engine.automatic = False
    responses = servicer.Generate(request(rig, tokens=1, max_tokens=9), Context())
    first = asyncio.create_task(anext(responses))
    await rig.engine.begun(0)
    rig.engine.finish()
    await first
    await rig.engine.begun(1)
    await responses.aclose()
    rig.engine.finish()
    await rig.idle()
    assert total(rig.metrics.requests, outcome="cancelled") == 1


async def test_a_failed_step_and_a_dead_engine_are_told(rig):
    rig.engine.automatic = False
    call = rig.stub.Generate(request(rig, tokens=1))
    await rig.engine.begun(0)
    rig.engine.fail()
    error = await failure(call)
    assert (error.status, error.reason) == ("INTERNAL", "STEP_FAILED")
    await rig.idle()
    message = request(rig, tokens=1)
    call = rig.stub.Generate(message)
    await rig.engine.begun(1)
    joining = asyncio.create_task(rig.worker.engines.join())
    rig.engine.die()
    error = await failure(call)
    assert (error.status, error.reason) == ("UNAVAILABLE", "ENGINE_UNAVAILABLE")
    await asyncio.gather(joining, return_exceptions=True)
    assert (await failure(rig.stub.Generate(message))).reason == "ENGINE_UNAVAILABLE"


async def test_an_engine_that_dies_while_the_pages_arrive(rig):
    call = rig.stub.Generate(request(rig))
    run = await rig.prefill.run()
    joining = asyncio.create_task(rig.worker.engines.join())
    rig.engine.die()
    await asyncio.gather(joining, return_exceptions=True)
    error = await failure(call)
    assert (error.status, error.reason) == ("UNAVAILABLE", "ENGINE_UNAVAILABLE")
    await until(lambda: run.cancelled)
    await until(lambda: len(rig.worker.background) == 0)


# --- several engines ------------------------------------------------------------------------------------------------


async def test_requests_are_shared_out_over_the_engines_and_each_arrives_at_its_own(monkeypatch, tmp_path):
    async with decode_rig(monkeypatch, tmp_path, data_parallel=2) as rig:
        calls, runs = [], []
        for number in range(2):
            calls.append(rig.stub.Generate(request(rig)))
            runs.append(await rig.prefill.run(number))
        inboxes = [rig.agent.inboxes[run.key] for run in runs]
        assert [inbox.data_parallel_rank for inbox in inboxes] == [0, 1]
        assert len({inbox.session for inbox in inboxes}) == 1
        for run, call in zip(runs, calls, strict=True):
            rig.agent.fill(run.key)
            run.succeed()
            assert len([message async for message in call]) == 4
        assert [len(engine.plans) for engine in rig.engines.made] == [3, 3]
        # Each has pages of its own: both requests have the same ones.
        first, second = (engine.plans[0].starts[0].pages for engine in rig.engines.made)
        assert first == second
        pools = [host.reserver.pool for host in rig.worker.engines.hosts]
        await until(lambda: all(pool.free == pool.total for pool in pools))


async def test_a_request_must_fit_one_engine(monkeypatch, tmp_path):
    async with decode_rig(monkeypatch, tmp_path, data_parallel=4) as rig:
        error = await failure(rig.stub.Generate(request(rig, tokens=70)))
        assert error.reason == "EXCEEDS_PAGE_POOL" and error.fields["total"] == "16"
