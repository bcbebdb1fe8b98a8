"""`sw.backward`: one backward pass with transforms, for hand-written loops and for loops of other frameworks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import inf
from numbers import Real
from typing import Any, Literal, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samplewise.core import observation
from samplewise.core.modes import check_modes, warn
from samplewise.core.text import plural
from samplewise.engine.arguments import Parameters, WantedParameters, check_is_tensor, wanted_parameters, wide_dtype
from samplewise.engine.backward import accumulate_grad, without_grads
from samplewise.engine.deferred_checks import collect_in
from samplewise.engine.gradients import (
    Gradients,
    accumulate,
    check_interacting,
    free_graph,
    gradients_of_samples,
    losses_by_sample,
    norms_during,
)
from samplewise.engine.outputs import (
    LossParts,
    Outputs,
    Samples,
    parts_of_loss,
    rest_gradients,
    sample_count,
    stop_at_outputs,
)
from samplewise.errors import (
    DistributedError,
    LossesError,
    NonFiniteGradientError,
    NonFiniteLossError,
    TransformError,
)
from samplewise.parallel import collectives
from samplewise.parallel.ddp import is_replica, refuse_static_graph
from samplewise.transforms.chain import Chain, Transforms, as_chain
from samplewise.transforms.stats import SampleStats, one_per_sample
from samplewise.transforms.transform import Reference

Rest = Literal["refuse", "plain"]


@dataclass(frozen=True, repr=False)
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
    def weights(self) -> Tensor | dict[str, Tensor]:
        coefficients = self.stats.coefficients
        return torch.ones_like(self.stats.losses) if coefficients is None else coefficients

    @property
    def losses(self) -> Tensor:
        return self.stats.losses

    def __repr__(self) -> str:
        norms = f"median norm {self.norms.median().item():.3g}, largest {self.norms.max().item():.3g}"
        weights = [self.weights] if isinstance(self.weights, Tensor) else list(self.weights.values())
        changed = int((torch.stack(weights) != 1).any(0).sum())
        return f"BackwardResult({plural(len(self), 'sample')}, {norms}, {changed} with weights other than 1)"


def backward(
    loss: Tensor,
    model: Parameters,
    outputs: Outputs | None = None,
    transforms: Transforms = (),
    through: Through | None = None,
    *,
    denominator: float | Tensor = 1,
    losses: Tensor | None = None,
    counts: Tensor | None = None,
    batch: Any = None,
    samples: Samples | None = None,
    rest: Rest = "refuse",
    interacting: Literal["refuse", "allow"] = "refuse",
    retain_graph: bool = False,
) -> BackwardResult:
    """Accumulate the gradient of a loss into `.grad`, as loss.backward() does, with transforms of the samples'
    gradients before they are summed. Returns the norms and weights of the samples.

        stats = sw.backward(loss, model, outputs=logits, transforms=[sw.clip(1.0)], denominator=len(logits))

    loss: a scalar, with `outputs`; or losses (B,), one per sample, whose sum is differentiated.
    outputs: the tensor (B, ...) that a scalar loss was computed from, or a list of tensors: see `sw.gradients`.
    transforms: as in `sw.Step`. Transforms that need all samples of an update are refused: `sw.Step` has them.
    through: an Accelerator, a Fabric, a torch.amp.GradScaler, or any function or object with a method `backward(loss)`,
        that runs the pass and applies its loss scale and its division by accumulation steps. Default: loss.backward().
    denominator: what the sum of the samples' losses is divided by, for a mean the number of samples (default 1).
        Norms, and bounds such as that of `sw.clip`, refer to the gradient of the sample's own loss, before this
        division. A scalar loss already contains the division; losses (B,) are divided here.
    losses, counts, batch: losses (B,) for a scalar loss, counts (B,) and the batch, for transforms that read them.
    samples: the sample of each row of `outputs`, or of each element of losses: see `sw.gradients`.
    rest: parameters that a scalar loss reaches outside of `outputs`, as by an auxiliary loss of routers, a penalty on
        weights or a learned temperature: "refuse" (default) raises GraphError; "plain" adds the ordinary gradient of
        these paths to `.grad`, without transforms. It is in no sample's norm.
    interacting: "refuse" (default) or "allow", as in `sw.gradients`.
    retain_graph: if False (default), the graph is freed, as by loss.backward(). True for a second pass through parts of
        it, such as that of another loss with the same trunk.

    The gradients of a DistributedDataParallel or of a model sharded with `fully_shard` are computed in two passes, the
    second one an ordinary backward pass, in which torch averages over the ranks. Without transforms, the pass is that
    of loss.backward(), bit for bit.
    """
    check_is_tensor(loss, "sw.backward(loss, model)")
    check_rest(rest)
    check_interacting(interacting)
    chain = checked_chain(transforms)
    _check_denominator(denominator)
    parameters = wanted_parameters(model)
    for module in parameters.modules:  # modes in the first pass, and later if the model itself is in eval mode
        if module not in _mode_checked and outputs is not None:
            _warn_of_mean(loss, outputs, samples, chain, denominator)
        if not module.training or module not in _mode_checked:
            check_modes([module])
            _mode_checked.add(module)
    two_passes = _needs_two_passes(parameters, chain)
    if outputs is None and losses is not None:
        raise LossesError("losses must be left out if the loss has one value per sample; found both.")
    sample_losses = losses
    if outputs is None:
        sample_losses = losses_by_sample(loss, samples)
        loss = sample_losses / denominator
    framework = FrameworkPass(through, loss, retain_graph)
    if observation.observers:
        shown = next(iter(parameters.named.values())) if outputs is None else outputs
        observation.show_gradients(framework.scale(loss), [shown] if isinstance(shown, Tensor) else shown)
    parts: LossParts | None = None
    try:
        with framework.allow_passes():
            scaled = framework.scale(loss)
            if outputs is not None:
                parts = parts_of_loss(scaled, outputs, parameters.named, samples, rest)
            strategy = "twice" if two_passes else None
            g = gradients_of_samples(scaled, parameters, parts, samples, strategy=strategy, interacting=interacting)
            _check_values(chain, g, counts, batch)
            stats = SampleStats(_losses_of(sample_losses, g, chain), counts, batch=batch)
            if not chain.weighs:
                framework.run(loss.sum(), g, parts is not None and bool(parts.rest))
            directions: dict[Reference, dict[str, Tensor]] = {}
            if chain.references:
                with without_grads(parameters.named.values()):  # references may run backward passes
                    directions = chain.directions(parameters.named)
            chain.samples.measure(g, stats, directions, norms=True, scale=framework.factor / denominator)
            if chain.weighs and framework.skips_overflow:
                g._settle()  # on an accelerator, values are not checked before that
    except (NonFiniteLossError, NonFiniteGradientError):
        if not framework.skips_overflow:
            raise
        # The scaler must skip the update, also if a gradient without the transforms is finite.
        framework.run(loss.sum() * torch.nan if chain.weighs else loss.sum())
        values = loss if parts is None else parts.values
        return without_norms(len(values), values.device, sample_losses, counts)
    if chain.weighs:
        with collect_in(g._checks):  # all values on an accelerator are checked in one host sync
            (stats,) = chain.samples.weigh([stats])
        if two_passes:
            total = (g._graph.losses * (one_per_sample(stats.weights) / framework.factor)).sum()
            if parts is not None and parts.rest:
                with stop_at_outputs(parts.consumers):
                    framework.run(total + loss)
            else:
                framework.run(total)
        else:
            with framework.allow_passes():
                rest_sums = {} if parts is None else rest_gradients(scaled, parts, parameters.named)
                accumulate(g, stats.coefficients, retain_graph)
            for name, gradient in rest_sums.items():
                accumulate_grad(parameters.named[name], gradient)
    if not retain_graph:
        free_graph(g, "sw.backward")
    for state in chain.states:
        if state.commits_each_pass:
            values = state.values(stats)
            state.commit(torch.cat(collectives.all_gather_tensors(values.double())) if two_passes else values)
    return BackwardResult(stats.result())


def without_norms(
    samples: int, device: torch.device, losses: Tensor | None = None, counts: Tensor | None = None
) -> BackwardResult:
    """Results of samples whose norms are not known, NaN; and so are their losses if they are None."""
    unknown = torch.full((samples,), torch.nan, device=device)
    return BackwardResult(SampleStats(unknown if losses is None else losses.detach(), counts, raw_norms=unknown))


def checked_chain(transforms: Transforms) -> Chain:
    """The transforms as a chain. Raises TransformError if one of them needs more samples than those of one pass."""
    chain = as_chain(transforms)
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
        if transform.window or transform.renormalizes or transform.positions is not None:
            raise TransformError(
                f"{transform} must get all samples of an update; found it in sw.backward, which has those of one pass "
                "only. Use sw.Step."
            )
    return chain


_mode_checked: WeakSet[nn.Module] = WeakSet()  # models of earlier passes
MEAN = 1  # torch's number of reduction="mean"


def check_rest(rest: Any) -> None:
    if rest not in ("refuse", "plain"):
        raise ValueError(f"rest must be 'refuse' or 'plain'; found {rest!r}.")


def _check_denominator(denominator: Any) -> None:
    number = isinstance(denominator, Real) or (isinstance(denominator, Tensor) and denominator.numel() == 1)
    if not (number and 0 < denominator < inf):
        raise ValueError(
            f"denominator must be a positive, finite number, for a mean the number of samples; found {denominator!r}."
        )


def _warn_of_mean(
    loss: Tensor, outputs: Outputs, samples: Samples | None, chain: Chain, denominator: float | Tensor
) -> None:
    """Warn if transforms read norms, and the loss is a mean over samples, by its last operation, without a denominator.

    Cosines do not depend on the denominator.
    """
    node: Any = loss.grad_fn
    first = outputs if isinstance(outputs, Tensor) else next(iter(outputs), None)
    if isinstance(denominator, Tensor) or denominator != 1 or node is None:
        return
    is_mean = node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == MEAN
    reads_norms = any("norms" in t.needs and t.reference is None for t in chain.samples.transforms)
    if not (is_mean and reads_norms and isinstance(first, Tensor) and first.dim()):
        return
    count = len(first) if samples is None else sample_count([samples] if isinstance(samples, Tensor) else samples)
    if count > 1:
        warn(
            "the loss is a mean, but denominator is 1: norms, and bounds such as that of sw.clip, then refer to the "
            f"part of a sample in the mean, which falls with the batch size. Pass denominator={count}, the number "
            "of samples, or the number of tokens of a mean over tokens."
        )


def _check_values(chain: Chain, g: Gradients, counts: Tensor | None, batch: Any) -> None:
    """Check the arguments that transforms read beside the losses."""
    _check_rows("counts", counts, len(g))
    if counts is not None:
        g._checks.add(_refuse_counts, torch.where(counts >= 0, counts, torch.nan), counts)
    reads = next((t for t in chain.samples.transforms if "batch" in t.needs), None)
    if reads is not None and batch is None:
        raise TransformError(f"{reads} must get the batch; found none. Pass batch= to sw.backward.")


def _needs_two_passes(parameters: WantedParameters, chain: Chain) -> bool:
    """True if gradients must come from an ordinary backward pass, in which torch sums them over the ranks."""
    _refuse_flat_parameters(parameters.modules)
    refuse_static_graph(parameters.named.values())
    two_passes = parameters.sharded or is_replica(parameters.named.values())
    if two_passes and chain.samples.by_parameter:
        raise TransformError(
            "transforms must give one coefficient per sample for a DistributedDataParallel or a sharded model, whose "
            f"gradients come from an ordinary backward pass; found one per parameter in {chain!r}. Leave out "
            "by='parameter', or use sw.Step."
        )
    return two_passes


def _refuse_flat_parameters(modules: Sequence[nn.Module]) -> None:
    if not dist.is_available() or not dist.is_initialized():
        return
    for name, module in (named for model in modules for named in model.named_modules()):
        if type(module).__name__ == "FullyShardedDataParallel":
            raise DistributedError(
                "a sharded model must be sharded with fully_shard (FSDP2); found FullyShardedDataParallel, which "
                f"flattens parameters{f', at {name!r}' if name else ''}. With Accelerate, set fsdp_version=2."
            )


def _check_rows(name: str, values: Tensor | None, samples: int) -> None:
    if values is not None and values.shape != (samples,):
        raise LossesError(f"{name} must have one value per sample, shape ({samples},); found {tuple(values.shape)}.")


def _refuse_counts(values: Tensor, counts: Tensor) -> None:
    """Raise LossesError for the first of the counts whose value is not finite."""
    invalid = counts[~values.isfinite()]
    if len(invalid):
        raise LossesError(f"counts must be finite, and zero or positive; found {invalid[0].item():g}.")


def _losses_of(losses: Tensor | None, g: Gradients, chain: Chain) -> Tensor:
    """Losses (B,) for transforms and results; NaN if they are not known."""
    _check_rows("losses", losses, len(g))
    if losses is not None:
        return losses.detach()
    reads = next((t for t in chain.samples.transforms if "losses" in t.needs), None)
    if reads is not None:
        raise TransformError(
            f"{reads} must get the losses of the samples; found a scalar loss, in which they are not known. Pass "
            "losses= (B,), computed with reduction='none'."
        )
    return torch.full_like(g._graph.losses, torch.nan, requires_grad=False)


# --- passes of frameworks: `through=` ---------------------------------------------------------------------------------


class HasBackward(Protocol):
    """Object that runs backward passes, such as an Accelerator or a Fabric: its method `backward` gets the loss."""

    @property
    def backward(self) -> Callable[..., object]: ...


Through = HasBackward | torch.amp.GradScaler | Callable[..., object]


class FrameworkPass:
    """Backward pass of a framework, or of torch if `through` is None.

    factor: by which the framework multiplies the loss.
    skips_overflow: it has a gradient scaler, which skips updates with non-finite gradients.
    """

    def __init__(self, through: Through | None, loss: Tensor, retain_graph: bool = False):
        self.factor: Tensor | float = 1.0
        # A gradient scaler, or an Accelerator or a Fabric that has one; also a method of these.
        owner = getattr(through, "__self__", through)
        if isinstance(owner, torch.amp.GradScaler):
            self.skips_overflow = owner.is_enabled()
        else:
            owners = (owner, getattr(owner, "_precision", None))
            self.skips_overflow = any(getattr(owner, "scaler", None) is not None for owner in owners)
        self._through = through
        self._backward = pass_of(through)
        self._ran = False
        if not callable(self._backward):
            raise TypeError(
                "through must be an Accelerator, a Fabric, a GradScaler, or a function that runs a backward pass; "
                f"found {type(through).__name__}."
            )
        self._options = {"retain_graph": True} if retain_graph else {}
        if retain_graph and not _accepts_retain_graph(self._backward):
            raise TypeError(
                "through must accept retain_graph, as loss.backward does, if the graph is retained; found a function "
                "without this argument. Add it, or leave out retain_graph=True."
            )
        if through is None:
            return
        unit = torch.ones((), dtype=wide_dtype(loss.dtype), device=loss.device, requires_grad=True)
        self._backward(unit * 1)
        if unit.grad is None:
            raise TypeError(
                "through must run the backward pass of the loss that it gets; found that it computed no gradient. "
                "Pass a function that calls loss.backward()."
            )
        self.factor = unit.grad

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as the framework differentiates it, so that half-precision gradients do not underflow."""
        return loss * self.factor if isinstance(self.factor, Tensor) else loss

    def run(self, total: Tensor, g: Gradients | None = None, has_rest: bool = False) -> None:
        """Run the pass of `total`, once. With `g`, the gradients of its parts, also compute their norms, if possible in
        the same pass. `has_rest`: the parts do not add up to `total`.
        """
        if self._ran:
            return
        if g is not None and not (g._sharded or has_rest) and _accepts_retain_graph(self._backward):
            norms_during(g, partial(self._pass, total, retain_graph=True))
        else:
            if g is not None:
                g.norms()
            self._pass(total, **self._options)

    def _pass(self, total: Tensor, **options: bool) -> None:
        self._ran = True
        with self.allow_passes():  # fabric.backward ends with a reset of its flag
            self._backward(total, **options)

    def allow_passes(self) -> AbstractContextManager[None]:
        """Context manager for backward passes other than those of the framework."""
        passes = nullcontext() if self._through is None else _allow_in_fabric()
        return observation.hidden_during(passes) if observation.observers else passes


def pass_of(through: Any) -> Any:
    """Function that runs the backward pass of a loss."""
    if through is None:
        return Tensor.backward
    if isinstance(through, torch.amp.GradScaler):
        return lambda loss, **options: through.scale(loss).backward(**options)
    return getattr(through, "backward", through)


def run_pass(through: Any, loss: Tensor, retain_graph: bool) -> None:
    """Run the backward pass of a loss, without transforms."""
    pass_of(through)(loss, **({"retain_graph": True} if retain_graph else {}))


def _accepts_retain_graph(function: Callable[..., object]) -> bool:
    parameters = signature(function).parameters.values()
    return any(p.name == "retain_graph" or p.kind is p.VAR_KEYWORD for p in parameters)


@contextmanager
def _allow_in_fabric() -> Iterator[None]:
    """Context manager: backward passes in the block count as passes of fabric.backward. With mixed precision, Fabric
    refuses all others, by hooks on the outputs of the model.
    """
    flag = "_in_fabric_backward"
    names = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
    before = {name: vars(sys.modules[name])[flag] for name in names if hasattr(sys.modules.get(name), flag)}
    for name in before:
        setattr(sys.modules[name], flag, True)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(sys.modules[name], flag, value)
