"""Device memory handed over by other libraries: DLPack objects and objects with `__cuda_array_interface__`.

An array is accepted when it is contiguous (row-major) and holds the argument's element type; it is never copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from chord.registry.driver import Driver

_DLPACK_CUDA = 2
_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "pinned host memory", 13: "managed memory"}
_ELEMENTS = {"f32": ("f", 32), "f16": ("f", 16), "bf16": ("bf", 16), "i32": ("i", 32), "i64": ("i", 64), "u8": ("u", 8)}
"""Kind and bits of each buffer type; "any" takes everything."""

_DLPACK_KINDS = {0: "i", 1: "u", 2: "f", 4: "bf", 6: "bool"}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def address_of(value: Any, element: str, device: int, driver: Driver) -> tuple[int, object]:  # noqa: ANN401
    """Address of an array of `element` ("any", "f32", ...) on a device, and what must outlive the use of that address.

    Raises ValueError, without the argument's name, for anything else.
    """
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _from_dlpack(value, element, device, driver)
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        raise ValueError(
            "expected an address, None, a DLPack object or one with __cuda_array_interface__, "
            f"got {type(value).__name__}"
        )
    return _from_interface(interface, element, device, driver), value


def _from_dlpack(value: Any, element: str, device: int, driver: Driver) -> tuple[int, object]:  # noqa: ANN401
    kind, place = value.__dlpack_device__()
    if kind != _DLPACK_CUDA:
        raise ValueError(
            f"is on {_DLPACK_DEVICES.get(int(kind), f'DLPack device {int(kind)}')}, expected a CUDA device"
        )
    _check_device(int(place), device)
    try:
        with driver.context(device):  # torch exports from the current device alone
            capsule = value.__dlpack__(stream=-1)  # -1: no synchronisation, ordering is the caller's
    except (BufferError, RuntimeError, TypeError) as error:
        raise ValueError(f"cannot be exported through DLPack: {error}") from error
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    shape = tensor.shape[: tensor.ndim]
    if tensor.strides:
        _check_contiguous(shape, tensor.strides[: tensor.ndim])
    _check_element(element, _DLPACK_KINDS.get(tensor.code, "?"), tensor.bits * tensor.lanes)
    # The capsule keeps the memory; as nobody takes it over, it frees its own descriptor when it goes.
    return (tensor.data or 0) + tensor.byte_offset, capsule


def _from_interface(interface: dict[str, Any], element: str, device: int, driver: Driver) -> int:
    pointer = int(interface["data"][0] or 0)
    place = driver.pointer_device(pointer) if pointer else None
    if place is not None:
        _check_device(place, device)
    kind, size_bytes = interface["typestr"][1], int(interface["typestr"][2:])
    strides = interface.get("strides")
    if strides is not None:
        _check_contiguous(interface["shape"], [stride / size_bytes for stride in strides])
    if kind != "V":  # types that numpy has no name for, such as bfloat16, cannot be checked
        _check_element(element, kind, size_bytes * 8)
    return pointer


def _check_device(place: int, device: int) -> None:
    if place != device:
        raise ValueError(f"is on cuda:{place}, the kernel is on cuda:{device}")


def _check_contiguous(shape: Sequence[int], strides: Sequence[float]) -> None:
    """Strides in elements. Axes of length 1 may have any stride, as may arrays without elements."""
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected and 0 not in shape:
            raise ValueError(
                f"has shape {tuple(shape)} and strides {tuple(strides)} (elements), expected it contiguous"
            )
        expected *= length


def _check_element(element: str, kind: str, bits: int) -> None:
    if element != "any" and _ELEMENTS[element] != (kind, bits):
        raise ValueError(f"has elements of type {kind}{bits}, expected {element}")
