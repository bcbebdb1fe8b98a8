"""The two passes of EK-FAC over a loader: covariances of the factors, then eigenvalues in their eigenbases.

Legend: b sample, t token, l and r the two dims of a layer's matrix, with one more row or column for the bias.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.attribution.blocks import (
    LEFT,
    RIGHT,
    Block,
    DiagonalBlock,
    Forms,
    KroneckerBlock,
    Layer,
    only_term,
    with_zeros,
)
from samplewise.attribution.sampled_labels import ExpectedLoss
from samplewise.core.batches import keep_whole, length, take
from samplewise.core.losses import LossFn, constants_of
from samplewise.core.microbatch import Microbatch
from samplewise.core.state import RandomState
from samplewise.dataset_pass import share_of_rank
from samplewise.engine.arguments import wanted_parameters, wide_dtype
from samplewise.engine.gradients import factored_grads, gradients
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.factored import Factor, FactoredGrad
from samplewise.engine.grads.kernels import mm
from samplewise.parallel import collectives
from samplewise.parallel.collectives import on_every_rank
from samplewise.scan import Scanner

LARGEST_SIDE = 16384  # a larger covariance would need more than 2 GB in float64; the identity is its eigenbasis
RESIDUAL = 1e-3  # largest relative one of an eigendecomposition in float32; 2e-5 is usual in 2,304 dims


def fit(model: nn.Module, loss_fn: LossFn, loader: Iterable[Any], seed: int, microbatch: Microbatch) -> list[Block]:
    """Blocks of the EK-FAC matrix of all trainable parameters. Collective."""
    parameters = wanted_parameters(model).named
    passes = Passes(model, loss_fn, loader, seed, microbatch)
    covariances = Covariances()
    covariances.samples = on_every_rank(lambda: passes.run(covariances.add, "sw.ekfac, pass 1 of 2"))
    covariances.sum_over_ranks(parameters)
    eigenvalues = Eigenvalues(covariances.blocks(parameters), {name: tuple(p.shape) for name, p in parameters.items()})
    on_every_rank(lambda: passes.run(eigenvalues.add, "sw.ekfac, pass 2 of 2"))
    return eigenvalues.blocks(covariances.samples)


@dataclass(frozen=True)
class Passes:
    """Passes over the batches of this rank, with random numbers that depend on the seed and the number of the batch."""

    model: nn.Module
    loss_fn: LossFn
    loader: Iterable[Any]
    seed: int
    microbatch: Microbatch

    def run(self, add: Callable[[Forms, int], None], description: str) -> int:
        """Call add(forms, samples) for each microbatch and draw of labels, and return the number of samples of this
        rank. The state of the random generators is restored.
        """

        # A single sample is doubled, because the engine has no factors for one sample.
        def losses_of_two(model: nn.Module, batch: Any) -> Any:
            return self.loss_fn(model, take(batch, [0, 0]) if length(batch) == 1 else batch)

        scanner = Scanner(self.model, losses_of_two, self.microbatch)
        samples = 0
        state = RandomState()
        try:
            for number, batch in share_of_rank(self.loader, description):
                batch = keep_whole(batch, constants_of(self.loss_fn))
                # Both passes draw the same labels for a batch, whichever rank computes it.
                seed = self.seed * 1_000_003 + number
                expected = self.loss_fn if isinstance(self.loss_fn, ExpectedLoss) else None
                if expected is None:
                    torch.manual_seed(seed % 2**63)
                else:
                    expected.seed(seed)
                for piece, losses in scanner.losses(batch):
                    # One draw after the other: the draws share the graph of one forward pass.
                    for of_draw in chain([losses], () if expected is None else expected.further_draws()):
                        g = gradients(of_draw, self.model)
                        forms: Forms = factored_grads(g)
                        is_doubled = length(piece) == 1 and len(g) == 2
                        with torch.no_grad():  # factors are attached to the graph
                            if is_doubled:
                                forms = {name: _first_sample(form) for name, form in forms.items()}
                            add(forms, 1 if is_doubled else len(g))
                    samples += 1 if is_doubled else len(g)
        finally:
            state.restore()
        return samples


def _first_sample(form: PerSampleGrad) -> PerSampleGrad:
    return form.select(slice(0, 1)) if isinstance(form, FactoredGrad) else DenseGrad(form.rows(0, 1))


# --- first pass ----------------------------------------------------------------------------------------------------


class Covariances:
    """Sums over samples and tokens of the outer products of each layer's factors, in float64."""

    def __init__(self) -> None:
        self.samples = 0
        self.layers: dict[str, Layer | None] = {}  # by weight; None: without factors in at least one microbatch
        self.sums: dict[tuple[str, str], Tensor] = {}  # by weight and side

    def add(self, forms: Forms, samples: int) -> None:
        for name, form in forms.items():
            term = only_term(form)
            if term is None:
                self.layers[name] = None
            elif name not in self.layers and all(bool(factor.any()) for factor in term if isinstance(factor, Tensor)):
                # Not before a gradient is known: zeros would fit any bias, also one that another layer has.
                biases = {layer.bias for layer in self.layers.values() if layer is not None}
                free = {other: grad for other, grad in forms.items() if other not in biases}
                self.layers[name] = find_layer(name, form, free)
            layer = self.layers.get(name)
            if layer is None or term is None:
                continue
            if not layer.describes(forms, term):
                self.layers[name] = None
                continue
            left, right = layer.extend(*term)
            for side, factor, opposite in ((LEFT, left, right), (RIGHT, right, left)):
                if side in layer.bases:
                    product = _covariance(factor, opposite)
                    if (name, side) in self.sums:
                        self.sums[name, side] += product  # in place: no second matrix in float64
                    else:
                        self.sums[name, side] = product.double()

    def sum_over_ranks(self, parameters: Mapping[str, Tensor]) -> None:
        """Add the sums of the other ranks. Layers must be the same on all ranks whose losses depend on the weight."""
        gathered = collectives.all_gather_object((self.samples, self.layers))
        self.samples = sum(samples for samples, _ in gathered)
        if not self.samples:
            raise ValueError("the loader must yield at least one batch; found none.")
        self.layers = _agree([layers for _, layers in gathered], parameters)
        for layer in filter(None, self.layers.values()):
            for side in layer.bases:
                size = layer.sides[side]
                zeros = torch.zeros(size, size, dtype=torch.float64, device=parameters[layer.weight].device)
                self.sums[layer.weight, side] = collectives.all_reduce_(self.sums.get((layer.weight, side), zeros))

    def blocks(self, parameters: Mapping[str, Tensor]) -> list[Block]:
        """Blocks with the eigenvectors of the covariances, and eigenvalues of zero."""
        layers = [layer for layer in self.layers.values() if layer is not None]
        blocks: list[Block] = []
        for layer in layers:
            weight = parameters[layer.weight]
            dtype = wide_dtype(weight.dtype)
            # `pop`: sums and eigenvectors of all layers together would take twice the memory.
            bases = {side: eigenvectors(self.sums.pop((layer.weight, side)), dtype) for side in layer.bases}
            eigenvalues = weight.new_zeros(*layer.sides.values(), dtype=dtype)
            blocks.append(KroneckerBlock(layer, bases.get(LEFT), bases.get(RIGHT), eigenvalues))
        names = {name for layer in layers for name in layer.names}
        for name, p in parameters.items():
            if name not in names:
                zeros = torch.zeros(p.shape, dtype=wide_dtype(p.dtype.to_real()), device=p.device)
                blocks.append(DiagonalBlock(name, zeros))
        order = {name: number for number, name in enumerate(parameters)}
        return sorted(blocks, key=lambda block: order[block.names[0]])


def find_layer(name: str, form: PerSampleGrad, forms: Forms) -> Layer | None:
    """Layer of a weight, joined with a vector of the same module whose gradients are the sums of output gradients; None
    if both sides have too many dims.
    """
    term = only_term(form)
    assert isinstance(form, FactoredGrad) and term is not None
    dense = [side for side, factor in zip((LEFT, RIGHT), term, strict=True) if isinstance(factor, Tensor)]
    rows, columns = form.matrix
    layer = Layer(name, (rows, columns), bases=tuple(dense))
    module = name.rpartition(".")[0]
    vectors = [key for key, vector in forms.items() if key.rpartition(".")[0] == module and len(vector.shape) == 1]
    candidates = [replace(layer, bias=vector, bias_side=side) for vector in vectors for side in (RIGHT, LEFT)]
    with_bias = [candidate for candidate in candidates if len(dense) == 2 and candidate.describes(forms, term)]
    layer = with_bias[0] if with_bias else layer
    bases = tuple(side for side in dense if layer.sides[side] <= LARGEST_SIDE)
    return replace(layer, bases=bases) if bases else None


def _covariance(factor: Factor, opposite: Factor) -> Tensor:
    """Sum of outer products of a factor (b, t, l) over the tokens at which the factor of the opposite side
    is not zero: padding has no gradient.
    """
    assert isinstance(factor, Tensor)
    if isinstance(opposite, Tensor):
        factor = factor * (opposite != 0).any(2, keepdim=True)
    tokens = factor.flatten(0, 1)
    return mm(tokens.T, tokens)


def eigenvectors(covariance: Tensor, dtype: torch.dtype) -> Tensor:
    """Eigenvectors of a covariance, in columns, of this dtype.

    Computed in float32 for float32, in less than half the time of float64: the second pass is exact in any orthonormal
    basis, and covariances of float32 factors are not known more precisely. In float64 if float32 has failed.
    """
    if dtype == torch.float32:
        narrow = covariance.float()
        with contextlib.suppress(RuntimeError):  # no convergence
            eigenvalues, vectors = torch.linalg.eigh(narrow)
            if _decomposes(eigenvalues, vectors, narrow):
                return vectors
    return torch.linalg.eigh(covariance)[1].to(dtype)


def _decomposes(eigenvalues: Tensor, vectors: Tensor, matrix: Tensor) -> bool:
    """True if the vectors are orthonormal, and eigenvectors of the matrix. Products with four random vectors show it at
    little cost.
    """
    probes = torch.randn(len(matrix), 4, generator=torch.Generator().manual_seed(0)).to(matrix)
    coordinates = vectors.T @ probes
    pairs = [(vectors @ coordinates, probes), (vectors @ (eigenvalues[:, None] * coordinates), matrix @ probes)]
    return all(bool((product - wanted).norm() <= RESIDUAL * wanted.norm()) for product, wanted in pairs)


def _agree(of_ranks: Sequence[Mapping[str, Layer | None]], names: Iterable[str]) -> dict[str, Layer | None]:
    """Layers that no rank contradicts, in the order of the names."""
    layers: dict[str, Layer | None] = {}
    for name in names:
        candidates = [rank_layers[name] for rank_layers in of_ranks if name in rank_layers]
        agree = bool(candidates) and all(layer == candidates[0] for layer in candidates)
        layers[name] = candidates[0] if agree else None
    return layers


# --- second pass ---------------------------------------------------------------------------------------------------


class Eigenvalues:
    """Sums over samples of the squared gradients along the eigenvectors of each block, in float64."""

    def __init__(self, blocks: Sequence[Block], shapes: Mapping[str, tuple[int, ...]]):
        self._blocks = blocks
        self._shapes = shapes
        self.sums = [torch.zeros_like(block.eigenvalues, dtype=torch.float64) for block in blocks]

    def add(self, forms: Forms, samples: int) -> None:
        for block, total in zip(self._blocks, self.sums, strict=True):
            if any(name in forms for name in block.names):
                complete = with_zeros(forms, block, self._shapes, samples)
                total += block.coordinates(complete).sum_of_squares(None)

    def blocks(self, samples: int) -> list[Block]:
        """Blocks with the mean over the samples of all ranks."""
        collectives.all_reduce_bucketed_(self.sums)
        return [
            replace(block, eigenvalues=(total / samples).to(block.eigenvalues.dtype))
            for block, total in zip(self._blocks, self.sums, strict=True)
        ]
