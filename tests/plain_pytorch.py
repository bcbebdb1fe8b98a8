"""One forward and backward pass of a zoo case in plain PyTorch, without the engine."""

import re

import torch

CPU = torch.device("cpu")
# The messages with which PyTorch and oneDNN refuse an operation that the machine has no kernel for. Any other error
# is a mistake in the case.
NO_KERNEL = re.compile(r"could not create a primitive|not implemented for|not supported|unsupported")


def not_run_reason(case, precision):
    """PyTorch's error as "Type: first line" if PyTorch cannot run the case on this machine, else ""."""
    model, inputs = case.build(dtype=precision.dtype)
    try:
        with precision.autocast_context(CPU):
            losses = case.losses(model, inputs)
        losses.sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        assert NO_KERNEL.search(reason), f"{case.name} must fail only if a kernel is missing; found {reason}"
        return reason
    return ""
