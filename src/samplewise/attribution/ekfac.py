"""`sw.ekfac`: eigenvalue-corrected Kronecker-factored curvature, for `sw.influence(..., curvature=)`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samplewise.attribution.blocks import LEFT, RIGHT, Block, DiagonalBlock, KroneckerBlock, Layer
from samplewise.attribution.curvature import Rows, check_shapes, checked_damping
from samplewise.attribution.ekfac_fit import fit
from samplewise.attribution.sampled_labels import ExpectedLoss
from samplewise.core.batches import check_loader
from samplewise.core.files import absolute, read_tensors, write_tensors
from samplewise.core.losses import LossFn, as_loss_fn, same_constants
from samplewise.core.microbatch import Microbatch
from samplewise.core.state import eval_mode
from samplewise.core.text import listed
from samplewise.dataset_pass import check_repeatable
from samplewise.engine.arguments import check_model, wanted_parameters
from samplewise.errors import StoreError

FORMAT = 1
Labels = Literal["expected", "sampled", "data"] | Callable[[Any, Any], Any]  # (model, batch) -> batch


def ekfac(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Any],
    *,
    labels: Literal["expected", "sampled", "data"] | Callable[[Any, Any], Any] = "expected",
    seed: int = 0,
    microbatch: Microbatch = "auto",
) -> EKFAC:
    """EK-FAC approximation of the Fisher matrix (Gauss-Newton matrix) of the mean loss over a loader.

    Each layer is a block of its own. For the weight of a linear layer or convolution, together with its bias, one pass
    over the loader sums the covariances of the layer's inputs and of the gradients of its outputs, over all tokens or
    positions, as if these were independent; their eigenvectors are computed in float64 for a model in float64, in
    float32 otherwise. Inputs count where the output has a gradient, so that padding does not. A second pass computes
    the mean over samples of the squared gradient along each pair of eigenvectors, which is exact in that basis.

    Other parameters, such as those of normalization layers, get the diagonal of the Fisher matrix. An embedding has one
    factor, of its outputs, because the covariance of its inputs is diagonal; so has a weight with a side of more than
    16,384 dims. `print` of the result lists which. The memory is that of the eigenvectors: the squares of the numbers
    of inputs and outputs of each layer.

    The model is in evaluation mode. With several ranks, every rank passes the same arguments and a loader of all
    samples, uses its share of the batches, and gets the whole result.

    loader: is iterated twice
    labels: "expected" (default): the expectation over labels that the model predicts, which is the Gauss-Newton matrix.
        Exact, in a backward pass for each output, if a sample has at most 16 outputs; for more, an unbiased estimate
        with random signs, the mean of 4 draws. "sampled": one draw of labels from the predictions, a noisier estimate.
        For both, the loss must be the cross-entropy, binary cross-entropy with logits or squared error of the model's
        output and the labels of a batch (x, labels), or dict with "labels", in a criterion or a function; models of
        transformers are known, too. For another loss, a function (model, batch) -> batch with sampled labels. "data":
        the labels of the batches, which gives the empirical Fisher matrix.
    seed: of the signs and sampled labels
    microbatch: number of samples computed at a time, "auto" (default) for the largest that fits into memory, or
        `sw.auto(memory)`
    """
    check_model(model, "sw.ekfac(model, loss_fn, loader)")
    check_loader(loader)
    check_repeatable(loader, "loader")
    loss_fn = _with_labels(as_loss_fn(loss_fn), labels)
    shapes = {name: tuple(p.shape) for name, p in wanted_parameters(model).named.items()}
    with eval_mode(model):
        return EKFAC(fit(model, loss_fn, loader, seed, microbatch), shapes)


def _with_labels(loss_fn: LossFn, labels: Labels) -> LossFn:
    if labels == "expected" or labels == "sampled":
        return ExpectedLoss(loss_fn, labels)
    if labels == "data":
        return loss_fn
    if not callable(labels):
        raise ValueError(
            "labels must be 'expected', 'sampled', 'data', or a function (model, batch) -> batch with sampled labels; "
            f"found {labels!r}."
        )

    def relabeled(model: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            batch = labels(model, batch)
        return loss_fn(model, batch)

    return same_constants(relabeled, loss_fn)


class EKFAC:
    """Curvature returned by `sw.ekfac`: blocks of Kronecker factors or diagonals."""

    def __init__(self, blocks: Sequence[Block], shapes: Mapping[str, tuple[int, ...]]):
        self.blocks = tuple(blocks)
        self.shapes = dict(shapes)

    def solve(self, rows: Rows, damping: float | None = None) -> dict[str, Tensor]:
        """Product of (H + damping * mean eigenvalue * identity)^-1 with each row, name -> (n, *shape).

        damping: multiple of the mean eigenvalue of each block, see `Curvature`; default 0.1
        """
        check_shapes({name: tuple(values.shape[1:]) for name, values in rows.items()}, self.shapes)
        multiple = checked_damping(damping)
        solved: dict[str, Tensor] = {}
        for block in self.blocks:
            solved.update(block.solve(rows, multiple * block.eigenvalues.mean()))
        return {name: solved[name] for name in rows}

    def solve_shifted(self, rows: Rows, damping: float) -> dict[str, Tensor]:
        """Product of (H + damping * identity)^-1 with each row: the same number is added to all eigenvalues."""
        return {name: solved for block in self.blocks for name, solved in block.solve(rows, damping).items()}

    @property
    def mean_eigenvalue(self) -> float:
        """Mean over all eigenvalues, of all blocks."""
        total = sum(float(block.eigenvalues.sum(dtype=torch.float64)) for block in self.blocks)
        return total / max(1, sum(block.eigenvalues.numel() for block in self.blocks))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the curvature to a file, atomically. `samplewise.attribution.EKFAC.load(path)` reads it."""
        tensors: dict[str, Tensor] = {}
        blocks = []
        for number, block in enumerate(self.blocks):
            fields, block_tensors = _block_state(block)
            blocks.append(fields)
            tensors.update({f"{number}.{name}": tensor for name, tensor in block_tensors.items()})
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        write_tensors(absolute(path), tensors, {"format": FORMAT, "shapes": shapes, "blocks": blocks})

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device = "cpu") -> EKFAC:
        """Read a file written by `save`; runs no code from it."""
        file_path = absolute(path)
        try:
            tensors, content = read_tensors(file_path, device)
            version = content["format"]
        except (ValueError, KeyError, TypeError) as why:
            raise StoreError(f"{file_path} must be a file written by EKFAC.save; found other content: {why}") from why
        if version != FORMAT:
            raise StoreError(
                f"{file_path} must have format {FORMAT}; found {version!r}. Use the version of samplewise that wrote "
                "it."
            )
        try:
            shapes = {name: _sizes(shape) for name, shape in content["shapes"].items()}
            blocks = [_block_of(fields, number, tensors) for number, fields in enumerate(content["blocks"])]
            _check_complete(blocks, shapes, tensors)
        except (ValueError, LookupError, TypeError, AttributeError) as why:
            raise StoreError(
                f"{file_path} must have blocks whose tensors match the shapes of the parameters; found "
                f"{type(why).__name__}: {why}. Compute the curvature again."
            ) from why
        return cls(blocks, shapes)

    def __repr__(self) -> str:
        layers = [block.layer for block in self.blocks if isinstance(block, KroneckerBlock)]
        groups = {
            "by Kronecker factors": [layer.weight for layer in layers if len(layer.bases) == 2],
            "by one factor": [layer.weight for layer in layers if len(layer.bases) == 1],
            "by the diagonal": [block.name for block in self.blocks if isinstance(block, DiagonalBlock)],
        }
        parts = [f"{len(names):,} {how}: {listed(names)}" for how, names in groups.items() if names]
        return f"EKFAC({'; '.join(parts)})"


def _block_state(block: Block) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields and tensors of a block, to be written."""
    if isinstance(block, DiagonalBlock):
        return {"name": block.name}, {"eigenvalues": block.eigenvalues}
    layer = block.layer
    fields = {
        "weight": layer.weight,
        "matrix": list(layer.matrix),
        "bases": list(layer.bases),
        "bias": layer.bias,
        "bias_side": layer.bias_side,
    }
    tensors = {"left": block.left, "right": block.right, "eigenvalues": block.eigenvalues}
    return fields, {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _block_of(fields: dict[str, Any], number: int, tensors: Mapping[str, Tensor]) -> Block:
    """Block from the fields of a file, which may have any content, and from its tensors."""
    eigenvalues = tensors[f"{number}.eigenvalues"]
    if "name" in fields:
        return DiagonalBlock(fields["name"], eigenvalues)
    rows, columns = _sizes(fields["matrix"])
    layer = Layer(fields["weight"], (rows, columns), tuple(fields["bases"]), fields["bias"], fields["bias_side"])
    bases = {side: tensors[f"{number}.{side}"] for side in layer.bases}
    return KroneckerBlock(layer, bases.get(LEFT), bases.get(RIGHT), eigenvalues)


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) is not list or not all(type(size) is int and size >= 0 for size in values):
        raise ValueError(f"sizes {values!r}")
    return tuple(values)


def _check_complete(
    blocks: Sequence[Block], shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]
) -> None:
    """Raise ValueError unless each parameter is in one block, and the tensors of each block have the right shapes."""
    names = [name for block in blocks for name in block.names]
    if sorted(names) != sorted(shapes):
        raise ValueError(f"blocks of {listed(map(str, names))}, and shapes of {listed(shapes)}")
    used = 0
    for block in blocks:
        expected = _tensor_sizes(block, shapes)
        used += len(expected)
        for name, tensor in _block_state(block)[1].items():
            if tuple(tensor.shape) != expected[name] or not tensor.is_floating_point() or not tensor.isfinite().all():
                raise ValueError(
                    f"{name} of {' and '.join(block.names)}, {tensor.dtype} of shape {tuple(tensor.shape)}, in place "
                    f"of finite numbers of shape {expected[name]}"
                )
    if used != len(tensors):
        raise ValueError(f"{len(tensors)} tensors in place of {used}")


def _tensor_sizes(block: Block, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a block. Raises ValueError if the shapes of its parameters do not fit its matrix."""
    if isinstance(block, DiagonalBlock):
        return {"eigenvalues": shapes[block.name]}
    layer = block.layer
    has_side = layer.bias_side in (LEFT, RIGHT)
    if (layer.bias is not None) != has_side or (not has_side and layer.bias_side != ""):
        raise ValueError(f"the bias {layer.bias!r} of {layer.weight!r} on side {layer.bias_side!r}")
    if math.prod(layer.matrix) != math.prod(shapes[layer.weight]):
        raise ValueError(f"the matrix {layer.matrix} of {layer.weight!r}, which has shape {shapes[layer.weight]}")
    length = layer.matrix[0 if layer.bias_side == RIGHT else 1]
    if layer.bias is not None and shapes[layer.bias] != (length,):
        raise ValueError(f"the bias {layer.bias!r} of shape {shapes[layer.bias]}")
    if len(set(layer.bases)) != len(layer.bases):
        raise ValueError(f"the bases {layer.bases} of {layer.weight!r}")
    sides = layer.sides
    return {"eigenvalues": (sides[LEFT], sides[RIGHT]), **{side: (sides[side], sides[side]) for side in layer.bases}}
