"""`samplewise doctor` without a recipe: versions and machine, for bug reports."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires

import torch

from samplewise.core.memory import accelerator, device_name, processor_name
from samplewise.core.package import UNKNOWN, installed_version

OMITTED = ("demo", "dev")  # extras that consist of others, and of the tools of the tests
# Variables that change what torch computes, or with what. Others may contain paths.
VARIABLES = """
    ATEN_CPU_CAPABILITY CUBLAS_WORKSPACE_CONFIG CUDA_LAUNCH_BLOCKING CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES
    MKL_NUM_THREADS OMP_NUM_THREADS ONEDNN_MAX_CPU_ISA PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF
    PYTORCH_ENABLE_MPS_FALLBACK TORCHDYNAMO_DISABLE TORCH_COMPILE_DISABLE
""".split()
REQUIREMENT = re.compile(r"""([\w.-]+)[^;]*;.*\bextra == ["'](\w+)["']""")


def environment() -> str:
    """Return versions, machine, devices and optional packages, one per line. Paths and user names are left out."""
    rows = [*_system(), *_packages(), *((name, os.environ[name]) for name in VARIABLES if name in os.environ)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _system() -> Iterator[tuple[str, str]]:
    yield "samplewise", installed_version()
    yield "torch", torch.__version__
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    yield "CPU", f"{processor_name()}, {os.cpu_count()} logical cores, {torch.backends.cpu.get_cpu_capability()}"
    yield "threads", f"{torch.get_num_threads()} (torch)"
    yield "device", _device()


def _device() -> str:
    device = accelerator()
    if device is None:
        return "cpu (no accelerator found)"
    count = torch.accelerator.device_count()
    return f"{count} × {device_name(torch.device(device.type, 0))}"


def _packages() -> Iterator[tuple[str, str]]:
    """Optional packages with their versions, by extra."""
    for extra, packages in _extras().items():
        versions = {package: installed_version(package) for package in packages}
        yield f"[{extra}]", ", ".join(f"{name} {'missing' if v == UNKNOWN else v}" for name, v in versions.items())


def _extras() -> dict[str, list[str]]:
    """Extra -> packages, from the metadata of the installed samplewise."""
    extras: dict[str, list[str]] = {}
    with suppress(PackageNotFoundError):
        for requirement in filter(None, map(REQUIREMENT.match, requires("samplewise") or [])):
            package, extra = requirement.groups()
            if extra not in OMITTED:
                extras.setdefault(extra, []).append(package)
    return extras
