"""One owner of some state: a task that takes messages from a bounded mailbox, one at a time.

    class Counter(Actor):
        @handles
        async def add(self, message: Add) -> int: ...

Messages are told apart by their class; the handler is the method whose first parameter is annotated with it.
"""

import asyncio
import inspect
import logging
import typing
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

from baton_actors.deadline import Deadline

logger = logging.getLogger(__name__)

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


class ActorStopped(Exception):
    """The actor takes no messages: it has stopped, failed, or was never started."""

    status = "UNAVAILABLE"
    reason = "ACTOR_STOPPED"

    def __init__(self, name: str) -> None:
        super().__init__(f"actor {name} is not running")
        self.fields = {"actor": name}


class MailboxFull(Exception):
    """The actor has as many messages waiting as its mailbox holds."""

    status = "RESOURCE_EXHAUSTED"
    reason = "MAILBOX_FULL"

    def __init__(self, name: str, capacity: int) -> None:
        super().__init__(f"the mailbox of actor {name} is full ({capacity} messages); try again later")
        self.fields = {"actor": name, "capacity": str(capacity)}


def handles(method: Handler) -> Handler:
    """Marks the handler of the class that annotates its first parameter; a union is handled whole."""
    method.__handles__ = True  # type: ignore[attr-defined]
    return method


class Actor:
    """State with one owner. Subclasses define handlers, and ``on_start`` and ``on_stop`` if they need them.

    A handler that raises fails the actor, unless the message was an ``ask``: then the asker gets the exception, and
    the actor goes on. Set ``ask_errors_are_fatal`` where state may be half changed by then.
    """

    mailbox_capacity: ClassVar[int] = 10_000
    ask_errors_are_fatal: ClassVar[bool] = False
    _handlers: ClassVar[dict[type, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._handlers = dict(cls._handlers)
        for name, method in list(vars(cls).items()):
            if getattr(method, "__handles__", False):
                for message_type in _message_types(method):
                    cls._handlers[message_type] = name

    def __init__(self, name: str | None = None) -> None:
        self.name = name or type(self).__name__
        self._mailbox: asyncio.Queue[tuple[Any, asyncio.Future[Any] | None]] = asyncio.Queue(self.mailbox_capacity)
        self._task: asyncio.Task[None] | None = None
        self._accepting = False

    async def on_start(self) -> None:
        """Before the first message. What it raises fails the start."""

    async def on_stop(self, error: BaseException | None) -> None:
        """After the last message, also after a failure (``error``). Messages that still wait are dropped."""

    @property
    def running(self) -> bool:
        return self._accepting

    async def start(self) -> None:
        """Returns when ``on_start`` has; raises what it raised. An actor starts once."""
        if self._task is not None:
            raise RuntimeError(f"actor {self.name} was started before; make a new one")
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(started), name=f"actor {self.name}")
        try:
            await started
        except asyncio.CancelledError:
            await self.stop()
            raise

    async def join(self) -> None:
        """Until the actor ends; raises what it failed of. Cancelling the waiter leaves the actor running."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Cancels the current handler, then runs ``on_stop``. Idempotent; raises nothing of the actor's."""
        self._accepting = False
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])

    def tell(self, message: object) -> None:
        """Puts the message into the mailbox and returns at once; raises ActorStopped, MailboxFull, TypeError."""
        self._put(message, None)

    async def ask(self, message: object, timeout: float | None = None) -> Any:
        """The handler's answer, or what it raised.

        Raises DeadlineExceeded after ``timeout`` seconds, ActorStopped, MailboxFull, TypeError. The handler is not
        stopped by the timeout: the actor's state stays its own.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put(message, reply)
        return await Deadline.after(timeout).wait(reply, f"actor {self.name}, {type(message).__name__}")

    def _put(self, message: object, reply: asyncio.Future[Any] | None) -> None:
        self._handler(message)
        if not self._accepting:
            raise ActorStopped(self.name)
        try:
            self._mailbox.put_nowait((message, reply))
        except asyncio.QueueFull:
            raise MailboxFull(self.name, self.mailbox_capacity) from None

    def _handler(self, message: object) -> Callable[[Any], Awaitable[Any]]:
        for base in type(message).__mro__:
            if base in self._handlers:
                return typing.cast(Callable[[Any], Awaitable[Any]], getattr(self, self._handlers[base]))
        known = sorted(kind.__name__ for kind in self._handlers)
        raise TypeError(f"actor {self.name} has no handler for {type(message).__name__}; it handles {known}")

    async def _run(self, started: "asyncio.Future[None]") -> None:
        failure: BaseException | None = None
        try:
            await self.on_start()
            self._accepting = True
            if not started.done():
                started.set_result(None)
            while True:
                await self._serve(*await self._mailbox.get())
        except asyncio.CancelledError:
            # A stop is no failure; but a handler may also have awaited something that was cancelled.
            if self._accepting:
                failure = RuntimeError(f"a handler of actor {self.name} was cancelled from within")
        except BaseException as error:
            failure = error
        self._accepting = False
        try:
            await self.on_stop(failure)
        except Exception as error:
            logger.exception("actor %s failed while stopping", self.name)
            failure = failure or error
        self._drop_waiting()
        if failure is not None:
            if not started.done():
                started.set_exception(failure)
                return
            raise failure
        if not started.done():
            started.set_exception(ActorStopped(self.name))

    async def _serve(self, message: object, reply: "asyncio.Future[Any] | None") -> None:
        if reply is None:
            await self._handler(message)(message)
            return
        try:
            answer = await self._handler(message)(message)
        except Exception as error:
            if not reply.done():
                reply.set_exception(error)
            if self.ask_errors_are_fatal:
                raise
        except BaseException:
            if not reply.done():
                reply.set_exception(ActorStopped(self.name))
            raise
        else:
            if not reply.done():
                reply.set_result(answer)

    def _drop_waiting(self) -> None:
        while not self._mailbox.empty():
            _, reply = self._mailbox.get_nowait()
            if reply is not None and not reply.done():
                reply.set_exception(ActorStopped(self.name))


def _message_types(method: Callable[..., Any]) -> tuple[type, ...]:
    parameters = list(inspect.signature(method).parameters.values())
    if len(parameters) != 2:
        raise TypeError(f"{method.__qualname__}: a handler takes self and one message")
    annotation = typing.get_type_hints(method).get(parameters[1].name)
    kinds = typing.get_args(annotation) or (annotation,)
    if not all(isinstance(kind, type) for kind in kinds):
        raise TypeError(f"{method.__qualname__}: annotate the message with its class, or a union of classes")
    return typing.cast(tuple[type, ...], kinds)
