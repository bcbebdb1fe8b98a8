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
    return no_kernel_reason(case.name, lambda: case.losses(model, inputs), precision.autocast_context(CPU))


def no_kernel_reason(name, losses, autocast):
    """As `not_run_reason`, for a function that returns losses and is called under `autocast`."""
    try:
        with autocast:
            result = losses()
        result.sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        assert NO_KERNEL.search(reason), f"{name} must fail only if a kernel is missing; found {reason}"
        return reason
    return ""
