"""`sw.backward`: one backward pass with transforms, for hand-written loops and for loops of other frameworks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samplewise.backward_through import FrameworkPass, Through
from samplewise.core.modes import check_modes
from samplewise.core.text import plural
from samplewise.engine.arguments import Parameters, WantedParameters, check_is_tensor, wanted_parameters
from samplewise.engine.backward import without_grads
from samplewise.engine.deferred_checks import collect_in
from samplewise.engine.gradients import Gradients, accumulate, free_graph, gradients_of_samples
from samplewise.engine.outputs import Outputs
from samplewise.errors import (
    DistributedError,
    LossesError,
    NonFiniteGradientError,
    NonFiniteLossError,
    TransformError,
)
from samplewise.parallel.ddp import is_replica, refuse_static_graph
from samplewise.transforms.chain import Chain, Transforms, as_chain
from samplewise.transforms.stats import SampleStats, one_per_sample
from samplewise.transforms.transform import Reference


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
    retain_graph: if False (default), the graph is freed, as by loss.backward(). True for a second pass through parts of
        it, such as that of another loss with the same trunk.

    The gradients of a DistributedDataParallel or of a model sharded with `fully_shard` are computed in two passes, the
    second one an ordinary backward pass, in which torch averages over the ranks. Without transforms, the pass is that
    of loss.backward(), bit for bit.
    """
    check_is_tensor(loss, "sw.backward(loss, model)")
    chain = checked_chain(transforms)
    _check_denominator(denominator)
    wanted = wanted_parameters(model)
    _check_modes(wanted.modules)
    two_passes = _needs_two_passes(wanted, chain)
    if outputs is None and losses is not None:
        raise LossesError("losses must be left out if the loss has one value per sample; found both.")
    sample_losses = loss if outputs is None else losses
    loss = loss / denominator if outputs is None else loss
    framework = FrameworkPass(through, loss, retain_graph)
    try:
        with framework.own_passes():
            strategy = "twice" if two_passes else None
            g = gradients_of_samples(framework.scaled(loss), wanted, outputs, strategy=strategy)
            _check_values(chain, g, counts, batch)
            stats = SampleStats(_checked_losses(sample_losses, g, chain), counts, batch=batch)
            if not chain.weighs:
                framework.run(loss.sum(), g)
            directions = _directions(chain, wanted.named)
            chain.samples.measure(g, stats, directions, norms=True, scale=framework.factor / denominator)
    except (NonFiniteLossError, NonFiniteGradientError):
        if not framework.skips_overflow:
            raise
        # The scaler must skip the update, also if a gradient without the transforms is finite.
        framework.run(loss.sum() * torch.nan if chain.weighs else loss.sum())
        samples = _first(loss if outputs is None else outputs)
        return without_norms(len(samples), samples.device, sample_losses, counts)
    if chain.weighs:
        with collect_in(g._checks):  # all values on an accelerator are checked in one host sync
            (stats,) = chain.samples.weigh([stats])
        if two_passes:
            framework.run((g._graph.losses * (one_per_sample(stats.weights) / framework.factor)).sum())
        else:
            with framework.own_passes():
                accumulate(g, stats.coefficients, retain_graph)
    if not retain_graph:
        free_graph(g, "sw.backward")
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


_checked: WeakSet[nn.Module] = WeakSet()  # models whose modes were checked


def _check_modes(modules: Sequence[nn.Module]) -> None:
    """Warn about modules in eval mode in the first pass of a model, and later if the model itself is in eval mode."""
    for model in modules:
        if not model.training or model not in _checked:
            check_modes([model])
            _checked.add(model)


def _check_denominator(denominator: Any) -> None:
    number = isinstance(denominator, Real) or (isinstance(denominator, Tensor) and denominator.numel() == 1)
    if not (number and 0 < denominator < inf):
        raise ValueError(
            f"denominator must be a positive, finite number, for a mean the number of samples; found {denominator!r}."
        )


def _check_values(chain: Chain, g: Gradients, counts: Tensor | None, batch: Any) -> None:
    """Check the arguments that transforms read beside the losses."""
    _check_rows("counts", counts, len(g))
    if counts is not None:
        g._checks.add(_refuse_counts, torch.where(counts >= 0, counts, torch.nan), counts)
    reads = next((t for t in chain.samples.transforms if "batch" in t.needs), None)
    if reads is not None and batch is None:
        raise TransformError(f"{reads} must get the batch; found none. Pass batch= to sw.backward.")


def _needs_two_passes(wanted: WantedParameters, chain: Chain) -> bool:
    """True if gradients must come from an ordinary backward pass, in which torch sums them over the ranks."""
    _refuse_flat_parameters(wanted.modules)
    refuse_static_graph(wanted.named.values())
    two_passes = wanted.sharded or is_replica(wanted.named.values())
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


def _checked_losses(losses: Tensor | None, g: Gradients, chain: Chain) -> Tensor:
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


def _directions(chain: Chain, named: Mapping[str, Tensor]) -> dict[Reference, dict[str, Tensor]]:
    """Direction of each reference. A function that computes one may run backward passes of its own."""
    if not chain.references:
        return {}
    with without_grads(named.values()):
        return chain.directions(named)


def _first(outputs: Outputs) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else next(z for z in outputs if z.requires_grad)
