"""Test case: a small model, its inputs and one loss per sample, built reproducibly."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEFAULT_B = 5  # the other sizes of the cases are 6 (features), 7 (tokens), 3 (outputs), 8 (hidden), 11 (vocabulary)

Make = Callable[[int], tuple[Any, ...]]
Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CaseTraits:
    """Properties of a case that decide which tests it takes part in."""

    float32: bool = True  # float32 rows are within 1e-4 of float64 rows
    autocast: bool = True  # runs under bf16 autocast
    second_order: bool = True  # PyTorch can differentiate the rows once more
    rows: bool = True  # dim 0 of every input is the sample; a sample alone has the same loss
    sizes: tuple[int, ...] | None = None  # supported batch sizes; None: all
    needs_module: bool = False  # a buffer with B rows is distinguished from data only by the module
    shared: tuple[int, ...] = ()  # rows of data shared by all samples; with such a B they look like samples


@dataclass(frozen=True)
class Case:
    """One test case. `make(B)` returns (model, *inputs); `loss(output)` maps the model's output to losses (B,)."""

    name: str
    make: Make = field(repr=False)
    loss: Loss = field(repr=False)
    interacts: bool = False  # the loss of one sample depends on others: refused by default
    traits: CaseTraits = CaseTraits()

    def build(
        self, B: int = DEFAULT_B, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Build (model, inputs) on the CPU in float64, then cast and move: equal values everywhere, up to rounding."""
        with seeded(zlib.crc32(self.name.encode())), default_dtype(torch.float64):
            model, *inputs = self.make(B)
        return model._apply(lambda t: cast(t, dtype)).to(device), tuple(cast(x, dtype).to(device) for x in inputs)

    def output(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        with seeded(0):
            return model(*inputs)

    def losses(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        return self.loss(self.output(model, inputs))

    def allows(self, B: int) -> bool:
        sizes = self.traits.sizes
        return (sizes is None or B in sizes) and B not in self.traits.shared

    @property
    def has_outputs(self) -> bool:
        """True if the output is a plain tensor (B, ...), so that any other loss can be applied to it."""
        return self.loss is squared_loss


class Cases(dict[str, Case]):
    """Cases by name."""

    def add(self, make: Make | None = None, loss: Loss | None = None, interacts: bool = False, **traits: Any) -> Any:
        """Decorator that adds a case under the function's name; `traits` are fields of CaseTraits."""
        if make is None:
            return lambda function: self.add(function, loss, interacts, **traits)
        name = make.__name__
        assert name not in self, f"case names must be unique; found two cases named {name}"
        self[name] = Case(name, make, loss or squared_loss, interacts, CaseTraits(**traits))
        return make


def squared_loss(output: Tensor) -> Tensor:
    output = torch.view_as_real(output) if output.is_complex() else output
    output = output.flatten(1)
    scale = torch.linspace(0.6, 1.4, output.shape[1], dtype=output.dtype, device=output.device)
    return (output * scale + 0.3).square().mean(1)


def confident_loss(output: Tensor) -> Tensor:
    logits = 100 * output.flatten(1)
    targets = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    return F.cross_entropy(logits, targets, reduction="none")


def as_losses(output: Tensor) -> Tensor:
    return output


class Net(nn.Module):
    """Module made of a forward function and its parts: modules, parameters, or tensors (registered as buffers)."""

    def __init__(self, forward: Callable[..., Any], **parts: Any):
        super().__init__()
        self._run = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self._run(self, *inputs)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.5 * torch.randn(shape))


def tokens(*shape: int, vocabulary: int = 11) -> Tensor:
    return torch.randint(0, vocabulary, shape)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to `dtype`, or to the complex dtype of that precision; integer tensors are unchanged."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class seeded:
    """Context manager: seed torch's CPU generator inside the block, restore its state on exit."""

    def __init__(self, seed: int):
        self.seed = seed

    def __enter__(self) -> None:
        self.before = torch.get_rng_state()
        torch.manual_seed(self.seed)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.before)


class default_dtype:
    """Context manager: set torch's default dtype inside the block, restore it on exit."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
