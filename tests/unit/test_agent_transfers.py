"""Two agents over a fake engine that moves bytes when the test says so: every path of a transfer's life."""

import asyncio
from dataclasses import dataclass, replace

import pytest
from baton.v1 import agent_pb2, agent_pb2_grpc, common_pb2

import fake_fabric
from agent_kit import LAYERS, Model, Worker, extents, worker
from baton_agent.options import AgentOptions
from baton_agent.service import Addresses, TransferAgentService
from baton_kv.immediate import SLOTS
from baton_rpc import RemoteError, open_channel
from cluster import free_port
from conditions import until

FULL, QUIESCED, FENCED = (
    agent_pb2.INBOX_OUTCOME_FULL,
    agent_pb2.INBOX_OUTCOME_QUIESCED,
    agent_pb2.INBOX_OUTCOME_FENCED,
)
OPTIONS = AgentOptions(
    stop_timeout=0.3,
    drain_timeout=0.3,
    heartbeat_interval=0.05,
    heartbeat_timeout=0.2,
    heartbeat_misses=3,
    heartbeat_retry=0.02,
    shutdown_timeout=2.0,
)


@dataclass
class Side:
    service: TransferAgentService
    engine: fake_fabric.Engine
    target: str

    @property
    def agent(self) -> common_pb2.AgentDescriptor:
        return self.service.descriptor


class Pair:
    """Prefill's agent and decode's."""

    def __init__(self, directory) -> None:
        self.directory = directory
        self.network = fake_fabric.Network()
        self.sides: list[Side] = []

    async def start(self, name: str, options: AgentOptions = OPTIONS, control: str = "127.0.0.1:0") -> Side:
        engine = fake_fabric.Engine(self.network)
        target = f"unix:{self.directory}/{name}"
        service = TransferAgentService(
            engine, "fake", "node", Addresses(target, f"{self.directory}/{name}-handoff", control), options
        )
        await service.start()
        side = Side(service, engine, target)
        self.sides.append(side)
        return side

    async def stop(self, side: Side) -> None:
        self.sides.remove(side)
        self.network.engines.remove(side.engine)
        await side.service.stop()


@pytest.fixture
async def pair(tmp_path):
    pair = Pair(tmp_path)
    yield pair
    for side in list(pair.sides):
        side.engine.hold = False
        await pair.stop(side)


@dataclass
class Attached:
    pair: Pair
    prefill: Side
    decode: Side
    source: Model
    target: Model
    sender: Worker
    receiver: Worker

    async def open(self, pages: int = 4) -> tuple[agent_pb2.InboxDescriptor, int]:
        inbox = await self.receiver.open_inbox(self.prefill.agent, extents(pages))
        transfer = await self.sender.open_transfer(inbox, range(pages), range(10, 10 + pages))
        return inbox, transfer

    def run(self) -> None:
        self.pair.network.run()

    def same(self, pages: int = 4) -> bool:
        return all(
            self.source.page(layer, page) == self.target.page(layer, 10 + page)
            for layer in range(LAYERS)
            for page in range(pages)
        )


@pytest.fixture
async def attached(pair):
    prefill, decode = await pair.start("p"), await pair.start("d")
    source, target = Model(), Model()
    source.fill(1)
    async with worker(prefill.target, source) as sender, worker(decode.target, target) as receiver:
        yield Attached(pair, prefill, decode, source, target, sender, receiver)
    source.close()
    target.close()


async def refused(call, reason: str) -> RemoteError:
    with pytest.raises(RemoteError) as error:
        await call
    assert error.value.reason == reason, error.value
    return error.value


async def test_pages_move_layer_by_layer_and_both_sides_hear_of_the_end_once(attached):
    inbox, transfer = await attached.open()
    await attached.sender.submit(5, (transfer, 0, 4, True))
    attached.run()
    assert not attached.same(1)
    attached.source.counter.advance(5 * LAYERS + 1)
    attached.run()
    assert attached.source.page(0, 0) == attached.target.page(0, 10)
    assert attached.source.page(1, 0) != attached.target.page(1, 10)
    attached.source.counter.advance(5 * LAYERS + LAYERS)
    attached.run()
    full = await attached.receiver.event("inbox_full")
    assert (full.slot, full.generation, full.extents, full.duration_us) == (inbox.slot, inbox.generation, 12, 2)
    done = await attached.sender.event("transfer_done")
    assert (done.transfer, done.stats.extents) == (transfer, 12)
    assert attached.same()
    assert await attached.receiver.close_inbox(inbox) == FULL
    assert await attached.receiver.close_inbox(inbox) == FULL
    await attached.sender.cancel(transfer)
    assert attached.sender.kinds() == ["session_ready", "transfer_done"]
    assert attached.receiver.kinds() == ["session_ready", "inbox_full"]
    assert attached.decode.service.receiver.open_inboxes == attached.prefill.service.sender.open_transfers == 0


async def test_closing_an_inbox_stops_the_sender_first(attached):
    inbox, transfer = await attached.open()
    assert await attached.receiver.close_inbox(inbox) == QUIESCED
    failed = await attached.sender.event("transfer_failed")
    assert (failed.transfer, failed.reason, failed.quiesced) == (transfer, "STOPPED_BY_RECEIVER", True)
    assert attached.receiver.kinds() == ["session_ready"]
    await refused(attached.sender.open_transfer(inbox, [0], [0]), "TRANSFER_STOPPED")


async def test_a_transfer_stopped_before_it_was_opened_is_never_opened(attached):
    inbox = await attached.receiver.open_inbox(attached.prefill.agent, extents(1))
    assert await attached.receiver.close_inbox(inbox) == QUIESCED
    error = await refused(attached.sender.open_transfer(inbox, [0], [0]), "TRANSFER_STOPPED")
    assert error.status == "FAILED_PRECONDITION"
    assert attached.prefill.service.sender.open_transfers == 0


async def test_a_sender_that_cannot_confirm_is_fenced_and_so_are_its_other_inboxes(attached):
    inbox, transfer = await attached.open()
    other, _ = await attached.open()
    attached.prefill.engine.hold = True
    attached.decode.service.options = replace(OPTIONS)
    closing = asyncio.create_task(attached.receiver.close_inbox(inbox))
    # The sender drains for as long as the receiver waits, then tears the connection down, unproven.
    attached.prefill.engine.unquiesced = True
    assert await closing == FENCED
    failed = await attached.receiver.event("inbox_failed")
    assert (failed.slot, failed.generation, failed.quiesced) == (other.slot, other.generation, True)
    assert (await attached.sender.event("transfer_failed", lambda e: e.transfer == transfer)).quiesced is False
    attached.prefill.engine.hold = False
    again, _ = await attached.open()
    assert again.endpoints != inbox.endpoints


async def test_the_address_of_a_closed_endpoint_is_not_used_again(attached):
    inbox, _ = await attached.open()
    attached.prefill.engine.hold = attached.prefill.engine.unquiesced = True
    assert await attached.receiver.close_inbox(inbox) == FENCED
    attached.prefill.engine.hold = False
    engine = attached.decode.engine
    engine.addresses = [inbox.endpoints[0], inbox.endpoints[0] + b"'"]
    again, _ = await attached.open()
    assert again.endpoints[0] == inbox.endpoints[0] + b"'"
    await until(lambda: list(engine.endpoints.values()) == [again.endpoints[0]])


async def test_a_silent_sending_agent_is_fenced_within_the_deadline(attached):
    inbox, _ = await attached.open()
    await attached.prefill.service._control.stop(0)
    assert await attached.receiver.close_inbox(inbox) == FENCED


async def test_a_lost_sending_agent_fails_its_inboxes(attached):
    inbox, _ = await attached.open()
    await attached.prefill.service._control.stop(0)
    failed = await attached.receiver.event("inbox_failed")
    assert (failed.slot, failed.reason, failed.quiesced) == (inbox.slot, "PEER_LOST", True)
    assert await attached.receiver.close_inbox(inbox) == FENCED


async def test_a_lost_receiving_agent_fails_its_transfers(attached):
    _, transfer = await attached.open()
    await attached.decode.service._control.stop(0)
    failed = await attached.sender.event("transfer_failed")
    assert (failed.transfer, failed.reason) == (transfer, "PEER_LOST")


async def test_a_restarted_peer_is_told_apart_from_its_predecessor(attached):
    inbox, _ = await attached.open()
    control = attached.prefill.agent.control_address
    old = common_pb2.AgentDescriptor()
    old.CopyFrom(attached.prefill.agent)
    attached.prefill.engine.hold = True
    await attached.prefill.service._control.stop(0)
    successor = await attached.pair.start("p2", control=control)
    failed = await attached.receiver.event("inbox_failed")
    assert failed.reason in {"PEER_RESTARTED", "PEER_LOST"}
    assert failed.quiesced
    await until(lambda: attached.decode.service.peers.is_dead(old.incarnation) or failed.reason == "PEER_LOST")
    inbox = await attached.receiver.open_inbox(successor.agent, extents(1))
    async with worker(successor.target, attached.source) as sender:
        await sender.open_transfer(inbox, [0], [0])


async def test_a_peer_that_has_just_come_to_an_address_found_empty_is_not_lost(attached):
    """The channel to it refuses for half a second without trying, longer than all heartbeats that may be refused."""
    ghost = common_pb2.AgentDescriptor()
    ghost.CopyFrom(attached.prefill.agent)
    ghost.control_address, ghost.incarnation = f"127.0.0.1:{free_port()}", 99

    def failures() -> int:
        return attached.receiver.kinds().count("inbox_failed")

    for times in (1, 2):  # so that the channel's pauses have grown
        await attached.receiver.open_inbox(ghost, extents(1))
        await until(lambda times=times: failures() == times)
    successor = await attached.pair.start("p2", control=ghost.control_address)
    inbox = await attached.receiver.open_inbox(successor.agent, extents(1))
    await until(lambda: attached.decode.service.peers._watched[successor.agent.incarnation].alive_at > 0)
    assert await attached.receiver.close_inbox(inbox) == QUIESCED
    assert failures() == 2


async def test_descriptors_of_a_former_receiver_are_refused(attached):
    inbox = await attached.receiver.open_inbox(attached.prefill.agent, extents(1))
    control = attached.decode.agent.control_address
    await attached.receiver.close()
    await attached.pair.stop(attached.decode)
    await refused(attached.sender.open_transfer(inbox, [0], [0]), "TRANSFER_STOPPED")
    inbox.generation += 1
    error = await refused(attached.sender.open_transfer(inbox, [0], [0]), "PEER_UNREACHABLE")
    assert error.status == "UNAVAILABLE"
    await attached.pair.start("d2", control=control)
    for _ in range(2):
        inbox.generation += 1
        error = await refused(attached.sender.open_transfer(inbox, [0], [0]), "STALE_DESCRIPTOR")
        assert error.status == "FAILED_PRECONDITION"


async def test_a_worker_cancels_and_the_receiver_hears_of_it(attached):
    inbox, transfer = await attached.open()
    await attached.sender.cancel(transfer)
    failed = await attached.receiver.event("inbox_failed")
    assert (failed.reason, failed.quiesced) == ("CANCELLED_BY_SENDER", True)
    assert attached.sender.kinds() == ["session_ready"]
    assert await attached.receiver.close_inbox(inbox) == QUIESCED
    await attached.sender.submit(0, (transfer, 0, 4, True))
    await refused(attached.sender.submit(0, (transfer + 1, 0, 4, True)), "UNKNOWN_TRANSFER")
    await refused(attached.sender.cancel(transfer + 1), "UNKNOWN_TRANSFER")


async def test_an_abort_that_is_not_quiesced_is_fenced_by_the_receiver(attached):
    inbox, _ = await attached.open()
    attached.prefill.engine.unquiesced = True
    attached.prefill.engine.fail_peer(next(iter(attached.prefill.engine.peers)))
    failed = await attached.receiver.event("inbox_failed")
    assert (failed.reason, failed.quiesced) == ("PEER_EXITED", True)
    assert (await attached.sender.event("transfer_failed")).quiesced is False
    assert await attached.receiver.close_inbox(inbox) == FENCED


async def test_a_fence_that_fails_is_a_quarantine_until_it_succeeds(attached):
    inbox, _ = await attached.open()
    attached.decode.engine.fail_fences = 2
    attached.prefill.engine.unquiesced = True
    attached.prefill.engine.fail_peer(next(iter(attached.prefill.engine.peers)))
    failed = await attached.receiver.event("inbox_failed")
    assert failed.quiesced is False
    await refused(attached.receiver.close_inbox(inbox), "FENCE_FAILED")
    assert await attached.receiver.close_inbox(inbox) == FENCED
    assert attached.receiver.kinds() == ["session_ready", "inbox_failed"]


async def test_a_sender_that_writes_too_much_is_fenced(attached):
    inbox = await attached.receiver.open_inbox(attached.prefill.agent, extents(4) - 1)
    transfer = await attached.sender.open_transfer(inbox, range(4), range(4))
    attached.decode.engine.inboxes[inbox.slot].arrived = 1
    attached.decode.engine.arrive(inbox.slot, inbox.generation, extents(4))
    failed = await attached.receiver.event("inbox_failed")
    assert (failed.reason, failed.quiesced) == ("TOO_MANY_EXTENTS", True)
    await attached.sender.submit(0, (transfer, 0, 4, True))
    attached.source.counter.advance(LAYERS)
    attached.run()
    await attached.sender.event("transfer_failed")


async def test_the_end_of_the_sending_session_stops_its_transfers_before_the_memory_goes(attached):
    inbox, _ = await attached.open()
    attached.prefill.engine.hold = True
    attached.source.leave()
    await until(lambda: any(t.cancelled for t in attached.prefill.engine.transfers.values()))
    assert attached.prefill.engine.regions
    assert attached.sender.ended is None
    attached.prefill.engine.hold = False
    attached.run()
    assert await attached.sender.end() == "OK"
    assert not attached.prefill.engine.regions
    assert not attached.prefill.engine.counters
    failed = await attached.receiver.event("inbox_failed")
    assert (failed.slot, failed.reason, failed.quiesced) == (inbox.slot, "SESSION_ENDED", True)
    await refused(attached.sender.open_transfer(inbox, [0], [0]), "UNKNOWN_SESSION")


async def test_the_end_of_the_receiving_session_stops_the_senders_before_the_memory_goes(attached):
    _, transfer = await attached.open()
    attached.prefill.engine.hold = True
    attached.target.leave()
    await until(lambda: any(t.cancelled for t in attached.prefill.engine.transfers.values()))
    assert attached.decode.engine.regions
    attached.prefill.engine.hold = False
    attached.run()
    assert await attached.receiver.end() == "OK"
    assert not attached.decode.engine.regions
    assert (await attached.sender.event("transfer_failed")).transfer == transfer
    await refused(attached.receiver.open_inbox(attached.prefill.agent, 1), "UNKNOWN_SESSION")


async def test_shutdown_drains_tells_and_unlinks(attached, tmp_path):
    inbox, _ = await attached.open()
    await attached.pair.stop(attached.prefill)
    failed = await attached.receiver.event("inbox_failed")
    assert (failed.slot, failed.reason, failed.quiesced) == (inbox.slot, "SESSION_ENDED", True)
    assert not (tmp_path / "p").exists()
    assert not (tmp_path / "p-handoff").exists()


async def test_a_prompt_that_moves_nothing_is_full_and_done_at_once(attached):
    inbox = await attached.receiver.open_inbox(attached.prefill.agent, 0)
    await attached.receiver.event("inbox_full", lambda event: event.slot == inbox.slot)
    transfer = await attached.sender.open_transfer(inbox, [], [])
    await attached.sender.event("transfer_done", lambda event: event.transfer == transfer)


async def test_slots_run_out_and_come_back(pair):
    prefill, decode = await pair.start("p"), await pair.start("d", replace(OPTIONS, slots=2))
    model = Model()
    async with worker(decode.target, model) as receiver:
        inboxes = [await receiver.open_inbox(prefill.agent, 1) for _ in range(2)]
        error = await refused(receiver.open_inbox(prefill.agent, 1), "KV_SLOTS_EXHAUSTED")
        assert error.status == "RESOURCE_EXHAUSTED"
        assert await receiver.close_inbox(inboxes[0]) == QUIESCED
        again = await receiver.open_inbox(prefill.agent, 1)
        assert (again.slot, again.generation) == (inboxes[0].slot, inboxes[0].generation + 1)
        assert await receiver.close_inbox(inboxes[0]) == QUIESCED
        assert decode.service.receiver.open_inboxes == 2
    model.close()


async def test_what_open_transfer_refuses(attached):
    inbox, _ = await attached.open()

    def changed(**fields) -> agent_pb2.InboxDescriptor:
        other = agent_pb2.InboxDescriptor()
        other.CopyFrom(inbox)
        other.generation += 100
        for path, value in fields.items():
            *parents, name = path.split("__")
            place = other
            for parent in parents:
                place = getattr(place, parent)
            if isinstance(value, list | range):
                place.ClearField(name)
                getattr(place, name).extend(value)
            else:
                setattr(place, name, value)
        return other

    region = inbox.regions[0]
    (access,) = region.accesses

    def other_region(*accesses, **fields) -> common_pb2.RegionDescriptor:
        return common_pb2.RegionDescriptor(
            **{"rank": 0, "length": region.length, "accesses": accesses or [access], **fields}
        )

    short = other_region(length=region.length - 1)
    fewer = other_region(layers=2)
    stranger = other_region(rank=1)
    beyond = other_region(common_pb2.RegionAccess(key=access.key, base=2**64 - 5))
    elsewhere = other_region(access, common_pb2.RegionAccess(domain=1, key=access.key))
    nowhere = other_region(accesses=[])
    many = [b"%d" % number for number in range(65)]
    for other, source, target, reason in [
        (inbox, [0], [0], "TRANSFER_EXISTS"),
        (changed(version=1), [0], [0], "VERSION_UNSUPPORTED"),
        (changed(version=3), [0], [0], "VERSION_UNSUPPORTED"),
        (changed(receiver__version=9), [0], [0], "VERSION_UNSUPPORTED"),
        (changed(receiver__transport="shm"), [0], [0], "TRANSPORT_MISMATCH"),
        (changed(receiver__incarnation=0), [0], [0], "INVALID_FIELD"),
        (changed(receiver__incarnation=7), [0], [0], "STALE_DESCRIPTOR"),
        (changed(sender_incarnation=inbox.sender_incarnation + 1), [0], [0], "STALE_DESCRIPTOR"),
        (changed(receiver__control_address=""), [0], [0], "BAD_ADDRESS"),
        (changed(receiver__control_address="unix:/tmp/x"), [0], [0], "INVALID_FIELD"),
        (changed(receiver__control_address="nonsense"), [0], [0], "BAD_ADDRESS"),
        (changed(slot=SLOTS), [0], [0], "INVALID_FIELD"),
        (changed(endpoints=[]), [0], [0], "INVALID_FIELD"),
        (changed(endpoints=[b"x" * 513]), [0], [0], "INVALID_FIELD"),
        (changed(endpoints=[b"x", b"y"]), [0], [0], "INVALID_FIELD"),
        (changed(endpoints=[b"x", b""], domains=[0, 1]), [0], [0], "INVALID_FIELD"),
        (changed(endpoints=[b"x", b"y"], domains=[0, 0]), [0], [0], "INVALID_FIELD"),
        (changed(endpoints=many, domains=range(65)), [0], [0], "INVALID_FIELD"),
        (changed(domains=[]), [0], [0], "INVALID_FIELD"),
        (changed(domains=[1]), [0], [0], "INVALID_FIELD"),
        (changed(regions=[elsewhere]), [0], [0], "INVALID_FIELD"),
        (changed(regions=[nowhere]), [0], [0], "INVALID_FIELD"),
        (changed(regions=[other_region(access, access)]), [0], [0], "INVALID_FIELD"),
        (changed(regions=[]), [0], [0], "INVALID_FIELD"),
        (changed(regions=[region, region]), [0], [0], "INVALID_FIELD"),
        (changed(regions=[fewer]), [0], [0], "INVALID_FIELD"),
        (changed(regions=[region, stranger]), [0], [0], "INVALID_FIELD"),
        (changed(regions=[short]), [0], [0], "INVALID_FIELD"),
        (changed(regions=[beyond]), [0], [0], "INVALID_FIELD"),
        (changed(layout__order=0), [0], [0], "INVALID_FIELD"),
        (changed(layout__layers=0), [0], [0], "KV_INVALID_ARGUMENT"),
        (changed(layout__layers=2), [0], [0], "INVALID_FIELD"),
        (changed(layout__layers=2, regions=[fewer]), [0], [0], "KV_LAYOUT_MISMATCH"),
        (changed(layout__page_size=3), [0], [0], "KV_LAYOUT_MISMATCH"),
        (changed(layout__dtype="int32"), [0], [0], "KV_LAYOUT_MISMATCH"),
        (changed(sharding__tensor_parallel=0), [0], [0], "INVALID_FIELD"),
        (changed(sharding__tensor_parallel=1000), [0], [0], "INVALID_FIELD"),
        (changed(data_parallel_rank=1), [0], [0], "INVALID_FIELD"),
        (changed(), [0, 1], [0], "KV_INVALID_ARGUMENT"),
        (changed(), [32], [0], "INVALID_FIELD"),
        (changed(), [0], [32], "INVALID_FIELD"),
    ]:
        await refused(attached.sender.open_transfer(other, source, target), reason)
    await refused(attached.sender.open_transfer(changed(), [0], [0], dp_rank=1), "INVALID_FIELD")
    assert attached.prefill.service.sender.open_transfers == 1
    attached.sender.session += 1
    await refused(attached.sender.open_transfer(changed(), [0], [0]), "UNKNOWN_SESSION")


async def test_an_inbox_is_of_a_data_parallel_rank_that_the_session_has(attached):
    error = await refused(attached.receiver.open_inbox(attached.prefill.agent, 1, dp_rank=1), "INVALID_FIELD")
    assert error.status == "INVALID_ARGUMENT"
    assert attached.decode.service.receiver.open_inboxes == 0


async def test_a_transfer_belongs_to_its_session(attached):
    inbox, transfer = await attached.open()
    model = Model()
    async with worker(attached.prefill.target, model) as stranger:
        await refused(stranger.cancel(transfer), "UNKNOWN_TRANSFER")
        await refused(stranger.submit(0, (transfer, 0, 1, False)), "UNKNOWN_TRANSFER")
    async with worker(attached.decode.target, model) as stranger:
        await refused(stranger.close_inbox(inbox), "UNKNOWN_INBOX")
    await refused(attached.receiver.close_inbox(agent_pb2.InboxDescriptor(slot=4095, generation=1)), "UNKNOWN_INBOX")
    model.close()


async def test_a_step_that_no_counter_reaches_is_refused(attached):
    """Nor its last layer."""
    _, transfer = await attached.open()
    for step in (2**63, (2**64 - 1) // LAYERS):
        error = await refused(attached.sender.submit(step, (transfer, 0, 4, True)), "INVALID_FIELD")
        assert error.fields["field"] == "step"
    await attached.sender.submit(0, (transfer, 0, 4, True))
    attached.source.counter.advance(LAYERS)
    attached.run()
    await attached.receiver.event("inbox_full")


async def test_a_thousand_other_receivers_make_no_stopped_transfer_possible_again(attached):
    inbox = await attached.receiver.open_inbox(attached.prefill.agent, extents(1))
    assert await attached.receiver.close_inbox(inbox) == QUIESCED
    ours = attached.prefill.agent.incarnation
    async with open_channel(attached.prefill.agent.control_address) as channel:
        stub = agent_pb2_grpc.TransferPeerStub(channel)
        for other in range(1, 1001):
            await stub.StopTransfer(
                agent_pb2.StopTransferRequest(caller_incarnation=other, callee_incarnation=ours, slot=0, generation=1)
            )
    await refused(attached.sender.open_transfer(inbox, [0], [0]), "TRANSFER_STOPPED")


async def test_what_was_stopped_is_remembered_for_slots_that_there_are(attached):
    async with open_channel(attached.prefill.agent.control_address) as channel:
        stop = agent_pb2.StopTransferRequest(
            caller_incarnation=7, callee_incarnation=attached.prefill.agent.incarnation, slot=SLOTS, generation=1
        )
        error = await refused(Worker.call(agent_pb2_grpc.TransferPeerStub(channel).StopTransfer, stop), "INVALID_FIELD")
        assert error.fields["field"] == "slot"


async def test_calls_for_another_incarnation_are_refused(attached):
    async with open_channel(attached.prefill.agent.control_address) as channel:
        stub = agent_pb2_grpc.TransferPeerStub(channel)
        for method, request in [
            (stub.Heartbeat, agent_pb2.HeartbeatRequest(callee_incarnation=1)),
            (stub.StopTransfer, agent_pb2.StopTransferRequest(callee_incarnation=1)),
            (stub.TransferAborted, agent_pb2.TransferAbortedRequest(callee_incarnation=1)),
        ]:
            error = await refused(Worker.call(method, request), "WRONG_INCARNATION")
            assert error.status == "FAILED_PRECONDITION"


async def test_an_abort_by_someone_else_changes_nothing(attached):
    inbox, _ = await attached.open()
    async with open_channel(attached.decode.agent.control_address) as channel:
        await agent_pb2_grpc.TransferPeerStub(channel).TransferAborted(
            agent_pb2.TransferAbortedRequest(
                caller_incarnation=7,
                callee_incarnation=attached.decode.agent.incarnation,
                slot=inbox.slot,
                generation=inbox.generation,
                reason="X",
                quiesced=True,
            )
        )
    assert attached.decode.service.receiver.open_inboxes == 1


async def test_unequal_sharding(pair):
    prefill, decode = await pair.start("p"), await pair.start("d")
    sources = [Model(1, rank, 2) for rank in range(2)]
    target = Model()
    for seed, source in enumerate(sources):
        source.fill(seed)
    async with worker(prefill.target, *sources) as sender, worker(decode.target, target) as receiver:
        inbox = await receiver.open_inbox(prefill.agent, extents(3, source_tp=2))
        transfer = await sender.open_transfer(inbox, [5, 7, 6], [1, 2, 3])
        sources[0].counter.advance(LAYERS)
        await sender.submit(0, (transfer, 0, 3, True))
        pair.network.run()
        await receiver.event("inbox_full")
    half = len(sources[0].page(0, 0)) // 2
    for layer in range(LAYERS):
        for ours, theirs in ((5, 1), (7, 2), (6, 3)):
            first, second = (source.page(layer, ours) for source in sources)
            assert target.page(layer, theirs) == first[:half] + second[:half] + first[half:] + second[half:]
    for model in (*sources, target):
        model.close()


async def test_a_quarantine_shows_by_what_it_waits_for_and_by_its_age(attached):
    inbox, _ = await attached.open()
    value = attached.decode.service.metrics.registry.get_sample_value

    def quarantined() -> dict[str, float | None]:
        stages = ("stop_requested", "fencing", "unproven")
        return {stage: value("baton_agent_quarantined_inboxes", {"stage": stage}) for stage in stages}

    attached.prefill.engine.hold = attached.prefill.engine.unquiesced = True
    attached.decode.engine.fail_fences = 1 << 30
    assert value("baton_agent_oldest_quarantine_seconds") == 0
    closing = asyncio.create_task(attached.receiver.close_inbox(inbox))
    await until(lambda: quarantined() == {"stop_requested": 1, "fencing": 0, "unproven": 0})
    await refused(closing, "FENCE_FAILED")
    assert quarantined() == {"stop_requested": 0, "fencing": 0, "unproven": 1}
    assert value("baton_agent_oldest_quarantine_seconds") >= OPTIONS.drain_timeout
    assert value("baton_agent_fences_total", {"reason": "stop_unconfirmed"}) == 1
    attached.decode.engine.fail_fences = 0
    assert await attached.receiver.close_inbox(inbox) == FENCED
    assert value("baton_agent_fences_total", {"reason": "retry"}) >= 1
    assert sum(quarantined().values()) == value("baton_agent_oldest_quarantine_seconds") == 0


async def test_metrics_show_how_much_a_write_carried_and_how_long_all_took(attached):
    _, transfer = await attached.open()
    await attached.sender.submit(0, (transfer, 0, 4, True))
    attached.source.counter.advance(LAYERS)
    attached.run()
    await attached.receiver.event("inbox_full")
    await attached.sender.event("transfer_done")
    value = attached.prefill.service.metrics.registry.get_sample_value
    assert value("baton_agent_extents_per_write_count") == value("baton_agent_extents_per_write_sum") == 1
    assert value("baton_agent_transfer_seconds_sum") == 5e-6
    assert value("baton_agent_first_post_seconds_sum") == 1e-6
    assert value("baton_agent_transfers_total", {"outcome": "done"}) == 1
    value = attached.decode.service.metrics.registry.get_sample_value
    assert value("baton_agent_inbox_fill_seconds_sum") == 2e-6
    assert value("baton_agent_inboxes_total", {"outcome": "full"}) == 1


async def test_metrics_show_what_happened(attached):
    inbox, _ = await attached.open()
    assert await attached.receiver.close_inbox(inbox) == QUIESCED
    value = attached.decode.service.metrics.registry.get_sample_value
    assert value("baton_agent_inboxes_total", {"outcome": "quiesced"}) == 1
    assert value("baton_agent_open_inboxes") == 0
    assert value("baton_agent_sessions") == 1
    assert value("baton_agent_registered_bytes") == attached.target.memory.length
    assert value("baton_agent_quarantined_inboxes", {"stage": "fencing"}) == 0
    value = attached.prefill.service.metrics.registry.get_sample_value
    assert value("baton_agent_transfers_total", {"outcome": "cancelled"}) == 1
    assert value("baton_agent_fabric_bytes_total") == 0
    for what in ("bytes", "writes", "immediates"):
        assert value(f"baton_agent_fabric_domain_{what}_total", {"domain": "127.0.0.1"}) == 0
    await refused(attached.sender.open_transfer(inbox, [0], [0]), "TRANSFER_STOPPED")
    assert value("baton_agent_refused_total", {"reason": "transfer_stopped"}) == 1
