"""What vLLM 0.32 looks for when it makes humming's device lookups traceable. Nothing here asks it."""

from __future__ import annotations

import torch


class DeviceInfo:
    """A device by its index; it knows nothing else."""

    def __init__(self, index: int | torch.device | None = None) -> None:
        self.index = get_device_index(index)


def get_device_index(device: int | torch.device | None = None) -> int:
    """The CUDA index of a device, the current one's without any."""
    index = device.index if isinstance(device, torch.device) else device
    return torch.cuda.current_device() if index is None else index
