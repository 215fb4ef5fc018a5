import asyncio
from collections import Counter

from baton.v1 import agent_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_engine.messages import StepItem, StepPlan
from baton_engine.scheduler import Scheduler, Sequence
from baton_kv.plan import pages_to_transfer
from baton_prefill.sender import KvSender, Outgoing
from baton_worker.agent_session import Transfer
from baton_worker.background import BackgroundTasks
from baton_worker.errors import AgentUnavailable
from conditions import settle
from fake_engine import result_of


class Session:
    """Takes plans as AgentSession does."""

    def __init__(self):
        self.steps = []
        self.gate = None
        self.error = None
        self.cancelled = []
        self.lost = asyncio.get_running_loop().create_future()

    async def submit_step(self, step, chunks):
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.steps.append((step, list(chunks)))

    async def cancel_transfer(self, transfer):
        self.cancelled.append(transfer.transfer)


# A step that was done before all others, in which what is cached was computed.
DONE = -1


def outgoing(session, number, tokens, prefix=0, page_size=4):
    return Outgoing(session, Transfer(number, asyncio.get_running_loop().create_future()), tokens, prefix, page_size)


prompts = st.lists(
    # Tokens, pages of the prefix at the destination, pages that are cached here, arrival.
    st.tuples(st.integers(2, 60), st.integers(0, 14), st.integers(0, 14), st.integers(0, 5)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150)
@given(prompts=prompts, page_size=st.integers(1, 7), chunk_tokens=st.integers(1, 23))
def test_chunk_plans_cover_each_page_once_and_only_when_it_is_complete(prompts, page_size, chunk_tokens):
    async def run():
        scheduler = Scheduler(chunk_tokens=chunk_tokens, max_batch=4, page_size=page_size)
        session = Session()
        sender = KvSender(BackgroundTasks())
        arrivals = {}
        for number, (tokens, prefix_pages, cached_pages, arrival) in enumerate(prompts, 1):
            prefix = min(prefix_pages, tokens // page_size) * page_size
            cached = min(cached_pages, (tokens - 1) // page_size) * page_size
            arrivals.setdefault(arrival, []).append((number, tokens, prefix, cached))
        sent = {}
        computed = {}
        step = 0
        while arrivals or scheduler.running or scheduler.waiting:
            for number, tokens, prefix, cached in arrivals.pop(step, []):
                pages = range(-(-(tokens - 1) // page_size))
                sender.track(number, outgoing(session, number, tokens, prefix, page_size))
                if cached:
                    sender.send_cached(outgoing(session, number, tokens, prefix, page_size), cached, DONE)
                if cached < tokens - 1:
                    scheduler.add(Sequence(number, (0,) * tokens, tuple(pages), computed=cached, prefill_only=True))
                computed[number] = cached
                sent[number] = (Counter(), tokens, prefix, cached, [])
            step += 1
            plan = scheduler.next_step()
            if plan is not None:
                sender.before_step(plan)
                for item in plan.items:
                    computed[item.sequence_id] = item.end
            await settle(4)
            for told, chunks in session.steps:
                for chunk in chunks:
                    counter, tokens, prefix, cached, lasts = sent[chunk.transfer]
                    assert not lasts, "nothing follows the last chunk"
                    for page in range(chunk.first_page, chunk.first_page + chunk.pages):
                        counter[page] += 1
                        # The page's last position is in the cache after this step.
                        end = min((page + 1 + prefix // page_size) * page_size, tokens - 1)
                        assert end <= (cached if told == DONE else computed[chunk.transfer])
                    lasts += [True] * chunk.last
            session.steps.clear()
            if plan is not None:
                scheduler.complete(result_of(plan))
        for counter, tokens, prefix, _, lasts in sent.values():
            assert counter == Counter(range(pages_to_transfer(tokens, prefix, page_size)))
            assert lasts == [True]

    asyncio.run(run())


def plan(step, *items):
    return StepPlan(step, tuple(StepItem(number, start, (0,) * count, False, True) for number, start, count in items))


async def test_a_step_is_one_call_for_each_session_and_strangers_are_left_out():
    sender = KvSender(BackgroundTasks())
    first, second = Session(), Session()
    sender.track(1, outgoing(first, 11, 9))
    sender.track(2, outgoing(first, 22, 9))
    sender.track(3, outgoing(second, 33, 9))
    sender.before_step(plan(0, (1, 0, 8), (2, 0, 4), (3, 0, 3), (4, 0, 4)))
    await settle()
    assert first.steps == [
        (
            0,
            [
                agent_pb2.ChunkPlan(transfer=11, first_page=0, pages=2, last=True),
                agent_pb2.ChunkPlan(transfer=22, first_page=0, pages=1),
            ],
        )
    ]
    assert second.steps == []  # no page is complete
    sender.forget(1)
    sender.before_step(plan(1, (1, 0, 8)))
    await settle()
    assert len(first.steps) == 1


async def test_a_step_that_could_not_be_announced_breaks_its_transfers_only():
    sender, session = KvSender(BackgroundTasks()), Session()
    broken, whole = outgoing(session, 11, 13), outgoing(session, 22, 13)
    sender.track(1, broken)
    sender.track(2, whole)
    session.error = AgentUnavailable("mute")
    sender.before_step(plan(0, (1, 0, 4)))
    await settle()
    session.error = None
    sender.before_step(plan(1, (2, 0, 4)))
    await settle()
    assert broken.broken.result() == "mute" and not whole.broken.done()
    assert [step for step, _ in session.steps] == [1]


async def test_a_failed_step_cancels_the_transfers_in_it():
    sender, session = KvSender(BackgroundTasks()), Session()
    inside, outside = outgoing(session, 11, 13), outgoing(session, 22, 13)
    sender.track(1, inside)
    sender.track(2, outside)
    await sender.after_failed_step(plan(3, (1, 0, 4), (9, 0, 4)))
    assert session.cancelled == [11]
    assert "step 3" in inside.broken.result() and not outside.broken.done()


async def test_a_failed_step_waits_for_an_agent_until_its_session_is_lost():
    sender, session = KvSender(BackgroundTasks()), Session()
    sender.track(1, outgoing(session, 11, 13))

    async def unavailable(transfer):
        raise AgentUnavailable("mute")

    session.cancel_transfer = unavailable
    hook = asyncio.create_task(sender.after_failed_step(plan(0, (1, 0, 4))))
    await settle()
    assert not hook.done()
    session.lost.set_result("gone")
    await hook
