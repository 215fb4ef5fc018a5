"""GPU memory against a recording driver: which calls, with what, and what is left whatever call fails."""

import enum
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fake_cuda
import fake_gpu
from baton_memory import LayerCounter, MemoryInvalid
from baton_memory.cuda import (
    CudaLayerCounter,
    Device,
    DeviceCallFailed,
    DeviceCounter,
    DeviceMemory,
    DeviceUnknown,
    DeviceUnsupported,
    NoGpu,
    open_driver,
)
from baton_memory.cuda.driver import BINDINGS
from baton_memory.cuda.layer_counter import STORE_LAYER_PTX
from baton_memory.cuda.memory import round_up
from descriptors import open_descriptors
from fake_cuda import GRANULARITY, CUdevice_attribute, CUresult, Machine, Process
from fake_gpu import HostGpu

RDMA = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
DMABUF = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
VMM = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


def device(process: Process, ordinal: int = 0) -> Device:
    opened = Device(open_driver(process), ordinal)
    process.calls.clear()
    return opened


@pytest.fixture
def machine() -> Machine:
    return Machine(gpus=2)


@pytest.fixture
def process(machine) -> Process:
    return Process(machine)


@given(st.integers(1, 1 << 50), st.sampled_from([4096, 2 << 20, 3]))
def test_rounding(length, granularity):
    rounded = round_up(length, granularity)
    assert rounded % granularity == 0
    assert length <= rounded < length + granularity


# --- calls ------------------------------------------------------------------------------------------------------------


def test_memory_is_made_and_unmade_in_order(process):
    gpu = device(process, 1)
    memory = DeviceMemory.create(gpu, GRANULARITY + 1)
    assert process.names() == [
        "cuMemGetAllocationGranularity",
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemMap",
        "cuMemSetAccess",
    ]
    size, properties, _ = process.arguments("cuMemCreate")
    assert size == memory.mapped_length == 2 * GRANULARITY
    assert properties.location.id == 1
    assert memory.length == GRANULARITY + 1
    assert memory.__cuda_array_interface__["data"] == (memory.address, False)
    assert memory.address in process.accessible

    process.calls.clear()
    fd = memory.fd
    memory.close()
    memory.close()
    assert process.names() == ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]
    with pytest.raises(OSError):
        os.fstat(fd)
    gpu.close()
    gpu.close()
    assert not process.held()


@pytest.mark.parametrize("capable", [0, 1])
def test_gpu_direct_is_asked_for_where_the_device_has_it(machine, process, capable):
    machine.attributes[RDMA] = capable
    with DeviceMemory.create(device(process), 1):
        assert process.arguments("cuMemCreate")[1].allocFlags.gpuDirectRDMACapable == capable


def test_memory_crosses_to_a_process_that_counts_gpus_otherwise(machine, process):
    theirs = Process(machine, gpus=[1])
    mine = device(process, 1)
    found = Device.find(open_driver(theirs), mine.uuid)
    assert found.ordinal == 0
    with DeviceMemory.create(mine, 5000) as exported:
        fd = os.dup(exported.fd)
        imported = DeviceMemory.open(found, fd, 5000)
        assert imported.mapped_length == exported.mapped_length
        (mapped,), (original,) = theirs.mappings.values(), process.mappings.values()
        assert mapped == original
        theirs.calls.clear()
        imported.close()
    assert theirs.names() == ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]
    with pytest.raises(OSError):
        os.fstat(fd)


def test_retired_memory_is_given_back_but_its_addresses_are_kept(process):
    memory = DeviceMemory.create(device(process), 1)
    before = open_descriptors()
    memory.retire()
    assert memory.fd == -1
    assert open_descriptors() == before - 1
    assert process.held_but("contexts") == {"ranges": {memory.address: GRANULARITY}}
    memory.retire()
    memory.close()
    assert not process.held_but("contexts")


def test_a_dmabuf_where_there_is_one(machine, process):
    with DeviceMemory.create(device(process), 1) as memory:
        fd = memory.dmabuf()
        assert fd is not None
        assert process.arguments("cuMemGetHandleForAddressRange")[:2] == (memory.address, GRANULARITY)
        os.close(fd)
    machine.attributes[DMABUF] = 0
    with DeviceMemory.create(device(process), 1) as memory:
        assert memory.dmabuf() is None
        assert "cuMemGetHandleForAddressRange" not in process.names()


def test_the_counters_page_is_pinned_and_mapped(process):
    gpu, counter = device(process), LayerCounter.create()
    on_device = DeviceCounter(gpu, counter)
    assert process.pinned == {counter.address: (4096, 3)}
    assert on_device.address != counter.address
    on_device.close()
    on_device.close()
    assert process.names() == [
        "cuCtxPushCurrent",
        "cuMemHostRegister",
        "cuMemHostGetDevicePointer",
        "cuCtxPopCurrent",
        "cuCtxPushCurrent",
        "cuMemHostUnregister",
        "cuCtxPopCurrent",
    ]
    counter.close()
    assert not process.held_but("contexts")


def test_a_stored_layer_counts_from_where_the_step_began(process):
    moved = CudaLayerCounter(device(HostGpu()))
    moved.begin(7, 300)
    moved.store(7, 1)
    assert moved.counter.value() == 301
    moved.store(7, 30)
    assert moved.counter.value() == 330
    moved.close()
    moved.close()


def test_a_captured_store_counts_from_the_step_that_it_is_replayed_in():
    gpu = device(HostGpu())
    driver, api = gpu.driver, gpu.driver.api
    moved = CudaLayerCounter(gpu)
    driver.call("cuStreamBeginCapture", 7, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    moved.store(7, 1)
    moved.store(7, 2)
    graph = driver.call("cuStreamEndCapture", 7)
    assert moved.counter.value() == 0
    for step in (4, 5):
        moved.begin(7, step * 2)
        driver.call("cuGraphLaunch", graph, 7)
        assert moved.counter.value() == (step + 1) * 2
    driver.call("cuGraphDestroy", graph)
    moved.close()
    assert not api.held_but("contexts")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
def test_the_kernel_of_the_counter_assembles(tmp_path, architecture):
    """Where there is an assembler: of a CUDA toolkit, or of the package nvidia-cuda-nvcc."""
    packaged = [Path(entry, "nvidia/cu13/bin/ptxas") for entry in sys.path]
    ptxas = shutil.which("ptxas") or next((str(path) for path in packaged if os.access(path, os.X_OK)), None)
    if ptxas is None:
        pytest.skip("no ptxas here")
    (tmp_path / "kernel.ptx").write_bytes(STORE_LAYER_PTX.rstrip(b"\0"))
    subprocess.run(
        [ptxas, f"-arch={architecture}", "kernel.ptx", "-o", "kernel.cubin"], cwd=tmp_path, check=True, timeout=60
    )


# --- every call fails once --------------------------------------------------------------------------------------------


def create(gpu: Device) -> None:
    DeviceMemory.create(gpu, 1).close()


def import_(gpu: Device) -> None:
    with DeviceMemory.create(device(Process(gpu.driver.api.machine)), 1) as exported:
        fd = os.dup(exported.fd)
        try:
            memory = DeviceMemory.open(gpu, fd, 1)
        except BaseException:
            os.close(fd)  # still the caller's
            raise
        memory.close()


def dmabuf(gpu: Device) -> None:
    with DeviceMemory.create(gpu, 1) as memory:
        fd = memory.dmabuf()
        assert fd is not None
        os.close(fd)


def counter(gpu: Device) -> None:
    counter = LayerCounter.create()
    try:
        DeviceCounter(gpu, counter).close()
    finally:
        counter.close()


def moved_counter(gpu: Device) -> None:
    moved = CudaLayerCounter(gpu)
    try:
        moved.begin(1, 30)
        moved.store(1, 1)
    finally:
        moved.close()


def open_and_close(gpu: Device) -> None:
    Device.find(open_driver(gpu.driver.api), gpu.uuid).close()


# A call that gives something back can't be repaired when it fails: what it would have given back stays, and what may
# not go before that.
KEEPS = {
    "cuMemUnmap": {"mappings", "ranges"},
    "cuMemRelease": {"handles", "ranges"},
    "cuMemAddressFree": {"ranges"},
    "cuMemHostUnregister": {"pinned"},
    "cuCtxPopCurrent": {"stack", "pinned", "modules", "allocations"},
    "cuCtxPushCurrent": {"pinned", "modules", "allocations"},
    "cuModuleUnload": {"modules"},
    "cuMemFree": {"allocations"},
    "cuDevicePrimaryCtxRelease": set(),
}


@pytest.mark.parametrize("use", [create, import_, dmabuf, counter, moved_counter, open_and_close])
def test_whichever_call_fails_all_before_it_is_undone(use: Callable[[Device], None]):
    number = 1
    while True:
        process = Process()
        gpu = device(process)
        before = open_descriptors()
        process.fail(number)
        try:
            use(gpu)
        except (DeviceCallFailed, MemoryInvalid, NoGpu) as error:
            failed = process.calls[number - 1].name
            assert error.fields["call"] == failed
        else:
            assert number > len(process.calls)
            break
        assert open_descriptors() == before, failed
        assert set(process.held_but("contexts")) <= KEEPS.get(failed, set()), failed
        assert process.contexts == {0: 1 + (failed == "cuDevicePrimaryCtxRelease")}, failed
        number += 1
    assert number > 4
    assert not process.held_but("contexts")


def test_a_device_without_memory_is_exhausted(process):
    gpu = device(process)
    process.fail(3, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(DeviceCallFailed, match="cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY") as error:
        DeviceMemory.create(gpu, 1)
    assert error.value.status == "RESOURCE_EXHAUSTED"
    process.fail(1)
    with pytest.raises(DeviceCallFailed) as error:
        DeviceMemory.create(gpu, 1)
    assert error.value.status == "INTERNAL"


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_only_a_gpus_memory_of_that_length_is_opened(process):
    gpu = device(process)
    null = os.open("/dev/null", os.O_RDWR)
    with DeviceMemory.create(gpu, 1) as exported:
        before = process.held()
        for fd, length in [(null, 1), (exported.fd, GRANULARITY + 1), (exported.fd, 0)]:
            with pytest.raises(MemoryInvalid) as error:
                DeviceMemory.open(gpu, fd, length)
            assert error.value.status == "INVALID_ARGUMENT"
            os.fstat(fd)
        assert process.held() == before
    os.close(null)


def test_devices_that_are_not_there_or_can_not(machine, process):
    driver = open_driver(process)
    for ordinal in (-1, 2):
        with pytest.raises(DeviceUnknown):
            Device(driver, ordinal)
    with pytest.raises(DeviceUnknown, match="GPU-dead"):
        Device.find(driver, "GPU-dead")
    machine.attributes[VMM] = 0
    with pytest.raises(DeviceUnsupported, match="VIRTUAL_MEMORY_MANAGEMENT") as error:
        Device(driver, 0)
    assert error.value.fields["device"] == "GPU-0000ba70-0000-0000-0000-000000000000"
    assert not process.held()


def test_no_gpu_is_one_error_whatever_is_missing(monkeypatch):
    class Unloadable(Process):
        def cuInit(self, flags: int) -> None:
            raise RuntimeError('"cuda" is an NVIDIA driver library')

    failing = Process()
    failing.fail(1, CUresult.CUDA_ERROR_NO_DEVICE)
    for api, says in [(Unloadable(), "NVIDIA driver"), (failing, "NO_DEVICE"), (Process(gpus=[]), "no GPU")]:
        with pytest.raises(NoGpu, match=says) as error:
            open_driver(api)
        assert (error.value.status, error.value.reason) == ("FAILED_PRECONDITION", "NO_GPU")
    monkeypatch.setattr("baton_memory.cuda.driver.BINDINGS", "no_such_module")
    with pytest.raises(NoGpu, match="agent-gpu"):
        open_driver()


# --- is the fake like the real bindings? ------------------------------------------------------------------------------


def test_the_recording_driver_has_the_names_values_and_parameters_of_the_real_bindings():
    real = pytest.importorskip("cuda.bindings.driver")
    for name, value in [*vars(fake_cuda).items(), *vars(fake_gpu).items()]:
        if inspect.isclass(value) and issubclass(value, enum.IntEnum) and value is not enum.IntEnum:
            for member in value:
                assert int(getattr(getattr(real, name), member.name)) == member
    for name in ("CU_MEMHOSTREGISTER_PORTABLE", "CU_MEMHOSTREGISTER_DEVICEMAP"):
        assert int(getattr(real, name)) == getattr(Process, name)
    for made, stand_in in [
        (real.CUmemAllocationProp(), fake_cuda.CUmemAllocationProp()),
        (real.CUmemAccessDesc(), fake_cuda.CUmemAccessDesc()),
    ]:
        for field, value in vars(stand_in).items():
            assert hasattr(made, field)
            for inner in getattr(value, "__dict__", {}) if field in ("location", "allocFlags") else ():
                assert hasattr(getattr(made, field), inner)
    functions = {name: value for kind in (Process, HostGpu) for name, value in vars(kind).items() if name[:2] == "cu"}
    assert len(functions) > 35
    for name, function in functions.items():
        # Its docstring begins with the signature.
        line = getattr(real, name).__doc__.splitlines()[0]
        parameters = len(inspect.signature(function).parameters) - 1
        inside = line[line.index("(") + 1 : line.rindex(")")]
        depth, count = 0, 1 if inside else 0
        for character in inside:
            depth += (character in "[(") - (character in ")]")
            count += character == "," and depth == 0
        assert count == parameters, line


def test_the_real_bindings_take_the_arguments_of_the_moving_counter(process):
    """They convert before they look for the driver, and say TypeError where they can't."""
    real = pytest.importorskip(BINDINGS)
    try:
        open_driver()
    except NoGpu:
        pass
    else:
        pytest.skip("there is a driver here, which would take the addresses seriously")
    moved = CudaLayerCounter(device(process))
    moved.begin(0, 300)
    moved.store(0, 1)
    moved.close()
    calls = [call for call in process.calls if not call.name.startswith("cuCtx")]
    assert {"cuModuleLoadData", "cuMemAlloc", "cuLaunchKernel", "cuStreamWriteValue64"} <= {call.name for call in calls}
    for call in calls:
        with pytest.raises(Exception) as refused:
            getattr(real, call.name)(*call.arguments)
        assert not isinstance(refused.value, TypeError), call.name


def test_without_a_driver_the_real_bindings_say_no_gpu():
    real = pytest.importorskip("cuda.bindings.driver")
    try:
        result = real.cuInit(0)[0]
    except RuntimeError:
        pass
    else:
        if int(result) == 0:
            pytest.skip("there is a GPU here")
    with pytest.raises(NoGpu):
        open_driver()
