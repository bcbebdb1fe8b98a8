"""Accelerator of this process through torch's device modules (torch.cuda, torch.xpu, torch.mps, …): random generators,
memory and names. No function but `device_name` initializes a device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def accelerator() -> torch.device | None:
    """Return the accelerator of this machine, without an index; None if there is none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def device_function(device: torch.device, name: str) -> Any:
    """Return a function of the device's module, such as torch.cuda.mem_get_info; None if it has no such function."""
    return None if device.type == "cpu" else getattr(torch.get_device_module(device), name, None)


def device_name(device: torch.device) -> str:
    """Return the device with the name of its model, as in "cuda:0: NVIDIA A100", if torch knows it."""
    name = device_function(device, "get_device_name")
    return str(device) if name is None else f"{device}: {name(device)}"


class DeviceGenerator:
    """Default random generator of an accelerator, with those methods of torch.Generator that save and restore it."""

    def __init__(self, device: torch.device):
        self.device = device

    def get_state(self) -> Tensor:
        return torch.get_device_module(self.device).get_rng_state(self.device)

    def set_state(self, state: Tensor) -> None:
        torch.get_device_module(self.device).set_rng_state(state, self.device)


def device_generators() -> list[DeviceGenerator]:
    """Return the generators of all devices of the accelerator; none before its first use in this process."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not _in_use(torch.get_device_module(kind)):
        return []
    count = torch.get_device_module(kind).device_count()
    return [DeviceGenerator(torch.device(kind.type, index)) for index in range(count)]


def _in_use(module: Any) -> bool:
    """True if random numbers may have been drawn on the device. torch.mps has no `is_initialized`."""
    if hasattr(module, "is_initialized"):
        return module.is_initialized()
    return module.is_available() and not module._is_in_bad_fork()


def seed_devices(seed: int) -> None:
    """Seed the generators of the accelerator; does nothing before its first use in this process."""
    generators = device_generators()
    if generators:
        module = torch.get_device_module(generators[0].device)
        getattr(module, "manual_seed_all", module.manual_seed)(seed)


def empty_cache() -> None:
    """Return the memory that the accelerator's allocator holds without using it."""
    device = accelerator()
    release = None if device is None else device_function(device, "empty_cache")
    if release is not None:
        release()
