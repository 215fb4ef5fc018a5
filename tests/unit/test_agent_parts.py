"""The agent's pure parts: liveness, the log of events, and descriptors on the wire."""

import asyncio

import pytest
from baton.v1 import agent_pb2, common_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton_agent.errors import EventsOverflow, InvalidArgument, VersionUnsupported
from baton_agent.event_log import EventLog
from baton_agent.liveness import Answer, Beat, Liveness, Verdict
from baton_agent.wire import cache_of, read_agent, read_inbox, read_pages, sharding_message
from baton_kv.errors import InvalidKvArgument
from baton_kv.layout import PageLayout
from baton_kv.plan import LayoutMismatch
from baton_rpc.layouts import layout_message
from conditions import until

ANSWERS = st.lists(st.sampled_from([Answer.ALIVE, Answer.REFUSED, Answer.SILENT]), max_size=60)


# --- liveness ---------------------------------------------------------------------------------------------------------


@given(ANSWERS, st.integers(1, 6))
def test_a_peer_is_lost_after_so_many_misses_in_a_row_and_not_before(answers, limit):
    liveness = Liveness(interval=1.0, limit=limit, retry=0.1)
    row = 0
    for answer in answers:
        beat = liveness.judge(answer)
        row = 0 if answer is Answer.ALIVE else row + 1
        assert (beat.verdict is Verdict.LOST) == (row >= limit)
        if row >= limit:
            return


@given(ANSWERS)
def test_another_incarnation_is_told_apart_at_once(answers):
    liveness = Liveness(1.0, 1000, 0.1)
    for answer in answers:
        liveness.judge(answer)
    assert liveness.judge(Answer.RESTARTED) == Beat(Verdict.RESTARTED, 0.0)


def test_what_is_refused_at_once_is_asked_again_soon():
    liveness = Liveness(interval=1.0, limit=10, retry=0.1)
    assert liveness.judge(Answer.ALIVE).wait == 1.0
    assert liveness.judge(Answer.REFUSED).wait == 0.1
    # A timeout has waited already.
    assert liveness.judge(Answer.SILENT).wait == 0.0
    assert Liveness(0.01, 10, 0.1).judge(Answer.REFUSED).wait == 0.01


# --- the log of events ------------------------------------------------------------------------------------------------


def full(number: int) -> agent_pb2.InboxFull:
    return agent_pb2.InboxFull(slot=number, generation=1)


def slots(events: list[agent_pb2.AgentEvent]) -> list[int]:
    return [event.inbox_full.slot for event in events]


async def test_events_wait_for_their_reader_and_end_with_the_session():
    log = EventLog(lambda: pytest.fail("no overflow"))
    for number in range(3):
        log.emit(inbox_full=full(number))
    log.end()
    log.emit(inbox_full=full(9))
    assert slots([event async for event in log.read()]) == [0, 1, 2]
    assert len(log) == 0


async def test_what_a_broken_stream_may_not_have_delivered_comes_again():
    log = EventLog(lambda: None)
    for number in range(3):
        log.emit(inbox_full=full(number))
    stream = log.read()
    assert slots([await anext(stream), await anext(stream)]) == [0, 1]
    await stream.aclose()
    log.end()
    assert slots([event async for event in log.read()]) == [0, 1, 2]


async def test_a_newer_reader_takes_over_from_one_that_waits():
    log = EventLog(lambda: None)
    seen: list[list[agent_pb2.AgentEvent]] = [[], []]

    async def read(place: int) -> None:
        async for event in log.read():
            seen[place].append(event)

    first = asyncio.create_task(read(0))
    log.emit(inbox_full=full(0))
    await until(lambda: not len(log))
    second = asyncio.create_task(read(1))
    async with asyncio.timeout(5):
        await first
        log.emit(inbox_full=full(1))
        log.end()
        await second
    assert [slots(events) for events in seen] == [[0], [0, 1]]


async def test_an_overflow_is_told_once_and_never_hidden():
    told: list[bool] = []
    log = EventLog(lambda: told.append(True), limit=2)
    for number in range(5):
        log.emit(inbox_full=full(number))
    assert told == [True]
    got: list[agent_pb2.AgentEvent] = []
    with pytest.raises(EventsOverflow):
        async for event in log.read():
            got += [event]
    assert slots(got) == [0, 1]


# --- descriptors ------------------------------------------------------------------------------------------------------

layouts = st.builds(
    PageLayout,
    order=st.sampled_from(["HND", "NHD"]),
    layers=st.integers(1, 100),
    pages=st.integers(1, 10_000),
    page_size=st.integers(1, 64),
    kv_heads=st.integers(1, 16),
    head_dim=st.integers(1, 256),
    element_size=st.sampled_from([1, 2, 4]),
)


@given(layouts, st.integers(1, 4), st.integers(1, 3), st.data())
def test_an_inbox_descriptor_says_the_same_at_the_other_side(layout, copies, dp, data):
    tp = layout.kv_heads * copies if data.draw(st.booleans()) else data.draw(st.integers(1, layout.kv_heads))
    cache = cache_of(layout, layout.kv_heads, tp, dp, "float32")
    ranks = cache.shards.ranks
    lengths = [cache.shards.layout_of(rank, cache.layout).region_bytes for rank in range(ranks)]
    message = agent_pb2.InboxDescriptor(
        version=2,
        receiver=common_pb2.AgentDescriptor(
            version=1, incarnation=5, control_address="127.0.0.1:1", transport="tcp", node="n"
        ),
        slot=3,
        generation=300,
        endpoints=[b"address", b"another"],
        domains=[5, 2],
        regions=[
            common_pb2.RegionDescriptor(
                rank=rank,
                length=length,
                accesses=[
                    common_pb2.RegionAccess(domain=domain, key=10 * rank + domain, base=domain) for domain in (2, 5)
                ],
            )
            for rank, length in reversed(list(enumerate(lengths)))
        ],
        layout=layout_message(cache.layout, cache.dtype, cache.shards.heads),
        sharding=sharding_message(cache),
        data_parallel_rank=dp - 1,
        sender_incarnation=9,
    )
    own = common_pb2.AgentDescriptor(version=1, incarnation=9, control_address="127.0.0.1:2", transport="tcp")
    inbox = read_inbox(agent_pb2.InboxDescriptor.FromString(message.SerializeToString()), own)
    assert inbox.cache == cache
    assert inbox.key == (5, 3, 300)
    assert inbox.endpoints == (b"address", b"another")
    for number, rank in enumerate(inbox.ranks):
        (region,) = rank.regions
        # Only those of the data-parallel rank that receives.
        written = number // tp == dp - 1
        assert region.accesses == (((1, 10 * number + 2, 2), (0, 10 * number + 5, 5)) if written else ())
    assert [rank.regions[0].length for rank in inbox.ranks] == lengths


def test_a_latent_cache_goes_over_the_wire():
    layout = PageLayout("MLA", 2, 3, 4, 1, 576, 2)
    cache = cache_of(layout, 1, 4, 1, "bfloat16")
    assert layout_message(cache.layout, cache.dtype, cache.shards.heads).kv_heads == 1
    assert cache.shards.replicas == 4


def pages_of(pages, page_size=4):
    return PageLayout("HND", 2, pages, page_size, 1, 8, 4)


@pytest.mark.parametrize(
    ("source", "destination", "says"),
    [
        ([1], [1, 2], "one for one"),
        ([10], [0], "source_pages"),
        ([0], [20], "destination_pages"),
        ([0] * 6, [0] * 6, "5"),
    ],
)
def test_pages_are_checked_on_both_sides(source, destination, says):
    with pytest.raises((InvalidArgument, InvalidKvArgument), match=says):
        read_pages(source, destination, pages_of(10), pages_of(20), 0, 5)
    assert read_pages([9], [19], pages_of(10), pages_of(20), 0, 5) == ([9], [19])
    assert read_pages([], [], pages_of(10), pages_of(20), 0, 5) == ([], [])


def test_pages_of_two_sizes_are_numbered_in_the_smaller():
    small, large = pages_of(10), pages_of(20, page_size=8)
    assert read_pages([3, 4, 5], [19, 2], small, large, 0, 5) == ([3, 4, 5], [38, 39, 4])
    assert read_pages([19, 2], [3, 4], large, small, 4, 5) == ([39, 4], [3, 4])
    with pytest.raises(LayoutMismatch, match="divide"):
        read_pages([0], [0], small, pages_of(10, page_size=6), 0, 5)
    with pytest.raises(InvalidArgument, match="32 bits"):
        read_pages([3], [2**31], small, pages_of(2**32 - 1, page_size=8), 0, 5)


def test_a_version_from_the_future_is_refused():
    with pytest.raises(VersionUnsupported, match="knows 1") as error:
        read_agent(common_pb2.AgentDescriptor(version=2), "tcp")
    assert error.value.status == "FAILED_PRECONDITION"
