from chord.integrations.humming.device import DeviceInfo, get_device_index

__all__ = ["DeviceInfo", "get_device_index"]
