import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_actors import Actor, ActorStopped, DeadlineExceeded, MailboxFull, handles


@dataclass(frozen=True)
class Add:
    amount: int


@dataclass(frozen=True)
class AddTwice(Add):
    pass


class Total:
    pass


class Wait:
    pass


class Break:
    pass


class Mute:
    pass


class Counter(Actor):
    mailbox_capacity = 3

    def __init__(self):
        super().__init__()
        self.total = 0
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()
        self.log = []

    async def on_start(self):
        self.log.append("start")

    async def on_stop(self, error):
        self.log.append(("stop", type(error).__name__ if error else None))

    @handles
    async def add(self, message: Add) -> None:
        self.total += message.amount

    @handles
    async def read(self, message: Total) -> int:
        return self.total

    @handles
    async def wait(self, message: Wait) -> str:
        self.entered.set()
        await self.gate.wait()
        return "waited"

    @handles
    async def fail(self, message: Break | Mute) -> None:
        if isinstance(message, Mute):
            raise asyncio.CancelledError
        raise ValueError("broken")


@pytest.fixture
async def counter():
    actor = Counter()
    await actor.start()
    yield actor
    await actor.stop()


async def test_messages_are_handled_in_order(counter):
    counter.tell(Add(2))
    counter.tell(AddTwice(3))
    assert await counter.ask(Total()) == 5


@given(st.lists(st.integers(), max_size=3))
def test_an_answer_sees_every_message_told_before(amounts):
    async def main():
        actor = Counter()
        await actor.start()
        for amount in amounts:
            actor.tell(Add(amount))
            await asyncio.sleep(0)
        answer = await actor.ask(Total(), timeout=5)
        await actor.stop()
        return answer

    with asyncio.Runner() as runner:
        assert runner.run(main()) == sum(amounts)


async def test_an_unknown_message_is_the_callers_error(counter):
    with pytest.raises(TypeError, match=r"no handler for str; it handles \['Add', "):
        counter.tell("hello")
    assert counter.running


async def test_the_asker_gets_the_error_and_the_actor_goes_on(counter):
    with pytest.raises(ValueError, match="broken"):
        await counter.ask(Break())
    assert await counter.ask(Total()) == 0


async def test_an_error_without_an_asker_fails_the_actor():
    actor = Counter()
    await actor.start()
    actor.tell(Break())
    waiting = asyncio.ensure_future(actor.ask(Total()))
    with pytest.raises(ValueError, match="broken"):
        await actor.join()
    assert actor.log == ["start", ("stop", "ValueError")]
    with pytest.raises(ActorStopped):
        await waiting
    with pytest.raises(ActorStopped):
        actor.tell(Add(1))


async def test_a_handler_cancelled_from_within_is_a_failure():
    actor = Counter()
    await actor.start()
    actor.tell(Mute())
    with pytest.raises(RuntimeError, match="cancelled from within"):
        await actor.join()


async def test_the_mailbox_is_bounded(counter):
    asked = asyncio.ensure_future(counter.ask(Wait()))
    await counter.entered.wait()
    with pytest.raises(MailboxFull) as caught:
        for _ in range(5):
            counter.tell(Add(1))
    assert caught.value.fields == {"actor": "Counter", "capacity": "3"}
    counter.gate.set()
    assert await asked == "waited"


async def test_ask_gives_up_but_the_handler_goes_on(counter):
    with pytest.raises(DeadlineExceeded, match="actor Counter, Wait"):
        await counter.ask(Wait(), timeout=0.01)
    counter.gate.set()
    assert await counter.ask(Total(), timeout=5) == 0


async def test_stop_cancels_the_handler_and_answers_who_waits(counter):
    asked = [asyncio.ensure_future(counter.ask(message)) for message in (Wait(), Total())]
    await counter.entered.wait()
    await counter.stop()
    for answer in asked:
        with pytest.raises(ActorStopped):
            await answer
    assert counter.log[-1] == ("stop", None)
    await counter.stop()


async def test_a_start_that_fails_raises_and_stops():
    class Fragile(Counter):
        async def on_start(self):
            raise OSError("no disk")

    actor = Fragile()
    with pytest.raises(OSError, match="no disk"):
        await actor.start()
    assert actor.log == [("stop", "OSError")]
    assert not actor.running


async def test_handlers_are_inherited_and_may_be_replaced():
    class Doubling(Counter):
        @handles
        async def add(self, message: Add) -> None:
            self.total += 2 * message.amount

    actor = Doubling()
    await actor.start()
    actor.tell(Add(4))
    assert await actor.ask(Total()) == 8
    await actor.stop()


def test_a_handler_without_a_message_class_is_refused():
    with pytest.raises(TypeError, match="annotate the message"):

        class Wrong(Actor):
            @handles
            async def receive(self, message) -> None: ...
