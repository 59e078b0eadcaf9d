"""Kernels on devices: once, by whichever thread, on the right device, or not at all."""

from __future__ import annotations

import os
import threading

import pytest
from unit.registry import samples
from unit.registry.fakes import FakeApi

from chord.errors import (
    CaptureError,
    DriverError,
    DriverNotFoundError,
    ForkError,
    NoProgramError,
    UnsupportedDeviceError,
)
from chord.registry.architectures import of_capability
from chord.registry.driver import Driver

PROBLEM = {"width": 896, "ways": 16, "num_tokens": 5, "block_m": 8}
OUT_OF_MEMORY, NO_DEVICE, CAPTURE_UNSUPPORTED, NOT_INITIALIZED = 2, 100, 900, 3
POINTERS = {"x": 4096, "map": None, "num_tokens": 5, "factor": 1.0, "total": 0}


def test_a_kernel_is_loaded_once(registry, api):
    first = registry.load(registry.lookup("toy", "sm_90a", PROBLEM))
    assert registry.load("toy.many", 0) is first
    assert (first.name, first.device, [a.name for a in first.args]) == (
        "toy.many",
        0,
        ["x", "map", "num_tokens", "factor", "total"],
    )
    assert first.workspace_bytes(10) == 64 + 40
    assert api.count("cuModuleLoadData") == api.count("cuInit") == 1
    assert api.contexts == []


def test_threads_race_to_load(registry, api):
    start, found = threading.Barrier(8), []

    def load(name):
        start.wait()
        found.append(registry.load(name))

    names = ["toy.many", "toy.pair"] * 4
    threads = [threading.Thread(target=load, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 2
    assert api.count("cuModuleLoadData") == 2
    assert api.count("cuDevicePrimaryCtxRetain") == 1


def test_several_devices_in_one_process(root):
    api = FakeApi(capabilities=((9, 0), (10, 0), (9, 0)))
    registry = samples.opened(root, api)
    kernels = [registry.load("toy.many", device) for device in range(3)]
    assert [kernel.device for kernel in kernels] == [0, 1, 2]
    images = list(api.images.values())
    assert images[0] == images[2] != images[1]
    api.contexts.append(2)  # device 1 is current
    assert registry.load("toy.many") is kernels[1]
    assert api.contexts == [2]


def test_a_selection_for_another_architecture_is_refused(root):
    registry = samples.opened(root, FakeApi(capabilities=((9, 0), (10, 3))))
    selection = registry.lookup("toy", "sm_100a", PROBLEM)
    with pytest.raises(
        UnsupportedDeviceError, match=r"device 0 needs sm_90a, has sm_90a, sm_100a, and sm_100a was sel"
    ):
        registry.load(selection, 0)
    with pytest.raises(UnsupportedDeviceError, match=r"toy.many: device 1 needs sm_103a, has sm_90a, sm_100a$"):
        registry.load("toy.many", 1)
    registry.load("toy.many", 0)
    with pytest.raises(UnsupportedDeviceError, match=r"and sm_100a was selected"):
        registry.load(selection, 0)


def test_a_selection_of_another_registry_is_refused(registry, root, api):
    other = samples.opened(root, api)
    with pytest.raises(ValueError, match=r"toy.many: selected from another registry"):
        registry.load(other.lookup("toy", "sm_90a", PROBLEM))


@pytest.mark.parametrize("capability", [(8, 9), (10, 1), (12, 0), (12, 1), (9, 1), (11, 0)])
def test_r08_a_gpu_that_is_not_in_the_table(root, capability):
    api = FakeApi(capabilities=(capability,))
    message = "this GPU is {}.{}, not supported; supported are 9.0 .* 10.0 .* 10.3".format(*capability)
    with pytest.raises(UnsupportedDeviceError, match=message):
        samples.opened(root, api).load("toy.many")
    assert api.images == {}


def test_each_capability_has_its_own_architecture():
    assert [of_capability(*c) for c in ((9, 0), (10, 0), (10, 3))] == ["sm_90a", "sm_100a", "sm_103a"]


def test_unknown_names(registry):
    with pytest.raises(NoProgramError, match=r"toy.none: no such program of toy"):
        registry.load("toy.none")
    with pytest.raises(NoProgramError, match=r"no operator 'toi'"):
        registry.load("toi.many")


def test_no_driver(root, monkeypatch):
    class NoLibrary(FakeApi):
        def _cuInit(self, flags):  # noqa: N802
            raise RuntimeError("libcuda.so.1 not found")

    with pytest.raises(DriverNotFoundError, match=r"expected a CUDA driver, found none .*libcuda.so.1.*nvidia-smi"):
        samples.opened(root, NoLibrary()).load("toy.many")


def test_no_cuda_python(root, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    with pytest.raises(DriverNotFoundError, match=r"cannot import cuda.bindings .*pip install 'cuda-python>=12.9,<14'"):
        samples.opened(root, None).load("toy.many")


def test_no_device(registry, api):
    api.fail("cuInit", NO_DEVICE)
    with pytest.raises(DriverNotFoundError, match=r"the driver sees none; .*CUDA_VISIBLE_DEVICES"):
        registry.load("toy.many")
    registry.load("toy.many")


def test_a_driver_that_is_too_old(root):
    api = FakeApi(version=12020)
    with pytest.raises(DriverError, match=r"driver for CUDA 12.8 or newer, found one for 12.2"):
        samples.opened(root, api).load("toy.many")
    assert api.images == {}


def test_a_wrong_ordinal(registry):
    with pytest.raises(DriverError, match=r"device 7: the CUDA driver answered CUDA_ERROR_INVALID_DEVICE"):
        registry.load("toy.many", 7)


@pytest.mark.parametrize(
    "call",
    [
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuFuncSetAttribute",
        "cuFuncLoad",
        "cuCtxPushCurrent",
        "cuDevicePrimaryCtxRetain",
    ],
)
def test_a_failed_load_leaves_nothing_behind(registry, api, call):
    api.fail(call, OUT_OF_MEMORY)
    with pytest.raises(DriverError, match=r"CUDA_ERROR_OUT_OF_MEMORY") as caught:
        registry.load("toy.one.t1")
    assert (caught.value.code, caught.value.name) == (2, "CUDA_ERROR_OUT_OF_MEMORY")
    assert api.images == {}
    assert api.contexts == []
    assert registry.load("toy.one.t1").name == "toy.one.t1"


def test_the_second_of_two_kernels_is_missing(registry, api):
    api.fail("cuModuleGetFunction", 500, nth=2)
    with pytest.raises(DriverError, match=r"finding kernel toy_pair_plan: .*CUDA_ERROR_NOT_FOUND"):
        registry.load("toy.pair")
    assert api.images == {}


def test_launch_features_are_allowed_before_the_first_launch(registry, api):
    registry.load("toy.one.t1")
    (attributes,) = api.attributes.values()
    assert attributes == {
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 200_000,
        "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED": 1,
    }
    registry.load("toy.many")
    assert len(api.attributes) == 1


def test_loading_while_a_capture_is_open_does_not_spoil_it(registry, api):
    api.capturing = True
    registry.load("toy.many")
    thread = threading.Thread(target=registry.load, args=("toy.pair",))
    thread.start()
    thread.join()
    assert len(api.images) == 2
    assert not api.spoiled
    assert api.count("cuThreadExchangeStreamCaptureMode") == 4


def test_a_driver_that_refuses_inside_a_capture_says_what_to_preload(registry, api):
    api.fail("cuModuleLoadData", CAPTURE_UNSUPPORTED)
    with pytest.raises(CaptureError, match=r"^toy.many for sm_90a cannot be loaded inside a capture.*preload"):
        registry.load("toy.many")
    assert registry.preload("toy", {"width": 896, "num_tokens": (2, 9)}) == ("toy.many",)


def test_preload_loads_what_a_range_can_select(registry, api):
    assert registry.preload("toy", {"width": 896, "num_tokens": (1, 64), "block_m": 8}) == ("toy.many", "toy.one.t1")
    assert registry.preload("toy", {"width": 384, "num_tokens": 3}) == ("toy.pair",)
    assert api.count("cuModuleLoadData") == 3
    assert registry.preload("toy") == ("toy.many", "toy.one.t1", "toy.pair")
    assert api.count("cuModuleLoadData") == 3
    with pytest.raises(ValueError, match=r"expected ranges of block_m, num_tokens, ways, width, got tokens"):
        registry.preload("toy", {"tokens": 1})
    with pytest.raises(NoProgramError, match=r"nothing in its domain lies in"):
        registry.preload("toy", {"num_tokens": (2000, 3000)})
    with pytest.raises(NoProgramError, match=r"nothing in its domain lies in"):
        registry.preload("toy", {"width": "wide"})


@pytest.mark.parametrize("ends", [(2, 9), [2, 9], range(2, 10), range(2, 3), 5])
def test_preload_takes_any_two_ends_and_ranges(registry, ends):
    assert registry.preload("toy", {"width": 896, "num_tokens": ends}) == ("toy.many",)


@pytest.mark.parametrize(
    "ends",
    [(), [1], (1, 2, 3), range(0), range(1, 4, 2), range(9, 1, -1), (1, None), 1.5, None, {1, 5}, ("1", "5"), [5, 1]],
)
def test_preload_refuses_other_ranges(registry, api, ends):
    with pytest.raises(
        ValueError, match=r"^toy: num_tokens: expected a value, \[first, last\] with .*, or a range .*, got "
    ):
        registry.preload("toy", {"num_tokens": ends})
    assert api.calls == []


@pytest.mark.parametrize("selection", [None, 3, ["toy.many"]])
def test_load_says_what_it_takes(registry, api, selection):
    with pytest.raises(TypeError, match=r"^selection: expected a Selection .* or a program's name, got "):
        registry.load(selection)
    assert api.calls == []


def in_child(action) -> str:
    """What `action` raises in a forked child, by name."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            action()
            answer = "nothing"
        except BaseException as error:
            answer = type(error).__name__
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.wait()
    return answer


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forking_before_cuda_is_used_works(registry):
    assert in_child(lambda: registry.load("toy.many")) == "nothing"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forking_after_cuda_is_used_is_a_clear_error(registry, api):
    launch = registry.load("toy.many").prepare(POINTERS, stream=1)
    launch()
    assert in_child(lambda: registry.load("toy.many")) == "ForkError"
    assert in_child(lambda: registry.load("toy.pair")) == "ForkError"
    api.fail("cuLaunchKernelEx", NOT_INITIALIZED, nth=2)  # what the real driver answers in the child
    assert in_child(launch) == "ForkError"


def test_a_parent_that_used_cuda_without_chord(api):
    api.fail("cuInit", NOT_INITIALIZED)
    with pytest.raises(ForkError, match=r"spawn or forkserver"):
        Driver(api).start()
