"""Proofs of row ownership without a backward pass: how each known operation moves the sample dimension.

`proofs(graph)` starts at the losses, whose element i belongs to sample i, and follows the gradient toward the
parameters. An output gradient in which each element provably belongs to one sample gets a value `inner` (see
tags.Regular). Only operations whose routing is fixed by shapes and saved numbers are listed. For operations that route
by data (index, sort), contract over the samples, or are not listed, the proof ends and ownership is probed.

Legend: `dim` is the dimension of the output that contains the samples; `post` is the number of consecutive entries of
that dimension that belong to one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from samplewise.engine.graph import FUSED_ATTENTION, Edge, Graph, Node, numel, scalar

Shape = tuple[int, ...]


class SampleDim(NamedTuple):
    """Position of the samples in a gradient: dimension, and consecutive entries of it per sample."""

    dim: int
    post: int


Mover = Callable[[Node, SampleDim, Shape, list[Shape | None]], list[SampleDim | None]]
MOVERS: dict[str, Mover] = {}
VIEWS = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias"}


def moves(*operations: str) -> Callable[[Mover], Mover]:
    """Decorator that registers a mover for the given operations.

    A mover takes (node, place of the samples in the output's gradient, output shape, operand shapes) and returns the
    place of the samples in each operand's gradient, None if it is not known.
    """

    def register(mover: Mover) -> Mover:
        MOVERS.update(dict.fromkeys(operations, mover))
        return mover

    return register


def locate(inner: int, shape: Shape, samples: int) -> SampleDim | None:
    """Place of the samples in a tensor of this shape, for a `tags.Regular` with this `inner`; None if there is none."""
    stride = 1
    if 0 in shape:
        return None
    for dim in range(len(shape) - 1, -1, -1):
        if (
            inner % stride == 0
            and inner * samples <= stride * shape[dim]
            and shape[dim] % (inner // stride * samples) == 0
        ):
            return SampleDim(dim, inner // stride)
        stride *= shape[dim]
    return None


def inner_at(place: SampleDim | None, shape: Shape, samples: int) -> int | None:
    """Inverse of `locate`: `inner` of samples at this place; None if the place does not fit the shape."""
    if place is None or not 0 <= place.dim < len(shape) or shape[place.dim] % (place.post * samples):
        return None
    return place.post * numel(shape[place.dim + 1 :])


def proofs(graph: Graph) -> dict[Edge, int]:
    """Return `inner` of each edge whose ownership is proven."""
    claims: dict[Edge, set[int | None]] = {graph.root: {1}}
    proven: dict[Edge, int] = {}
    for node in graph.nodes:
        if node not in graph.relevant:
            continue
        slots = graph.used_slots(node)
        for edge in (Edge(node, slot) for slot in slots):
            claimed = claims.get(edge, {None})
            inner = next(iter(claimed)) if len(claimed) == 1 else None
            if inner is not None:
                proven[edge] = inner
        _pass_on(graph, node, slots, proven, claims)
    return proven


def _pass_on(
    graph: Graph, node: Node, slots: list[int], proven: dict[Edge, int], claims: dict[Edge, set[int | None]]
) -> None:
    """Add the `inner` that this node proves for each of its operands to `claims`; None if it proves nothing."""
    children = [Edge(child, slot) if child in graph.relevant else None for child, slot in graph.children[node]]
    if graph.sharded and _is_identity(node):
        for slot, child in enumerate(children):
            if child is not None:
                claims.setdefault(child, set()).add(proven.get(Edge(node, slot)))
        return
    shapes = [child.shape if child else None for child in children]
    by_slot = {_moved(graph, node, slot, proven, shapes) for slot in slots}
    agreed = next(iter(by_slot)) if len(by_slot) == 1 else (None,) * len(children)
    for child, inner in zip(children, agreed, strict=True):
        if child is not None:
            claims.setdefault(child, set()).add(inner)


def _is_identity(node: Node) -> bool:
    """True for the function with which `fully_shard` notices that a backward pass has left a module."""
    forward = getattr(type(node), "_forward_cls", None)
    return forward is not None and forward.__module__.startswith("torch.distributed.fsdp.")


def _moved(
    graph: Graph, node: Node, slot: int, proven: dict[Edge, int], shapes: list[Shape | None]
) -> tuple[int | None, ...]:
    edge = Edge(node, slot)
    samples = graph.samples
    inner = proven.get(edge)
    if inner is None:
        return (None,) * len(shapes)
    operation = graph.operations[node]
    if operation in VIEWS:
        return (inner,) * len(shapes)
    place = locate(inner, edge.shape, samples)
    mover = MOVERS.get(operation)
    if place is None or mover is None:
        return (None,) * len(shapes)
    moved = mover(node, place, edge.shape, shapes)
    return tuple(inner_at(p, s, samples) if s is not None else None for p, s in zip(moved, shapes, strict=True))


# --- elementwise operations, with broadcasting ---------------------------------------------------------------------

ELEMENTWISE = """
    Abs Acos Add Addcdiv Addcmul Asin Atan Atan2 BinaryCrossEntropy BinaryCrossEntropyWithLogits Celu Clamp ClampMax
    ClampMin Clone Cos Cosh Div Elu Erf Erfc Exp Exp2 Expand Expm1 Fmod Frac Gelu Hardshrink Hardsigmoid Hardswish
    Hardtanh HuberLoss LeakyRelu Lerp Log Log10 Log1P Log2 LogSigmoid Logaddexp Logit MaskedFill Maximum Minimum
    Mish MseLoss Mul NanToNum NativeDropout Neg Pow PreluKernel Reciprocal Relu Rsqrt Rsub Sigmoid Silu Sin Sinh
    SmoothL1Loss Softplus Softshrink Sqrt Sub Tan Tanh Threshold ToCopy Where Xlogy
"""


@moves(*ELEMENTWISE.split())
def elementwise(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    return [_broadcast(place, shape, child) for child in children]


def _broadcast(place: SampleDim, shape: Shape, child: Shape | None) -> SampleDim | None:
    if child is None:
        return None
    dim = place.dim - len(shape) + len(child)
    return SampleDim(dim, place.post) if dim >= 0 and child[dim] == shape[place.dim] else None


# --- moving dimensions ---------------------------------------------------------------------------------------------


@moves("T", "Transpose")
def transpose(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    has_dims = hasattr(node, "_saved_dim0")  # "T" saves none
    swap = (scalar(node, "dim0"), scalar(node, "dim1")) if has_dims else (0, 1)
    a, b = (d % len(shape) for d in swap)
    return [SampleDim({a: b, b: a}.get(place.dim, place.dim), place.post)]


@moves("Permute")
def permute(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    return [SampleDim(scalar(node, "dims")[place.dim] % len(shape), place.post)]


@moves("Select", "Unbind")
def restore_dim(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    removed = scalar(node, "dim") % (len(shape) + 1)
    return [SampleDim(place.dim + (place.dim >= removed), place.post)]


@moves("Stack")
def drop_dim(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    added = scalar(node, "dim") % len(shape)
    moved = None if place.dim == added else SampleDim(place.dim - (place.dim > added), place.post)
    return [moved] * len(children)


@moves("Softmax", "SafeSoftmax", "LogSoftmax", "Cumsum", "Split", "SplitWithSizes", "UnsafeSplit", "Cat", "Glu")
def along_one_dim(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    return [None if scalar(node, "dim") % len(shape) == place.dim else place] * len(children)


@moves("Gather")
def gather(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # Indices choose along one dimension; the others are kept, except that the indices may leave out their last entries.
    same = children[0] is not None and children[0][place.dim] == shape[place.dim]
    return along_one_dim(node, place, shape, children) if same else [None]


@moves("Scatter")
def scatter(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # Operands: the tensor, whose gradient has zeros where elements were replaced, and the source, if it is a tensor.
    return [place, *(None for _ in children[1:])]


@moves("Slice")
def slice_dim(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # A slice that keeps all elements changes nothing; up to torch 2.8, x[:, -1] contains one along dimension 0.
    unchanged = children[0] is not None and children[0][place.dim] == shape[place.dim]
    return [place] if unchanged else along_one_dim(node, place, shape, children)


@moves("Repeat")
def repeat(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # Repeating multiplies the size of a dimension: if the size is unchanged, the dimension was not repeated.
    return elementwise(node, place, shape, children)


@moves("ConstantPadNd")
def constant_pad(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # `pad` lists (before, after) of each dimension, last dimension first. The size alone is no proof: padding of 1
    # before and -1 after keeps it.
    pad = scalar(node, "pad")
    first = 2 * (len(shape) - 1 - place.dim)
    return [None if any(pad[first : first + 2]) else place]


@moves("Sum", "Mean", "Amax", "Amin", "Max", "Min", "Logsumexp", "LinalgVectorNorm", "Norm", "Var", "Std", "Prod")
def reduce(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    if not hasattr(node, "_saved_dim") or children[0] is None:
        return [None] * len(children)
    saved = scalar(node, "dim")
    dims = (saved,) if isinstance(saved, int) else saved
    ndim = len(children[0])
    reduced = {d % ndim for d in dims} if dims else set(range(ndim))
    kept = [d for d in range(ndim) if d not in reduced]
    if scalar(node, "keepdim"):
        return [place if place.dim in kept else None]
    return [SampleDim(kept[place.dim], place.post)]


# --- products ------------------------------------------------------------------------------------------------------


@moves("Mm", "Addmm", "Bmm", "Baddbmm")
def product(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    rows, columns = len(shape) - 2, len(shape) - 1
    left = place if place.dim != columns else None
    right = place if place.dim != rows else None
    added = [_broadcast(place, shape, children[0])] if len(children) == 3 else []
    return [*added, left, right]


@moves("Mv")
def matrix_vector(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    return [place, None]


@moves("Convolution")
def convolution(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    return [place if place.dim == 0 else None, None, None]


@moves(*FUSED_ATTENTION)
def attention(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # Only the batch dimension: with grouped-query attention, keys and queries have different numbers of heads.
    moved: list[SampleDim | None] = [None] * len(children)
    for position, child in enumerate(children[:3]):
        if place.dim == 0 and child is not None and child[0] == shape[0]:
            moved[position] = place
    return moved


# --- normalization, pooling, losses, recurrent kernels -------------------------------------------------------------


@moves("NativeLayerNorm", "FusedRmsNorm")
def last_dims_norm(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    inside = place.dim >= len(shape) - len(scalar(node, "normalized_shape"))
    return [None if inside else place] + [None] * (len(children) - 1)


@moves("NativeGroupNorm")
def group_norm(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    return [place if place.dim == 0 else None, None, None]


@moves("NativeBatchNorm", "CudnnBatchNorm")
def batch_norm(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # Statistics are per channel: samples in the channel dimension (instance norm) are independent even in training.
    if place.dim == 1:
        return [place, SampleDim(0, place.post), SampleDim(0, place.post)]
    return [None if scalar(node, "training") else place, None, None]


IMAGES = """
    AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D AvgPool2D AvgPool3D MaxPool2DWithIndices
    MaxPool3DWithIndices PixelShuffle ReflectionPad1D ReflectionPad2D ReplicationPad2D UpsampleBicubic2D
    UpsampleBilinear2D UpsampleNearest1D UpsampleNearest2D
"""


@moves(*IMAGES.split())
def images(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    batched = (
        children[0] is not None
        and len(children[0]) == len(shape)
        and place.dim == 0
        and children[0][0] == shape[0]
        and len(shape) > 2
    )
    return [place if batched else None] * len(children)


@moves("NllLoss", "NllLoss2D")
def nll_loss(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    return [place if place.dim == 0 else None] * len(children)


@moves("MkldnnRnnLayer")
def recurrent_layer(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # Outputs: sequence (T, N, h) or last states (N, h). Operands: input (T, N, i), four weights, first states (N, h).
    if place.dim != len(shape) - 2:
        return [None] * len(children)
    return [SampleDim(1, place.post), None, None, None, None, SampleDim(0, place.post), SampleDim(0, place.post)]
