"""Hand-off over a real unix socket, in one process: what the agent takes, refuses and notices."""

import asyncio
import contextlib
import os
import select
import socket
from pathlib import Path

import pytest

from baton_memory import (
    Handoff,
    HandoffConnection,
    HandoffError,
    LayerCounter,
    OfferInvalid,
    SharedMemory,
    SocketInUse,
    SocketPathInvalid,
    hand_over,
)
from baton_memory.errors import SharedMemoryError
from baton_memory.frames import encode_frame
from baton_memory.handoff_server import HandoffServer, ReceivedHandoff
from baton_memory.sockets import clear_stale_socket
from descriptors import open_descriptors

LAYOUT = {
    "order": "HND",
    "layers": 2,
    "pages": 4,
    "page_size": 16,
    "kv_heads": 1,
    "kv_heads_total": 1,
    "head_dim": 8,
    "element_size": 2,
    "dtype": "bfloat16",
}
LENGTH = 2 * 4 * 2 * 16 * 8 * 2
OFFER = Handoff(1, 0, 1, LAYOUT, [{"name": "kv", "length": LENGTH}])


class Refused(SharedMemoryError):
    status = "RESOURCE_EXHAUSTED"
    reason = "NO_ROOM"


class Agent:
    """Keeps what the server reports."""

    def __init__(self, path: Path) -> None:
        self.offers: list[ReceivedHandoff] = []
        self.memories: list[SharedMemory] = []
        self.closed: asyncio.Queue[int] = asyncio.Queue()
        self.refuse = False
        self.server = HandoffServer(str(path), self.take, self.closed.put_nowait)

    async def take(self, received: ReceivedHandoff) -> dict[str, object]:
        if self.refuse:
            raise Refused("no room", pages=3)
        self.offers.append(received)
        self.memories.append(SharedMemory.open(os.dup(received.region_fds[0]), LENGTH))
        return {"incarnation": 99}


@pytest.fixture
async def agent(tmp_path):
    agent = Agent(tmp_path / "handoff.sock")
    await agent.server.start()
    yield agent
    await agent.server.stop()
    await agent.server.close_all()
    for memory in agent.memories:
        memory.close()


@pytest.fixture
def memory():
    with SharedMemory.create("kv", LENGTH) as memory:
        yield memory


@pytest.fixture
def counter():
    counter = LayerCounter.create()
    yield counter
    counter.close()


async def offer(agent: Agent, memory: SharedMemory, counter: LayerCounter, offer: Handoff = OFFER) -> HandoffConnection:
    return await asyncio.to_thread(
        hand_over, agent.server.path, offer, [memory.fd], counter.memory_fd, counter.doorbell_fd
    )


async def test_memory_arrives_and_the_end_is_noticed_on_both_sides(agent, memory, counter):
    connection = await offer(agent, memory, counter)
    assert connection.incarnation == 99
    assert agent.offers[0].offer == OFFER
    memory.buffer[5] = 42
    assert agent.memories[0].buffer[5] == 42
    assert agent.closed.empty()
    connection.close()
    assert await asyncio.wait_for(agent.closed.get(), 5) == agent.offers[0].connection

    connection = await offer(agent, memory, counter)
    assert not select.select([connection], [], [], 0)[0]
    await agent.server.close_all()
    assert select.select([connection], [], [], 5)[0]
    assert await asyncio.wait_for(agent.closed.get(), 5) == agent.offers[1].connection
    connection.close()


async def test_a_refusal_carries_the_agents_words(agent, memory, counter):
    agent.refuse = True
    with pytest.raises(HandoffError, match="no room") as error:
        await offer(agent, memory, counter)
    assert (error.value.status, error.value.reason, error.value.fields) == (
        "RESOURCE_EXHAUSTED",
        "NO_ROOM",
        {"pages": "3"},
    )
    assert agent.closed.empty()


async def test_an_offer_that_no_agent_would_take_is_not_sent(agent, memory, counter):
    with pytest.raises(OfferInvalid):
        await offer(agent, memory, counter, Handoff(1, 1, 1, LAYOUT, OFFER.regions))


async def talk(path: str, data: bytes, fds: list[int] | None = None, finish: bool = False) -> bytes:
    """Sends raw bytes and descriptors; what comes back until the agent closes."""

    def blocking() -> bytes:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(8)
            peer.connect(path)
            socket.send_fds(peer, [data], fds or [])
            if finish:
                peer.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while more := peer.recv(4096):
                    answer += more
            return answer

    return await asyncio.to_thread(blocking)


async def test_malformed_hand_offs_are_refused_and_leave_nothing(agent, memory, counter):
    good = [memory.fd, counter.memory_fd, counter.doorbell_fd]
    null = os.open("/dev/null", os.O_RDWR)
    short = SharedMemory.create("short", LENGTH - 1)
    body = OFFER.to_json()
    before = open_descriptors()
    cases = [
        (b"\0" * 64, [], b"BATN"),
        (encode_frame(body, 3)[:6] + b"\xff\xff" + encode_frame(body, 3)[8:], good, b"at most"),
        (encode_frame(body, 3)[:8] + b"\xff\xff\xff\x7f", good, b"at most"),
        (encode_frame({}, 3), good, b"session"),
        (encode_frame(body, 3)[:-1] + b"]", good, b"not JSON"),
        (encode_frame(body, 3), [], b"0 came"),
        (encode_frame(body, 3), good[:2], b"2 came"),
        (encode_frame(body, 3), [*good, null], b"4 came"),
        (encode_frame(body, 4), [*good, null], b"4 were announced"),
        (encode_frame(body, 3), [null] * 250, b"250 came"),
        (encode_frame(body, 3), [null, *good[1:]], b"not a memfd"),
        (encode_frame(body, 3), [short.fd, *good[1:]], b"fewer than"),
        (encode_frame(body, 3), [good[0], null, good[2]], b"not a memfd"),
        (encode_frame(body, 3), [good[0], good[1], null], b"no eventfd"),
    ]
    for data, fds, says in cases:
        answer = await talk(agent.server.path, data, fds)
        assert says in answer, (says, answer)
        assert b'"ok":false' in answer
    assert b"before the offer was whole" in await talk(agent.server.path, encode_frame(body, 3)[:20], good, finish=True)
    assert open_descriptors() == before
    assert not agent.offers
    assert agent.closed.empty()
    os.close(null)
    short.close()


async def test_bytes_after_the_offer_end_the_session(agent, memory, counter):
    fds = [memory.fd, counter.memory_fd, counter.doorbell_fd]

    def blocking() -> None:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(5)
            peer.connect(agent.server.path)
            socket.send_fds(peer, [encode_frame(OFFER.to_json(), 3)], fds)
            assert b'"ok":true' in peer.recv(4096)
            peer.send(b"more")
            with contextlib.suppress(ConnectionResetError):
                assert peer.recv(1) == b""

    await asyncio.to_thread(blocking)
    await asyncio.wait_for(agent.closed.get(), 5)


async def test_a_silent_connection_is_dropped(agent, monkeypatch):
    monkeypatch.setattr("baton_memory.handoff_server.OFFER_TIMEOUT", 0.05)
    assert await talk(agent.server.path, b"BATN") == b""


async def test_a_path_is_taken_over_from_the_dead_only(agent, tmp_path):
    with pytest.raises(SocketInUse):
        await HandoffServer(agent.server.path, agent.take, print).start()
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))
    clear_stale_socket(str(dead))
    assert not dead.exists()
    plain = tmp_path / "file"
    plain.touch()
    with pytest.raises(SocketPathInvalid):
        clear_stale_socket(str(plain))
    with pytest.raises(SocketPathInvalid, match="99"):
        clear_stale_socket("/tmp/" + "x" * 95)


async def test_no_agent(tmp_path, memory, counter):
    with pytest.raises(HandoffError) as error:
        hand_over(str(tmp_path / "none"), OFFER, [memory.fd], counter.memory_fd, counter.doorbell_fd)
    assert error.value.status == "UNAVAILABLE"


async def test_the_answer_is_awaited_for_as_long_as_mapping_the_memory_may_take(agent, memory, counter, monkeypatch):
    """Any fixed time would be too short for some cache, which would be offered again and again."""
    monkeypatch.setattr("baton_memory.handoff._SECONDS_A_BYTE", 1.0)
    connection = await asyncio.to_thread(
        hand_over, agent.server.path, OFFER, [memory.fd], counter.memory_fd, counter.doorbell_fd, timeout=0.0
    )
    assert connection.incarnation == 99
    connection.close()
