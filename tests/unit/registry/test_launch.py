"""Prepared launches: what reaches the driver, on which stream and device, and what is refused before that."""

from __future__ import annotations

import builtins
import ctypes
import gc
import hashlib
import json
import os
import re
import threading
import weakref

import pytest
from unit.registry import samples
from unit.registry.fakes import FakeApi

from chord.errors import DriverError, UnsupportedDeviceError
from chord.registry import grid
from chord.registry.driver import Driver
from chord.registry.launch import Kernel
from chord.registry.schema import Arm, GridRule

GOOD = {"x": 0x1000, "map": None, "num_tokens": 9, "factor": 2.5, "total": -3}
INVALID_VALUE = 1


@pytest.fixture
def many(registry):
    return registry.load("toy.many")


@pytest.fixture
def pair(registry):
    return registry.load("toy.pair")


def slots(params: int, *types):
    """What a kernel would read as its arguments."""
    addresses = (ctypes.c_void_p * len(types)).from_address(params)
    return tuple(kind.from_address(address).value for kind, address in zip(types, addresses, strict=True))


TYPES = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_int64)


def test_arguments_arrive(many, api):
    api.contexts.append(1)
    launch = many.prepare(GOOD)
    gc.collect()
    launch()
    (launched,) = api.launches
    assert slots(launched["params"], *TYPES) == (0x1000, 0, 9, 2.5, -3)
    assert (launched["grid"], launched["stream"], launch.grids, launch.name) == (3, 0, (3,), "toy.many")
    config = launched["config"]
    assert (config.blockDimX, config.blockDimY, config.blockDimZ, config.sharedMemBytes) == (128, 1, 1, 0)
    assert config.numAttrs == 0


def test_a_cluster_launch(registry, api):
    registry.load("toy.one.t1").prepare(GOOD | {"num_tokens": 1}, stream=7)()
    (launched,) = api.launches
    config = launched["config"]
    assert (launched["grid"], launched["stream"], config.sharedMemBytes) == (16, 7, 200_000)
    (attribute,) = config.attrs
    assert attribute.id.name == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
    cluster = attribute.value.clusterDim
    assert (cluster.x, cluster.y, cluster.z) == (16, 1, 1)


def test_two_kernels_in_order(pair, api):
    pair.prepare(GOOD | {"num_tokens": 1000}, stream=7)()
    first, second = api.launches
    assert (first["grid"], second["grid"]) == (132, 1)  # max_per_sm = 1 is the tighter bound
    assert first["params"] == second["params"]
    assert [a.id.name for a in first["config"].attrs] == ["CU_LAUNCH_ATTRIBUTE_COOPERATIVE"]
    assert [a.id.name for a in second["config"].attrs] == ["CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"]
    assert second["config"].attrs[0].value.programmaticStreamSerializationAllowed == 1
    assert first["config"].attrs[0].value.cooperative == 1


def test_occupancy_is_asked_once(pair, api):
    for tokens in (1, 2, 3):
        pair.prepare(GOOD | {"num_tokens": tokens}, stream=1)()
    assert api.count("cuOccupancyMaxActiveBlocksPerMultiprocessor") == 1
    assert [launch["grid"] for launch in api.launches[::2]] == [1, 2, 3]


def test_nothing_can_be_resident(root):
    registry = samples.opened(root, FakeApi(resident_per_sm=0))
    with pytest.raises(
        UnsupportedDeviceError, match=r"toy.pair: device 0 cannot hold one block with 0 bytes .* of toy_pair"
    ):
        registry.load("toy.pair")


@pytest.mark.parametrize(
    ("rule", "cluster", "value", "resident", "sms", "expected"),
    [
        (GridRule(param="n"), 1, 0, None, None, 1),
        (GridRule(param="n", per=4), 1, 9, None, None, 3),
        (GridRule(param="n", max=5), 1, 9, None, None, 5),
        (GridRule(param="n"), 4, 9, None, None, 12),
        (GridRule(param="n", max=11), 4, 9, None, None, 8),
        (GridRule(param="n", max=2), 4, 9, None, None, 4),
        (GridRule(param="n", max_per_sm=2), 1, 10**6, None, 132, 264),
        (GridRule(param="n", co_resident=True), 8, 10**6, 128, None, 128),
        (GridRule(blocks=16), 16, 0, None, None, 16),
        (GridRule(blocks=1000, max_per_sm=1), 1, 0, None, 132, 132),
    ],
)
def test_grid_rules(rule, cluster, value, resident, sms, expected):
    assert grid.blocks(rule, cluster, value, resident, sms) == expected


def test_clusters_that_fit(root):
    api = FakeApi(clusters=8)
    kernel = samples.kernel("k", cluster=16, grid=GridRule(param="num_tokens", co_resident=True))
    arm = Arm(template="t", args=samples.ARGS, summary="")
    made = Kernel("toy.k", samples.program("k", [kernel]), arm, "sm_90a", 0, Driver(api), [0x77])
    assert made.prepare(GOOD | {"num_tokens": 10**6}).grids == (128,)
    api.clusters = 0
    with pytest.raises(UnsupportedDeviceError, match=r"cannot hold one cluster of 16 blocks"):
        Kernel("toy.k", samples.program("k", [kernel]), arm, "sm_90a", 0, Driver(api), [0x77])


def test_too_few_clusters_fit(root):
    rule = GridRule(param="num_tokens", co_resident=True, min_resident=40)
    kernel = samples.kernel("k", cluster=16, grid=rule)
    arm = Arm(template="t", args=samples.ARGS, summary="")
    api = FakeApi(clusters=3)
    Kernel("toy.k", samples.program("k", [kernel]), arm, "sm_90a", 0, Driver(api), [0x77])
    api.clusters = 2
    with pytest.raises(UnsupportedDeviceError, match=r"cannot hold 3 clusters of 16 blocks with"):
        Kernel("toy.k", samples.program("k", [kernel]), arm, "sm_90a", 0, Driver(api), [0x77])


def test_the_launch_follows_the_current_stream(many, api):
    current = [11]
    launch = many.prepare(GOOD, stream=lambda: current[0])
    for stream in (11, 12, 11, 13):
        current[0] = stream
        launch()
    assert [launched["stream"] for launched in api.launches] == [11, 12, 11, 13]
    assert api.launches[0]["config"] is api.launches[2]["config"]


def test_the_first_launch_finds_its_configuration_made(many, api, monkeypatch):
    """After preload a first launch is to cost what later ones do (R09): nothing is left for it to set up."""
    fixed, followed = many.prepare(GOOD, stream=7), many.prepare(GOOD, stream=lambda: 9)
    followed.make_ready(9)
    monkeypatch.setattr(Driver, "launch_config", None)
    fixed()
    followed()
    assert [launched["stream"] for launched in api.launches] == [7, 9]


def test_streams_without_end_do_not_pile_up(many, api):
    streams = iter(range(1, 2000))
    launch = many.prepare(GOOD, stream=lambda: next(streams))
    for _ in range(1999):
        launch()
    assert [launched["stream"] for launched in api.launches] == list(range(1, 2000))
    assert len(launch._by_stream) <= 256


def test_threads_share_a_launch_on_streams_of_their_own(many, api):
    stream_of = threading.local()
    launch = many.prepare(GOOD, stream=lambda: stream_of.value)

    def work(stream):
        stream_of.value = stream
        for _ in range(200):
            launch()

    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = {s: sum(launched["stream"] == s for launched in api.launches) for s in range(1, 5)}
    assert counts == dict.fromkeys(range(1, 5), 200)


def test_another_device_is_current(root):
    """The default stream belongs to the current context: the launch changes to its own and back."""
    api = FakeApi(capabilities=((9, 0), (9, 0)))
    launch = samples.opened(root, api).load("toy.pair", 1).prepare(GOOD, stream=0)
    api.contexts.append(1)
    for _ in range(3):
        launch()
        assert api.contexts == [1]
    assert len(api.launches) == 6
    assert {api.owner[launched["function"]] for launched in api.launches} == {1}
    assert api.count("cuLaunchKernelEx") == 7  # only the first call had to find out


def test_a_thread_without_a_context(many, api):
    thread = threading.Thread(target=many.prepare(GOOD))
    thread.start()
    thread.join()
    assert len(api.launches) == 1


def test_a_refused_launch(pair, api):
    launch = pair.prepare(GOOD, stream=5)
    api.fail("cuLaunchKernelEx", INVALID_VALUE, nth=2)
    with pytest.raises(DriverError, match=r"launching toy.pair on device 0: .*CUDA_ERROR_INVALID_VALUE") as caught:
        launch()
    assert caught.value.code == INVALID_VALUE
    launch()
    assert len(api.launches) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 2**31}, "num_tokens = 2147483648 (int): expected a value that fits i32"),
        ({"num_tokens": -(2**31) - 1}, "num_tokens = -2147483649 (int): expected a value that fits i32"),
        ({"num_tokens": 1.0}, "num_tokens = 1.0 (float): expected a value that fits i32"),
        ({"num_tokens": "9"}, "num_tokens = '9' (str): expected a value that fits i32"),
        ({"num_tokens": None}, "num_tokens = None (NoneType): expected a value that fits i32"),
        ({"total": 2**63}, "total = 9223372036854775808 (int): expected a value that fits i64"),
        ({"factor": 1e39}, "factor = 1e+39 (float): expected a value that fits f32"),
        ({"factor": "1"}, "factor = '1' (str): expected a value that fits f32"),
        ({"x": -1}, "x = -1 (int): expected an address"),
        ({"x": 2**64}, "x = 18446744073709551616 (int): expected an address"),
        ({"x": 1.5}, "x expected an address, None, a DLPack object or one with __cuda_array_interface__, got float"),
        ({"x": b"1"}, "got bytes"),
        ({"y": 1}, "expected the arguments x, map, num_tokens, factor, total; unknown y"),
    ],
)
def test_arguments_that_do_not_fit(many, api, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        many.prepare(GOOD | change)
    assert api.launches == []


def test_missing_and_misspelt_arguments(many):
    short = {name: value for name, value in GOOD.items() if name != "x"}
    with pytest.raises(ValueError, match=r"expected the arguments x, map, .*; missing x$"):
        many.prepare(short)
    with pytest.raises(ValueError, match=r"; missing x; unknown X$"):
        many.prepare(short | {"X": 1})


def test_numbers_of_other_libraries(many, api):
    numpy = pytest.importorskip("numpy")
    numbers = {"num_tokens": numpy.int32(8), "factor": numpy.float32(0.5), "total": numpy.int64(7)}
    launch = many.prepare(GOOD | numbers, stream=1)
    launch()
    assert slots(api.launches[0]["params"], *TYPES) == (0x1000, 0, 8, 0.5, 7)
    assert api.launches[0]["grid"] == 2


class Interface:
    """An array as CuPy, Numba or torch would show it. The fake driver puts address bits 40 and up on that device."""

    def __init__(self, typestr="<f4", shape=(4, 8), strides=None, pointer=0x2000):
        self.__cuda_array_interface__ = {
            "typestr": typestr,
            "shape": shape,
            "strides": strides,
            "data": (pointer, False),
            "version": 3,
        }


class DLPack:
    """A numpy array that claims to lie on a CUDA device."""

    def __init__(self, array, device=(2, 0), kind=2):
        self.array, self.device = array, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None):
        assert stream == -1
        return self.array.__dlpack__()


def test_the_cuda_array_interface(many, api):
    array = Interface()
    seen = weakref.ref(array)
    launch = many.prepare(GOOD | {"x": array}, stream=1)
    del array
    gc.collect()
    assert seen() is not None
    launch()
    assert slots(api.launches[0]["params"], *TYPES)[0] == 0x2000
    del launch, api.launches[:]
    gc.collect()
    assert seen() is None


def test_owners_of_addresses_live_as_long_as_the_launch(many):
    owner = Interface()
    seen = weakref.ref(owner)
    launch = many.prepare(GOOD, stream=1, owners=(owner,))
    del owner
    gc.collect()
    assert seen() is not None
    del launch
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (Interface("<f8"), "x has elements of type f64, expected f32"),
        (Interface("<i4"), "x has elements of type i32, expected f32"),
        (Interface(strides=(64, 4)), "x has shape (4, 8) and strides (16.0, 1.0) (elements), expected it contiguous"),
        (Interface(strides=(4, 16)), "expected it contiguous"),
        (Interface(strides=(0, 4)), "expected it contiguous"),
        (Interface(pointer=(3 << 40) + 64), "x is on cuda:3, the kernel is on cuda:0"),
        (object(), "x expected an address, None, a DLPack object"),
    ],
)
def test_arrays_that_do_not_fit(many, array, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        many.prepare(GOOD | {"x": array})


@pytest.mark.parametrize(
    "array",
    [
        Interface(strides=(32, 4)),
        Interface(shape=(1, 8), strides=(999, 4)),
        Interface(shape=(0, 8), strides=(7, 7), pointer=0),
        Interface(shape=()),
        Interface("<V4"),
    ],
)
def test_arrays_that_fit(many, array):
    many.prepare(GOOD | {"x": array})


def test_dlpack(many, api):
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(32, dtype=numpy.float32)
    view = array[8:24].reshape(2, 8)
    launch = many.prepare(GOOD | {"x": DLPack(view)}, stream=1)
    launch()
    assert slots(api.launches[0]["params"], *TYPES)[0] == view.ctypes.data
    assert api.count("cuPointerGetAttribute") == 0


def test_dlpack_arrays_that_do_not_fit(many):
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros((4, 8), dtype=numpy.float32)
    for wrong, message in (
        (array, "x is on cpu, expected a CUDA device"),
        (DLPack(array, (13, 0)), "x is on managed memory, expected a CUDA device"),
        (DLPack(array, (2, 1)), "x is on cuda:1, the kernel is on cuda:0"),
        (DLPack(array[:, :4]), "x has shape (4, 4) and strides (8, 1)"),
        (DLPack(array.T), "expected it contiguous"),
        (DLPack(array.astype(numpy.float64)), "x has elements of type f64, expected f32"),
        (DLPack(array.astype(numpy.int32)), "x has elements of type i32, expected f32"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            many.prepare(GOOD | {"x": wrong})


def test_every_array_on_another_device_is_named(many):
    far = {"x": Interface(pointer=1 << 40), "map": Interface("<i4", pointer=2 << 40)}
    with pytest.raises(ValueError, match=r"x is on cuda:1, the kernel is on cuda:0; map is on cuda:2, the kernel"):
        many.prepare(GOOD | far)


class ForbiddenError(Exception):
    pass


def test_a_launch_hashes_opens_and_reads_nothing(pair, api, monkeypatch):
    """Nor does it allocate or wait: the only thing the driver hears is the launches."""
    launch = pair.prepare(GOOD, stream=lambda: 3)
    launch()
    heard = len(api.calls)

    def forbidden(*args, **kwargs):
        raise ForbiddenError

    with monkeypatch.context() as patched:
        patched.setattr(hashlib, "sha256", forbidden)
        patched.setattr(builtins, "open", forbidden)
        patched.setattr(os, "open", forbidden)
        patched.setattr(type(os.environ), "__getitem__", forbidden)
        patched.setattr(type(os.environ), "get", forbidden, raising=False)
        patched.setattr(os, "getenv", forbidden)
        patched.setattr(json, "loads", forbidden)
        for _ in range(10_000):
            launch()
    assert {name for name, _ in api.calls[heard:]} == {"cuLaunchKernelEx"}
    assert len(api.launches) == 20_002


def test_the_driver_calls_of_a_launch_are_what_it_launches(pair, api):
    launch = pair.prepare(GOOD, stream=lambda: 3)
    call, calls = launch.driver_calls(3)
    for arguments in calls:
        assert call(*arguments)[0] == 0
    by_hand = list(api.launches)
    api.launches.clear()
    launch()
    assert api.launches == by_hand
    assert len(by_hand) == 2


def test_two_launches_become_one_that_asks_for_the_stream_once(many, pair, api):
    asked = []
    first = pair.prepare(GOOD, stream=lambda: asked.append(0) or 3)
    second = many.prepare(GOOD | {"num_tokens": 40}, stream=lambda: 9)
    both = first.followed_by(second)
    both()
    assert (asked, both.name, both.grids) == ([0], "toy.pair and toy.many", first.grids + second.grids)
    found = [(made["function"], made["params"], made["stream"]) for made in api.launches]
    wanted = [call[1:3] for launch in (first, second) for call in launch.driver_calls(3)[1]]
    assert found == [(function, params, 3) for function, params in wanted]
    del first, second
    gc.collect()
    api.launches.clear()
    both()
    assert slots(api.launches[-1]["params"], *TYPES)[2] == 40, "it keeps the arguments of both"


def test_launches_of_two_devices_do_not_become_one(registry, many, api):
    api.capabilities = ((9, 0), (9, 0))
    elsewhere = registry.load("toy.pair", device=1).prepare(GOOD)
    with pytest.raises(ValueError, match=r"expected a launch on device 0, as toy.many, got toy.pair on device 1"):
        many.prepare(GOOD).followed_by(elsewhere)


def test_the_host_cost_over_a_bare_call(pair):
    """With a driver that does nothing, what is left is what a prepared launch adds to a bare call."""
    from statistics import median
    from time import perf_counter

    answer = (0,)
    launch = pair.prepare(GOOD, stream=lambda: 3)
    launch._call = lambda config, function, params, extra: answer
    launch()
    call, ((config, function, params, extra), _) = launch.driver_calls(3)

    def bare():
        call(config, function, params, extra)
        call(config, function, params, extra)

    def cost(action) -> float:
        start = perf_counter()
        for _ in range(1000):
            action()
        return (perf_counter() - start) / 1000

    added = median(cost(launch) - cost(bare) for _ in range(15))
    assert added < 3e-6, f"{added * 1e6:.2f} us over two bare calls"
