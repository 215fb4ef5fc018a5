"""Two agents, an unreliable network and a fabric, in every order of events that Hypothesis finds.

The receiver's pool, slots and lives and the sender's tombstones and lives are the real ones; the fabric and the network
are models that behave as badly as the real ones may. Bytes land where they were aimed at, whoever owns the page then:
so a mistake about reuse shows as a page that is not its writer's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton_kv.pool import PagePool
from baton_kv.transfer import inbox, sending
from baton_kv.transfer.inbox import AskStop, Fence, InboxLife, Reusable
from baton_kv.transfer.outcome import Ended, Outcome, Proof
from baton_kv.transfer.sending import CancelWrites, Disconnect, TellReceiver, TransferLife
from baton_kv.transfer.slots import SlotTable
from baton_kv.transfer.tombstones import Tombstones

PAGES, SLOTS = 7, 2
ROUNDS = 12
# How a command that opens something goes.
ANSWERS = st.sampled_from(["works"] * 6 + ["later", "fails"])
RARELY = st.sampled_from([False] * 3 + [True])

# (receiver incarnation, slot, generation): names a transfer between agents.
Key = tuple[int, int, int]


@dataclass(eq=False)
class Endpoint:
    """Where one sender incarnation writes. Closing it is the fence."""

    sender: int
    open: bool = True


@dataclass(eq=False)
class Inbox:
    life: InboxLife
    endpoint: Endpoint
    pages: list[int]
    arrived: int = 0
    ended: Counter[type] = field(default_factory=Counter)


@dataclass(eq=False)
class Transfer:
    life: TransferLife
    endpoint: Endpoint
    to_write: list[int]
    # At the engine: "", "open", "cancelling", "over".
    engine: str = ""
    stop_waiters: int = 0
    ended: Counter[type] = field(default_factory=Counter)


@dataclass(eq=False)
class Write:
    key: Key
    endpoint: Endpoint
    page: int


class Receiver:
    """The receiving node: agent and decode worker."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.pool = PagePool(PAGES)
        self.slots = SlotTable(SLOTS)
        self.inboxes: dict[Key, Inbox] = {}
        self.endpoints: list[Endpoint] = []
        self.fencing: list[Endpoint] = []
        self.memory: list[Key | None] = [None] * PAGES
        # From the engine, not yet delivered.
        self.full: list[Key] = []


class Sender:
    """The sending node: agent and prefill worker."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.tombstones = Tombstones(limit=4)
        self.transfers: dict[Key, Transfer] = {}
        # From the engine, not yet delivered: done, failed, cancelled.
        self.events: list[tuple[Key, str]] = []


def owner(key: Key) -> Hashable:
    return ("transfer", *key)


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.incarnations = 2
        self.receiver, self.sender = Receiver(1), Sender(2)
        self.invitations: list[tuple[int, Key, Endpoint, tuple[int, ...]]] = []
        # (to incarnation, kind, key, quiesced)
        self.messages: list[tuple[int, str, Key, bool]] = []
        self.in_flight: list[Write] = []
        self.now = 0.0
        self.mute = False
        self.fence_failures = 0

    @initialize(mute=st.booleans(), fence_failures=st.integers(0, 2))
    def environment(self, mute: bool, fence_failures: int) -> None:
        """How the world behaves at the end, when everything has to settle."""
        self.mute, self.fence_failures = mute, fence_failures

    # --- the receiving node ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.receiver.pool.free >= 3 and self.receiver.slots.in_use < SLOTS)
    @rule(count=st.integers(1, 3), answer=ANSWERS)
    def open_inbox(self, count: int, answer: str) -> None:
        receiver = self.receiver
        slot, generation = receiver.slots.open()
        key = (receiver.incarnation, slot, generation)
        mine = [place for place in receiver.endpoints if place.open and place.sender == self.sender.incarnation]
        if not mine:
            mine = [Endpoint(self.sender.incarnation)]
            receiver.endpoints += mine
        receiver.inboxes[key] = Inbox(InboxLife(), mine[0], receiver.pool.allocate(count, owner(key)))
        if answer != "later":
            self._finish_inbox_opening(key, answer == "works")

    @precondition(lambda self: self._inboxes(inbox.Stage.OPENING))
    @rule(data=st.data())
    def finish_inbox_opening(self, data: st.DataObject) -> None:
        self._finish_inbox_opening(data.draw(st.sampled_from(self._inboxes(inbox.Stage.OPENING))), True)

    def _finish_inbox_opening(self, key: Key, works: bool) -> None:
        box = self.receiver.inboxes[key]
        self._act(key, box.life.opened() if works and box.endpoint.open else box.life.open_failed("NO_ENDPOINT"))
        if box.life.stage is inbox.Stage.RECEIVING:
            self.invitations.append((box.endpoint.sender, key, box.endpoint, tuple(box.pages)))

    @precondition(lambda self: self.receiver.inboxes)
    @rule(data=st.data())
    def close_inbox(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self._inboxes()))
        self._act(key, self.receiver.inboxes[key].life.close())

    @precondition(lambda self: self._inboxes(inbox.Stage.UNPROVEN))
    @rule(data=st.data())
    def retry_fence(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self._inboxes(inbox.Stage.UNPROVEN)))
        self._act(key, self.receiver.inboxes[key].life.retry_fence())

    @precondition(lambda self: self._inboxes(inbox.Stage.STOP_REQUESTED))
    @rule(data=st.data())
    def stop_times_out(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self._inboxes(inbox.Stage.STOP_REQUESTED)))
        self._act(key, self.receiver.inboxes[key].life.stop_failed())

    @precondition(lambda self: self.receiver.fencing)
    @rule(works=st.sampled_from([True, True, False]))
    def finish_fence(self, works: bool) -> None:
        endpoint = self.receiver.fencing.pop(0)
        if works:
            self._close_endpoint(endpoint)
        for key, box in list(self.receiver.inboxes.items()):
            if box.endpoint is endpoint:
                self._act(key, box.life.fenced() if works else box.life.fence_failed())

    @precondition(lambda self: self.receiver.full)
    @rule()
    def deliver_full(self) -> None:
        key = self.receiver.full.pop(0)
        if key in self.receiver.inboxes:
            self._act(key, self.receiver.inboxes[key].life.full())

    # --- the sending node --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.invitations)
    @rule(data=st.data(), again=st.booleans(), answer=ANSWERS)
    def open_transfer(self, data: st.DataObject, again: bool, answer: str) -> None:
        """At once, or long after the inbox was closed; perhaps more than once."""
        self._open_transfer(data.draw(st.integers(0, len(self.invitations) - 1)), again, answer)

    def _open_transfer(self, index: int, again: bool, answer: str) -> None:
        invited, key, endpoint, pages = self.invitations[index]
        if not again:
            del self.invitations[index]
        sender = self.sender
        if invited == sender.incarnation and key not in sender.transfers and not sender.tombstones.is_dead(*key):
            sender.transfers[key] = Transfer(TransferLife(), endpoint, list(pages))
            if answer != "later":
                self._finish_transfer_opening(key, answer == "works")

    @precondition(lambda self: self._transfers(sending.Stage.OPENING))
    @rule(data=st.data())
    def finish_transfer_opening(self, data: st.DataObject) -> None:
        self._finish_transfer_opening(data.draw(st.sampled_from(self._transfers(sending.Stage.OPENING))), True)

    def _finish_transfer_opening(self, key: Key, works: bool) -> None:
        transfer = self.sender.transfers[key]
        if works and transfer.endpoint.open:
            transfer.engine = "open"
            self._do(key, transfer.life.opened())
        else:
            self._do(key, transfer.life.open_failed("CANNOT_CONNECT"))

    @precondition(lambda self: self._ready())
    @rule(data=st.data(), writes=st.integers(1, 3))
    def post(self, data: st.DataObject, writes: int) -> None:
        self._post(data.draw(st.sampled_from(self._ready())), writes)

    def _post(self, key: Key, writes: int) -> None:
        transfer = self.sender.transfers[key]
        for _ in range(min(writes, len(transfer.to_write))):
            self.in_flight.append(Write(key, transfer.endpoint, transfer.to_write.pop(0)))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """In any order: several NICs, or a provider that keeps none."""
        self._land(data.draw(st.integers(0, len(self.in_flight) - 1)))

    def _land(self, index: int) -> None:
        write = self.in_flight.pop(index)
        receiver = self.receiver
        assert owner(write.key) in receiver.pool.owners and write.page in receiver.pool.pages_of(owner(write.key))
        receiver.memory[write.page] = write.key
        box = receiver.inboxes[write.key]
        box.arrived += 1
        if box.arrived == len(box.pages):
            receiver.full.append(write.key)

    @precondition(lambda self: self._drained())
    @rule(data=st.data())
    def engine_finishes(self, data: st.DataObject) -> None:
        self._engine_finishes(data.draw(st.sampled_from(self._drained())))

    def _engine_finishes(self, key: Key) -> None:
        transfer = self.sender.transfers[key]
        transfer.engine = "over"
        self.sender.events.append((key, "cancelled" if transfer.to_write else "done"))

    @precondition(lambda self: self.sender.events)
    @rule()
    def deliver_engine_event(self) -> None:
        key, event = self.sender.events.pop(0)
        transfer = self.sender.transfers.get(key)
        if transfer is None:
            return
        match event:
            case "done":
                self._do(key, transfer.life.done())
            case "cancelled":
                self._do(key, transfer.life.cancelled(True))
            case _:
                self._do(key, transfer.life.failed("WRITE_FAILED", False))

    @precondition(lambda self: self.sender.transfers)
    @rule(data=st.data())
    def cancel_transfer(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self._transfers()))
        self._do(key, self.sender.transfers[key].life.cancel())

    @precondition(lambda self: self._transfers(sending.Stage.CANCELLING))
    @rule(data=st.data())
    def drain_expires(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self._transfers(sending.Stage.CANCELLING)))
        self._do(key, self.sender.transfers[key].life.drain_expired())

    # --- between them ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), fate=st.sampled_from(["delivered", "delivered", "twice", "lost"]))
    def message(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.messages) - 1))
        message = self.messages[index]
        if fate != "twice":
            del self.messages[index]
        if fate != "lost":
            self._deliver(message)

    def _deliver(self, message: tuple[int, str, Key, bool]) -> None:
        to, kind, key, quiesced = message
        if kind == "stop":
            if to == self.sender.incarnation:
                self._stop(key)
            elif key in self.receiver.inboxes:
                # Another incarnation answers that it is not the one meant.
                self._act(key, self.receiver.inboxes[key].life.stop_failed())
        elif to == self.receiver.incarnation and key in self.receiver.inboxes:
            life = self.receiver.inboxes[key].life
            self._act(key, life.stop_answered(quiesced) if kind == "stopped" else life.aborted("ABORTED", quiesced))

    def _stop(self, key: Key) -> None:
        sender = self.sender
        transfer = sender.transfers.get(key)
        if transfer is None:
            quiesced = sender.tombstones.is_quiesced(*key)
            sender.tombstones.bury(*key)
            self.messages.append((key[0], "stopped", key, quiesced))
        else:
            transfer.stop_waiters += 1
            self._do(key, transfer.life.stop())

    @precondition(lambda self: self.in_flight)
    @rule()
    def connections_break(self) -> None:
        """What is in flight may still land: only the receiver can close its endpoint."""
        for endpoint in {transfer.endpoint for transfer in self.sender.transfers.values()}:
            self._break_connection(endpoint)

    @precondition(lambda self: self.receiver.inboxes)
    @rule(
        what=st.sampled_from(["sender dead?", "receiver dead?", "sender restarts", "receiver restarts"]), happens=RARELY
    )
    def disaster(self, what: str, happens: bool) -> None:
        """Agents restart, or are taken for dead rightly or wrongly."""
        if not happens:
            return
        match what:
            case "sender dead?":
                for key, box in list(self.receiver.inboxes.items()):
                    self._act(key, box.life.peer_lost("PEER_LOST"))
            case "receiver dead?":
                for key, transfer in list(self.sender.transfers.items()):
                    self._do(key, transfer.life.peer_lost("PEER_LOST"))
            case "sender restarts":
                # Writes that the kernel has taken are still under way.
                self.incarnations += 1
                self.sender = Sender(self.incarnations)
            case _:
                for endpoint in self.receiver.endpoints:
                    self._close_endpoint(endpoint)
                self.incarnations += 1
                self.receiver = Receiver(self.incarnations)

    # --- what is where -----------------------------------------------------------------------------------------------

    def _inboxes(self, stage: inbox.Stage | None = None) -> list[Key]:
        return sorted(key for key, box in self.receiver.inboxes.items() if stage in (None, box.life.stage))

    def _transfers(self, stage: sending.Stage | None = None) -> list[Key]:
        return sorted(key for key, transfer in self.sender.transfers.items() if stage in (None, transfer.life.stage))

    def _ready(self) -> list[Key]:
        """Transfers that the engine has something to write for."""
        transfers = self.sender.transfers
        return [key for key in sorted(transfers) if transfers[key].engine == "open" and transfers[key].to_write]

    def _drained(self) -> list[Key]:
        """Transfers that the engine can end: nothing in flight, and nothing to come."""
        flying = {write.key for write in self.in_flight}
        return [
            key
            for key, transfer in sorted(self.sender.transfers.items())
            if key not in flying
            and (transfer.engine == "cancelling" or (transfer.engine == "open" and not transfer.to_write))
        ]

    # --- carrying out ------------------------------------------------------------------------------------------------

    def _act(self, key: Key, actions: list[inbox.Action]) -> None:
        receiver = self.receiver
        box = receiver.inboxes[key]
        for action in actions:
            box.ended[type(action)] += 1
            match action:
                case AskStop():
                    self.messages.append((box.endpoint.sender, "stop", key, False))
                case Fence():
                    receiver.fencing.append(box.endpoint)
                case Ended(outcome, _, quiesced):
                    if outcome is Outcome.DONE:
                        assert [receiver.memory[page] for page in box.pages] == [key] * len(box.pages)
                    if not quiesced:
                        receiver.pool.quarantine(owner(key), "fence failed", self.now)
                case Reusable(proof):
                    receiver.slots.release(key[1], key[2], proof)
                    if owner(key) in receiver.pool.quarantines:
                        receiver.pool.release_quarantine(owner(key))
                    else:
                        receiver.pool.release(owner(key))
                    del receiver.inboxes[key]
                    assert (box.ended[Ended], box.ended[Reusable]) == (1, 1)
                    assert proof is not Proof.FULL or box.arrived == len(box.pages)

    def _do(self, key: Key, actions: list[sending.Action]) -> None:
        sender = self.sender
        transfer = sender.transfers[key]
        for action in actions:
            transfer.ended[type(action)] += 1
            match action:
                case CancelWrites():
                    if transfer.engine == "open":
                        transfer.engine = "cancelling"
                case Disconnect():
                    self._break_connection(transfer.endpoint)
                case TellReceiver(_, quiesced):
                    self.messages.append((key[0], "aborted", key, quiesced))
                case Ended(_, _, quiesced):
                    assert transfer.engine in ("", "over")
                    del sender.transfers[key]
                    sender.tombstones.bury(*key, quiesced=quiesced)
                    sender.tombstones.forget(keep={open_key[0] for open_key in sender.transfers})
                    self.messages += [(key[0], "stopped", key, quiesced)] * transfer.stop_waiters
        assert transfer.ended[Ended] <= 1 and transfer.ended[TellReceiver] <= transfer.ended[Ended]

    def _break_connection(self, endpoint: Endpoint) -> None:
        for key, transfer in self.sender.transfers.items():
            if transfer.endpoint is endpoint and transfer.engine in ("open", "cancelling"):
                transfer.engine = "over"
                self.sender.events.append((key, "failed"))

    def _close_endpoint(self, endpoint: Endpoint) -> None:
        endpoint.open = False
        self.in_flight = [write for write in self.in_flight if write.endpoint is not endpoint]
        self._break_connection(endpoint)

    # --- what must hold ----------------------------------------------------------------------------------------------

    def _writers(self) -> Iterable[tuple[Key, int]]:
        """Who may still write where."""
        yield from ((write.key, write.page) for write in self.in_flight if write.endpoint.open)
        for key, transfer in self.sender.transfers.items():
            if transfer.engine == "open" and transfer.endpoint.open:
                yield from ((key, page) for page in transfer.to_write)

    @invariant()
    def no_page_or_slot_with_an_unquiesced_writer_is_free(self) -> None:
        receiver = self.receiver
        for key, page in self._writers():
            assert key[0] == receiver.incarnation
            assert receiver.slots.is_open(key[1], key[2])
            assert page in receiver.pool.pages_of(owner(key))

    @invariant()
    def every_page_and_slot_is_accounted_for(self) -> None:
        receiver = self.receiver
        assert receiver.slots.in_use == len(receiver.inboxes)
        assert receiver.pool.total - receiver.pool.free == sum(len(box.pages) for box in receiver.inboxes.values())
        unproven = [key for key, box in receiver.inboxes.items() if box.life.ended is not None]
        assert set(receiver.pool.quarantines) == {owner(key) for key in unproven}

    def teardown(self) -> None:
        """Whatever happened: a bounded number of the environment's answers ends everything."""
        for round_number in range(ROUNDS):
            if not self.receiver.inboxes and not self.sender.transfers:
                break
            self._settle_a_little(late=self.mute or round_number > 2)
        assert not self.receiver.inboxes and not self.sender.transfers
        assert self.receiver.pool.free_runs() == [range(PAGES)]
        assert self.receiver.slots.in_use == 0

    def _settle_a_little(self, late: bool) -> None:
        """Commands are answered, messages arrive (or none does, if the network is mute); `late`: calls time out."""
        for key, box in list(self.receiver.inboxes.items()):
            match box.life.stage:
                case inbox.Stage.OPENING:
                    self._finish_inbox_opening(key, works=True)
                case inbox.Stage.RECEIVING:
                    self._act(key, box.life.close("DEADLINE"))
                case inbox.Stage.STOP_REQUESTED if late:
                    self._act(key, box.life.stop_failed())
                case inbox.Stage.UNPROVEN:
                    self._act(key, box.life.retry_fence())
        for key, transfer in list(self.sender.transfers.items()):
            match transfer.life.stage:
                case sending.Stage.OPENING:
                    self._finish_transfer_opening(key, works=True)
                case sending.Stage.ACTIVE:
                    self._do(key, transfer.life.cancel("DEADLINE"))
        messages, self.messages = self.messages, []
        for message in messages:
            if not self.mute:
                self._deliver(message)
        while self.receiver.fencing:
            works = self.fence_failures == 0
            self.fence_failures -= not works
            self.finish_fence(works=works)
        while self.in_flight:
            self._land(0)
        for key in self._drained():
            self._engine_finishes(key)
        while self.sender.events:
            self.deliver_engine_event()
        while self.receiver.full:
            self.deliver_full()


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=300, stateful_step_count=60)


# --- two ways to the same accident, too long to be found every time --------------------------------------------------


def world_with_a_write_in_flight() -> tuple[World, Key]:
    world = World()
    world.open_inbox(count=2, answer="works")
    (key,) = world.receiver.inboxes
    world._open_transfer(0, again=False, answer="works")
    world._post(key, writes=1)
    return world, key


def settle(world: World, key: Key) -> None:
    """The inbox must wait for its fence, with the write still under way."""
    assert [message[1] for message in world.messages] == ["stopped"]
    world._deliver(world.messages.pop())
    assert world.receiver.inboxes[key].life.stage is inbox.Stage.FENCING
    world.no_page_or_slot_with_an_unquiesced_writer_is_free()
    world.teardown()


def test_a_stop_that_comes_after_an_unquiesced_failure_confirms_nothing() -> None:
    world, key = world_with_a_write_in_flight()
    world.connections_break()
    world.deliver_engine_event()
    # The abort is lost.
    assert [message[1] for message in world.messages] == ["aborted"]
    world.messages.clear()
    world._act(key, world.receiver.inboxes[key].life.close())
    world._deliver(world.messages.pop())
    settle(world, key)


def test_a_stop_whose_drain_breaks_confirms_nothing() -> None:
    world, key = world_with_a_write_in_flight()
    world._act(key, world.receiver.inboxes[key].life.close())
    world._deliver(world.messages.pop())
    world.connections_break()
    world.deliver_engine_event()
    settle(world, key)
