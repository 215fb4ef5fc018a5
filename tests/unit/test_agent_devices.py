"""A rank's memory on a GPU: handed over, registered, given back. Over a fake engine and a recording CUDA driver."""

import pytest

import fake_fabric
from agent_kit import LENGTH, Model, worker
from baton_agent import devices
from baton_agent.devices import Devices
from baton_agent.domains import Domains
from baton_agent.options import AgentOptions
from baton_agent.service import Addresses, TransferAgentService
from baton_memory import Handoff, HandoffError
from baton_memory.cuda import Device, DeviceMemory, open_driver
from conditions import until
from descriptors import open_descriptors
from fake_cuda import GRANULARITY, CUdevice_attribute, CUresult, Machine, Process


class GpuModel(Model):
    """A model process whose cache is on GPU 1, which is the only one that it sees."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.memory.close()
        self.driver = Process(machine, gpus=[1])
        self.gpu = Device(open_driver(self.driver), 0)
        self.memory = DeviceMemory.create(self.gpu, LENGTH)

    def offer(self, session: int, **changes: object) -> Handoff:
        offer = super().offer(session)
        return Handoff(offer.session, 0, 1, offer.layout, [{**self.memory.region("kv"), **changes}])

    def close(self) -> None:
        super().close()
        self.gpu.close()
        assert not self.driver.held()


@pytest.fixture
def machine():
    return Machine(gpus=2)


@pytest.fixture
def process(machine):
    """The agent's."""
    return Process(machine)


@pytest.fixture
def model(machine):
    model = GpuModel(machine)
    yield model
    model.close()


@pytest.fixture
async def agent(tmp_path, process, monkeypatch):
    monkeypatch.setattr(devices, "RETIRED_POLL", 0.01)
    service = TransferAgentService(
        fake_fabric.Engine(fake_fabric.Network()),
        "fake",
        "node",
        Addresses(f"unix:{tmp_path}/a", f"{tmp_path}/h", "127.0.0.1:0"),
        AgentOptions(shutdown_timeout=1.0),
        devices=Devices(open_driver(process)),
        domains=Domains(("a", "b"), (0,), {"0000:00:00.0": (0,), "0001:10:01.0": (1,)}),
    )
    process.calls.clear()
    await service.start()
    yield service
    await service.stop()


def engine_of(agent: TransferAgentService) -> fake_fabric.Engine:
    engine = agent._engine
    assert isinstance(engine, fake_fabric.Engine)
    return engine


async def refusal(attaching) -> tuple[str, str]:
    with pytest.raises(HandoffError) as error:
        await attaching
    return error.value.status, error.value.reason


async def test_memory_of_a_gpu_is_imported_registered_and_given_back(agent, model, process, tmp_path):
    engine = engine_of(agent)
    async with worker(f"unix:{tmp_path}/a", model) as client:
        (region,) = (await client.event("session_ready")).regions
        ((number, (address, length, ordinal, dmabuf)),) = engine.device_regions.items()
        # The agent counts GPUs otherwise than the model does.
        assert (length, ordinal, dmabuf) == (LENGTH, 1, True)
        assert list(process.mappings) == [address]
        assert (region.accesses[0].base, region.length) == (address, LENGTH)
        # With the NICs near to its GPU.
        assert model.gpu.pci_address == "0001:10:01.0"
        assert engine.device_domains == {number: (1,)}
        assert len(engine.polled) == 1
        assert agent.sessions.registered_bytes == LENGTH

        # The memory goes at once, its addresses when nothing can reach them any more.
        engine.retired.add(number)
        model.leave()
        assert await client.end() == "OK"
        assert process.held() == {"ranges": {address: GRANULARITY}, "contexts": {1: 1}}
        assert not engine.device_regions
        engine.retired.clear()
        await until(lambda: not process.ranges)
    assert process.held() == {"contexts": {1: 1}}


async def test_what_can_not_be_imported_or_registered_is_refused_and_leaves_nothing(
    agent, model, process, machine, tmp_path, monkeypatch
):
    async with worker(f"unix:{tmp_path}/a") as client:
        await client.describe()
        path, session = client.handoff_path, client.session
        before = open_descriptors()

        async def refused(**changes: object) -> tuple[str, str]:
            result = await refusal(model.attach(path, session, **changes))
            await until(lambda: agent.sessions.count == 0 and open_descriptors() == before)
            assert not process.held_but("contexts")
            assert not engine_of(agent).device_regions
            return result

        assert await refused(device="GPU-none") == ("NOT_FOUND", "DEVICE_UNKNOWN")
        assert await refused(length=GRANULARITY + 1) == ("INVALID_ARGUMENT", "MEMORY_INVALID")
        assert await refused(kind="host") == ("INVALID_ARGUMENT", "MEMORY_INVALID")
        engine_of(agent).refuse_devices = True
        assert await refused() == ("FAILED_PRECONDITION", "DEVICE_UNSUPPORTED")
        engine_of(agent).refuse_devices = False
        dmabuf = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
        for attempt in range(1, 7):
            process.calls.clear()
            process.fail(attempt, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
            status, _ = await refused()
            assert status in ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
        process.fail(0)
        machine.attributes[dmabuf] = 0
        await model.attach(path, session)
        client.follow()
        await client.event("session_ready")


async def test_an_agent_without_gpus_says_so(machine, tmp_path):
    model = GpuModel(machine)
    found = Devices.find()
    if found.present:
        pytest.skip("there is a GPU here")
    service = TransferAgentService(
        fake_fabric.Engine(fake_fabric.Network()),
        "fake",
        "node",
        Addresses(f"unix:{tmp_path}/a", f"{tmp_path}/h", "127.0.0.1:0"),
        devices=found,
    )
    await service.start()
    async with worker(f"unix:{tmp_path}/a") as client:
        await client.describe()
        assert await refusal(model.attach(client.handoff_path, 5)) == ("FAILED_PRECONDITION", "NO_GPU")
    await service.stop()
    model.close()
