"""`sw.backward`: one backward pass with transforms, for hand-written loops and for loops of other frameworks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samplewise.distributed.ddp import inner, is_replica
from samplewise.distributed.sharded_parameters import is_sharded
from samplewise.engine.backward import without_grads
from samplewise.engine.checks import Parameters, check_is_tensor, named_parameters, wide_dtype
from samplewise.engine.gradients import accumulate, gradients
from samplewise.engine.outputs import Outputs
from samplewise.errors import (
    DistributedError,
    LossesError,
    NonFiniteGradientError,
    NonFiniteLossError,
    TransformError,
)
from samplewise.transforms.chain import Chain, as_chain
from samplewise.transforms.measure import measure
from samplewise.transforms.reference import Reference
from samplewise.transforms.stats import PerSample, SampleStats, one_per_sample


@dataclass(frozen=True)
class BackwardResult:
    """Per-sample results of `sw.backward`. `len(result)` is the number of samples B.

    norms     (B,) norms of the samples' gradients, before any transform
    weights   (B,) coefficients of the gradients in the sum, or a dict name -> (B,)
    losses    (B,) losses; NaN if only a scalar loss is known
    """

    stats: SampleStats

    def __len__(self) -> int:
        return len(self.stats)

    @property
    def norms(self) -> Tensor:
        norms = self.stats.unscaled_norms
        assert norms is not None
        return norms

    @property
    def weights(self) -> PerSample:
        coefficients = self.stats.coefficients
        return torch.ones_like(self.stats.losses) if coefficients is None else coefficients

    @property
    def losses(self) -> Tensor:
        return self.stats.losses

    def __repr__(self) -> str:
        return f"BackwardResult({len(self)} samples)"


def backward(
    loss: Tensor,
    model: Parameters,
    outputs: Outputs | None = None,
    transforms: Any = (),
    through: Any = None,
    *,
    denominator: float = 1,
    losses: Tensor | None = None,
    counts: Tensor | None = None,
    batch: Any = None,
) -> BackwardResult:
    """Accumulate the gradient of a loss into `.grad`, as loss.backward() does, with transforms of the samples'
    gradients before they are summed. Returns the norms and weights of the samples.

        stats = sw.backward(loss, model, outputs=logits, transforms=[sw.clip(1.0)], denominator=len(logits))

    loss: a scalar, with `outputs`; or losses (B,), one per sample, whose sum is differentiated.
    outputs: the tensor (B, ...) that a scalar loss was computed from, or a list of tensors: see `sw.gradients`.
    transforms: as in `sw.Step`. Transforms that need all samples of an update are refused: `sw.Step` has them.
    through: an Accelerator, a Fabric, or any function or object with a method `backward(loss)`, that runs the pass and
        applies its loss scale and its division by accumulation steps. Default: loss.backward().
    denominator: what the sum of the samples' losses is divided by, for a mean the number of samples (default 1).
        Norms, and bounds such as that of `sw.clip`, refer to the gradient of the sample's own loss, before this
        division. A scalar loss already contains the division; losses (B,) are divided here.
    losses, counts, batch: losses (B,) for a scalar loss, counts (B,) and the batch, for transforms that read them.

    The gradients of a DistributedDataParallel or of a model sharded with `fully_shard` are computed in two passes, the
    second one an ordinary backward pass, in which torch averages over the ranks. Without transforms, the pass is that
    of loss.backward(), bit for bit.
    """
    check_is_tensor(loss, "sw.backward(loss, model)")
    chain = _checked(as_chain(transforms))
    if not denominator > 0:
        raise ValueError(f"denominator must be positive; found {denominator!r}.")
    parameters = inner(model) if isinstance(model, nn.Module) else model
    named = _whole_parameters(parameters)
    ordinary = is_replica(named.values()) or (isinstance(parameters, nn.Module) and is_sharded(parameters))
    _check_coefficients(chain, ordinary)
    framework = _framework(through, loss)
    strategy = "twice" if ordinary or not chain.weighs else None
    total = loss if outputs is not None else loss.sum() / denominator
    try:
        with _allowed_by_fabric(through):
            g = gradients(framework.scaled(loss), parameters, outputs=outputs, strategy=strategy)
            stats = SampleStats(_losses(loss, losses, len(g), chain), counts, batch=batch)
            scale = framework.factor if outputs is None else framework.factor / denominator
            measure(g, stats, chain.samples, _directions(chain, named), norms=True, scale=scale)
    except (NonFiniteLossError, NonFiniteGradientError):
        if not framework.skips_overflow:
            raise
        framework.run(total)
        return BackwardResult(_unknown(loss if outputs is None else outputs))  # the scaler skips the update
    (stats,) = chain.samples.weigh([stats])
    divided = denominator if outputs is None else 1
    if stats.coefficients is None:
        framework.run(total)
    elif ordinary:
        weights = one_per_sample(stats.coefficients) / (framework.factor * divided)
        framework.run((g._graph.losses * weights).sum())
    else:
        with _allowed_by_fabric(through):
            accumulate(g, _divided(stats.coefficients, divided), retain_graph=False)
    return BackwardResult(stats.result())


def _checked(chain: Chain) -> Chain:
    """The chain, if all its transforms need the samples of one pass only."""
    if chain.on_sum:
        raise TransformError(
            f"{chain.on_sum[0]} must be applied once per update; found it in sw.backward, which may be called several "
            "times before optimizer.step(). Use sw.Step."
        )
    if chain.grouping is not None:
        raise TransformError(
            f"{chain.grouping} must get all samples of an update; found it in sw.backward, which has those of one pass "
            "only. Use sw.Step."
        )
    for transform in chain.samples.transforms:
        if transform.window or transform.renormalises or transform.positions is not None:
            raise TransformError(
                f"{transform} must get all samples of an update; found it in sw.backward, which has those of one pass "
                "only. Use sw.Step."
            )
    return chain


def _whole_parameters(parameters: Parameters) -> dict[str, Tensor]:
    """Parameters by name. Raises DistributedError for FullyShardedDataParallel, which flattens them."""
    if isinstance(parameters, nn.Module):
        for name, module in parameters.named_modules():
            if type(module).__name__ == "FullyShardedDataParallel":
                raise DistributedError(
                    "a sharded model must be sharded with fully_shard (FSDP2); found FullyShardedDataParallel"
                    f"{f' at {name!r}' if name else ''}. With Accelerate, set fsdp_version=2."
                )
    return named_parameters(parameters)


def _check_coefficients(chain: Chain, ordinary: bool) -> None:
    if ordinary and chain.samples.by_parameter:
        raise TransformError(
            "transforms must give one coefficient per sample for a DistributedDataParallel or a sharded model, whose "
            f"gradients come from an ordinary backward pass; found one per parameter in {chain!r}. Leave out "
            "by='parameter', or use sw.Step."
        )


class _Framework(NamedTuple):
    """Backward pass of a framework, or of torch."""

    run: Callable[[Tensor], object]  # runs the pass of a scalar
    factor: Tensor | float = 1.0  # by which the framework multiplies the loss
    skips_overflow: bool = False  # True if it has a gradient scaler, which skips updates with non-finite gradients

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as the framework differentiates it, so that half-precision gradients do not underflow."""
        return loss * self.factor if isinstance(self.factor, Tensor) else loss


def _framework(through: Any, loss: Tensor) -> _Framework:
    if through is None:
        return _Framework(Tensor.backward)
    run = getattr(through, "backward", through)
    if not callable(run):
        raise TypeError(
            "through must be an Accelerator, a Fabric, or a function that runs a backward pass; found "
            f"{type(through).__name__}."
        )
    one = torch.ones((), dtype=wide_dtype(loss.dtype), device=loss.device, requires_grad=True)
    run(one * 1)
    if one.grad is None:
        raise TypeError(
            "through must run the backward pass of the loss that it gets; found that it computed no gradient. Pass a "
            "function that calls loss.backward()."
        )
    return _Framework(run, one.grad, _has_scaler(through))


def _has_scaler(through: Any) -> bool:
    """True if an Accelerator, or a Fabric, has a gradient scaler."""
    owners = (through, getattr(through, "_precision", None))
    return any(getattr(owner, "scaler", None) is not None for owner in owners)


@contextmanager
def _allowed_by_fabric(through: Any) -> Iterator[None]:
    """Context manager: the passes in the block count as passes of `through`. With mixed precision, Fabric refuses
    backward passes that do not run inside fabric.backward, by hooks on the outputs of the model.
    """
    flag = "_in_fabric_backward"
    names = () if through is None else ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
    before = {name: vars(sys.modules[name])[flag] for name in names if flag in vars(sys.modules.get(name, object))}
    for name in before:
        setattr(sys.modules[name], flag, True)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(sys.modules[name], flag, value)


def _losses(loss: Tensor, given: Tensor | None, samples: int, chain: Chain) -> Tensor:
    """Losses (B,) for transforms and results; NaN if they are not known."""
    if given is not None and given.shape != (samples,):
        raise LossesError(f"losses must have one value per sample, shape ({samples},); found {tuple(given.shape)}.")
    if given is not None:
        return given.detach()
    if loss.dim():
        return loss.detach()
    reads = next((t for t in chain.samples.transforms if "losses" in t.needs), None)
    if reads is not None:
        raise TransformError(
            f"{reads} must get the losses of the samples; found a scalar loss, in which they are not known. Pass "
            "losses= (B,), computed with reduction='none'."
        )
    return loss.new_full((samples,), torch.nan)


def _directions(chain: Chain, named: Mapping[str, Tensor]) -> dict[Reference, dict[str, Tensor]]:
    """Direction of each reference. A function that computes one may run backward passes of its own."""
    if not chain.references:
        return {}
    with without_grads(named.values()):
        return chain.directions(named)


def _divided(coefficients: PerSample, by: float) -> PerSample:
    if by == 1:
        return coefficients
    return coefficients / by if isinstance(coefficients, Tensor) else {n: c / by for n, c in coefficients.items()}


def _unknown(outputs: Outputs) -> SampleStats:
    """Results of samples whose gradients are not finite."""
    first = outputs if isinstance(outputs, Tensor) else outputs[0]
    unknown = torch.full((len(first),), torch.nan, device=first.device)
    return SampleStats(unknown, raw_norms=unknown)
