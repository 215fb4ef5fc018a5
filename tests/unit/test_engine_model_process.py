"""The loop of a model process, over sockets of a test's."""

from __future__ import annotations

import selectors
import socket

import msgspec

import baton_engine.offering
from baton_engine.framing import FrameDecoder, encode_frame
from baton_engine.messages import AgentLost, Attach, Attached, FromModel
from baton_engine.model_process import ModelProcess


class WorkerFirst(selectors.DefaultSelector):
    """Tells of the worker first, as epoll may if both became readable during a step."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return sorted(super().select(timeout), key=lambda found: found[0].data != "worker")


def test_the_end_of_an_agent_that_was_just_replaced_does_not_end_its_successors_session(monkeypatch):
    worker, ours = socket.socketpair()
    former_agent, former = socket.socketpair()
    agent, connection = socket.socketpair()
    monkeypatch.setattr(baton_engine.offering, "offer_cache", lambda *_: connection)
    process = ModelProcess(ours, load_model=None)
    process._executor = process._info = process._spec = object()
    process._selector = WorkerFirst()
    process._selector.register(ours, selectors.EVENT_READ, "worker")
    process._selector.register(former, selectors.EVENT_READ)
    process._agent = former, 1
    # During a step: the agent goes, and the worker, which saw it too, asks to attach to the next one.
    former_agent.close()
    worker.sendall(encode_frame(msgspec.msgpack.encode(Attach("/next", 2))))
    worker.shutdown(socket.SHUT_WR)
    process.run()
    ours.close()
    told = b""
    while data := worker.recv(1 << 16):
        told += data
    answers = [msgspec.msgpack.decode(frame, type=FromModel) for frame in FrameDecoder().feed(told)]
    assert answers == [AgentLost(1), Attached(2)]
    assert process._agent == (connection, 2)
    for end in (worker, agent, connection):
        end.close()
