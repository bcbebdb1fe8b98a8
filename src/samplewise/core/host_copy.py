"""Asynchronous copies of tensors between the host and a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device. A copy from the CPU does not wait for work queued on the device: torch copies
    pageable memory before it returns. MPS has no such copies.
    """
    from_host = tensor.device.type == "cpu" and device.type not in ("cpu", "mps")
    return tensor.to(device, non_blocking=from_host)


class HostCopy:
    """Copies of tensors on the host, started now and complete when they are read.

    The host waits in `read` only for work that the device has not done yet. A device without events is read with an
    ordinary copy, in which the host waits for all queued work.
    """

    __slots__ = ("_event", "_tensors")

    def __init__(self, tensors: Sequence[Tensor]):
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        self._event: Any = None
        self._tensors = list(tensors)
        if len(devices) == 1:
            self._event = _new_event(next(iter(devices)))
        if self._event is not None:  # torch copies to pinned memory, which does not block the host
            self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            _record(self._event, next(iter(devices)))

    def __reduce__(self) -> tuple[type[HostCopy], tuple[list[Tensor]]]:
        """Copies and pickles have the values: events cannot be copied."""
        return HostCopy, (self.read(),)

    def read(self) -> list[Tensor]:
        """The tensors on the CPU."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        self._event = None
        self._tensors = [tensor.cpu() for tensor in self._tensors]
        return self._tensors


def _new_event(device: torch.device) -> Any:
    """Event of the device's own module, such as torch.cuda; None if it has none."""
    make = getattr(_module(device), "Event", None)
    return None if make is None else make()


def _record(event: Any, device: torch.device) -> None:
    """Record the event on the stream of the copies: the current one of this device."""
    current_stream = getattr(_module(device), "current_stream", None)
    if current_stream is None:
        event.record()
    else:
        event.record(current_stream(device))


def _module(device: torch.device) -> Any:
    """Module such as torch.cuda; None if torch has none for the device, for example for "xla"."""
    return getattr(torch, device.type, None)
