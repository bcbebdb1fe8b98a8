"""How each known operation moves the samples of a gradient: from the gradient of its output to those of its operands.

Only operations whose routing is fixed by shapes and saved numbers are listed. What operations do that route by data
(index, sort along the samples), or that are not listed, is found by `local_probe`.

Legend: `dim` is the dimension of the output that contains the samples; `post` is the number of consecutive entries of
that dimension that belong to one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from samplewise.engine.graph.graph import FUSED_ATTENTION, Node, numel, scalar

Shape = tuple[int, ...]


class RowOwners:
    """Owner of each entry of a dimension, for samples in any order; -1 for entries without owner.

    One object for all gradients with the same owners, so that what follows from them is computed once.
    """

    def __init__(self, owner: Tensor):
        self.owner = owner
        self.derived: dict[object, Any] = {}

    @cached_property
    def sole(self) -> int | None:
        """The sample that all entries belong to; None if there are several."""
        first = int(self.owner[0]) if len(self.owner) else -1
        return first if first >= 0 and bool((self.owner == first).all()) else None

    def repeat(self, inner: int, outer: int) -> RowOwners:
        """Owners with each entry repeated `inner` times, and then all of them `outer` times."""
        if inner == outer == 1:
            return self
        if (inner, outer) not in self.derived:
            self.derived[inner, outer] = RowOwners(self.owner.repeat_interleave(inner).repeat(outer))
        row_owners: RowOwners = self.derived[inner, outer]
        return row_owners

    def narrow(self, start: int, stop: int) -> RowOwners:
        """Owners of some entries."""
        if ("narrow", start, stop) not in self.derived:
            self.derived["narrow", start, stop] = RowOwners(self.owner[start:stop])
        row_owners: RowOwners = self.derived["narrow", start, stop]
        return row_owners

    def widen(self, start: int, step: int, size: int) -> RowOwners:
        """Owners of `size` entries, of which those from `start` in steps are these; the others have no owner."""
        if ("widen", start, step, size) not in self.derived:
            owner = self.owner.new_full((size,), -1)
            owner[start : start + step * len(self.owner) : step] = self.owner
            self.derived["widen", start, step, size] = RowOwners(owner)
        row_owners: RowOwners = self.derived["widen", start, step, size]
        return row_owners


class SampleDim(NamedTuple):
    """Position of the samples in a gradient: dimension, and consecutive entries of it per sample, or their owners."""

    dim: int
    post: int | RowOwners


Mover = Callable[[Node, SampleDim, Shape, list[Shape | None]], list[SampleDim | None]]
MOVERS: dict[str, Mover] = {}
VIEWS = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias"}
MOST_PLACES = 2**12  # that are kept: layers of a model have them in common
UNDECIDED = SampleDim(-1, 0)  # returned by a mover that cannot tell where the samples are


def moves(*operations: str) -> Callable[[Mover], Mover]:
    """Decorator that registers a mover for the given operations.

    A mover takes (node, place of the samples in the output's gradient, output shape, operand shapes) and returns the
    place of the samples in each operand's gradient: None if samples are mixed there, UNDECIDED if it is not known.
    """

    def register(mover: Mover) -> Mover:
        MOVERS.update(dict.fromkeys(operations, mover))
        return mover

    return register


@lru_cache(MOST_PLACES)
def locate(inner: int, shape: Shape, samples: int) -> SampleDim | None:
    """Place of the samples of a `Regular` owner map with this `inner` in a tensor of this shape; None for no place."""
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
    if place is None or not 0 <= place.dim < len(shape) or not isinstance(place.post, int):
        return None
    if shape[place.dim] % (place.post * samples):
        return None
    return place.post * numel(shape[place.dim + 1 :])


# --- elementwise operations, with broadcasting ---------------------------------------------------------------------

ELEMENTWISE = """
    Abs Acos Acosh Add Addcdiv Addcmul Asin Asinh Atan Atan2 Atanh BinaryCrossEntropy BinaryCrossEntropyWithLogits Celu
    Clamp ClampMax ClampMin Clone Cos Cosh Digamma Div Elu Erf Erfc Erfinv Exp Exp2 Expand Expm1 Fmod Frac Gelu
    Hardshrink Hardsigmoid Hardswish Hardtanh HuberLoss Hypot LeakyRelu Lerp Lgamma Log Log10 Log1P Log2 LogSigmoid
    Logaddexp Logit MaskedFill Maximum Minimum Mish MseLoss Mul NanToNum NativeDropout Neg Pow PreluKernel Reciprocal
    Relu Rsqrt Rsub Sigmoid Silu Sin Sinc Sinh SmoothL1Loss Softplus Softshrink Sqrt Sub Tan Tanh Threshold ToCopy Where
    Xlogy
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
    stacked = scalar(node, "dim") % len(shape)
    in_operand = UNDECIDED if place.dim == stacked else SampleDim(place.dim - (place.dim > stacked), place.post)
    return [in_operand] * len(children)


ALONG_ONE_DIM = "Softmax SafeSoftmax LogSoftmax Cumsum Cumprod Logcumsumexp Glu Topk Sort IndexSelect"


@moves(*ALONG_ONE_DIM.split())
def along_one_dim(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    return [UNDECIDED if scalar(node, "dim") % len(shape) == place.dim else place] * len(children)


@moves("Split", "SplitWithSizes", "UnsafeSplit")
def split(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    if scalar(node, "dim") % len(shape) != place.dim:
        return [place]
    # Pieces that begin with the first sample and contain all of them, such as the two sides of pairs: they have the
    # samples where the operand has them, some number of times. `locate` has checked that they fit.
    sizes = scalar(node, "split_sizes") if hasattr(node, "_saved_split_sizes") else [scalar(node, "split_size")]
    piece = shape[place.dim]
    divides = isinstance(place.post, int) and children[0] is not None and children[0][place.dim] % piece == 0
    return [place if divides and all(size == piece for size in sizes) else UNDECIDED]


@moves("Cat")
def cat(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    if scalar(node, "dim") % len(shape) != place.dim:
        return [place] * len(children)
    sizes = [child[place.dim] for child in children if child is not None]
    if len(sizes) < len(children):
        return [UNDECIDED] * len(children)
    if isinstance(place.post, int):
        return [place if len(set(sizes)) == 1 else UNDECIDED] * len(children)
    if len(place.post.owner) != shape[place.dim]:  # any owners
        return [UNDECIDED] * len(children)
    pieces = zip(sizes, accumulate(sizes), strict=True)
    return [SampleDim(place.dim, place.post.narrow(end - size, end)) for size, end in pieces]


@moves("Roll", "Flip")
def along_dims(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    dims = scalar(node, "dims")  # a roll without dims is one of the flattened tensor
    return [place if dims and place.dim not in {d % len(shape) for d in dims} else UNDECIDED]


@moves("Tril", "Triu")
def triangle(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    return [place]  # elements are kept or set to zero


@moves("FftC2C", "FftR2C", "FftC2R")
def fourier(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    return [UNDECIDED if place.dim in {d % len(shape) for d in scalar(node, "dim")} else place]


@moves("ViewAsReal")
def view_as_real(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    return [UNDECIDED if place.dim == len(shape) - 1 else place]


@moves("ViewAsComplex")
def view_as_complex(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    return [place]  # the operand has one more dimension, the last


@moves("Unfold")
def unfold(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # The output has one more dimension, the last; windows may overlap along the unfolded one.
    unfolded = scalar(node, "dimension") % (len(shape) - 1)
    return [UNDECIDED if place.dim in (unfolded, len(shape) - 1) else place]


@moves("Gather")
def gather(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # Indices choose along one dimension; the others are kept, except that the indices may leave out their last entries.
    is_complete = children[0] is not None and children[0][place.dim] == shape[place.dim]
    return along_one_dim(node, place, shape, children) if is_complete else [UNDECIDED]


@moves("Scatter")
def scatter(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # Operands: the tensor, whose gradient has zeros where elements were replaced, and the source, if it is a tensor.
    return [place, *(UNDECIDED for _ in children[1:])]


@moves("Slice")
def slice_dim(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # A slice that keeps all elements changes nothing; up to torch 2.8, x[:, -1] contains one along dimension 0.
    operand = children[0]
    if operand is None or operand[place.dim] == shape[place.dim] or scalar(node, "dim") % len(shape) != place.dim:
        return [place]
    start, step = scalar(node, "start"), scalar(node, "step")
    if isinstance(place.post, RowOwners) and len(place.post.owner) == shape[place.dim] and start >= 0:
        return [SampleDim(place.dim, place.post.widen(start, step, operand[place.dim]))]
    if not isinstance(place.post, int) or start < 0 or operand[place.dim] % shape[place.dim]:
        return [UNDECIDED]
    if step > 1 and start < step and shape[place.dim] * step == operand[place.dim]:
        return [SampleDim(place.dim, place.post * step)]  # every second row of pairs
    return [place if step == 1 and start % shape[place.dim] == 0 else UNDECIDED]


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
    return [UNDECIDED if any(pad[first : first + 2]) else place]


@moves("Sum", "Mean", "Amax", "Amin", "Max", "Min", "Logsumexp", "LinalgVectorNorm", "Norm", "Var", "Std", "Prod")
def reduce(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    if not hasattr(node, "_saved_dim") or children[0] is None:
        return [None] * len(children)
    saved = scalar(node, "dim")
    dims = (saved,) if isinstance(saved, int) else saved
    ndim = len(children[0])
    reduced_dims = {d % ndim for d in dims} if dims else set(range(ndim))  # without dims: all
    other_dims = [d for d in range(ndim) if d not in reduced_dims]
    if scalar(node, "keepdim"):
        return [place if place.dim in other_dims else None]
    return [SampleDim(other_dims[place.dim], place.post)]


# --- products ------------------------------------------------------------------------------------------------------


@moves("Mm", "Addmm", "Bmm", "Baddbmm")
def product(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    rows, columns = len(shape) - 2, len(shape) - 1
    left = place if place.dim != columns else None
    right = place if place.dim != rows else None
    addend = [_broadcast(place, shape, children[0])] if len(children) == 3 else []
    return [*addend, left, right]


@moves("GroupedMm")
def grouped_product(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # Rows (N, i) by one matrix for each group of rows: output (N, o). Groups of columns or matrices are probed.
    rows, matrices = children
    by_rows = place.dim == 0 and (rows is None or len(rows) == 2) and (matrices is None or len(matrices) == 3)
    return [place, None] if by_rows and len(shape) == 2 else [UNDECIDED, UNDECIDED]


@moves("Mv")
def matrix_vector(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    return [place, None]


@moves("Trilinear")
def bilinear(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # nn.Bilinear: inputs (N, i) and (N, j), output (N, o). Rows of one operand are those of the output if its dims
    # become the dims 0, 2 and 3 of the product, of which the last two are summed.
    if place.dim != 0 or scalar(node, "sumdim") != (2, 3):
        return [None] * len(children)
    rows = ((1, 3), (1, 2))
    return [place if scalar(node, name) in rows else None for name in ("expand1", "expand2", "expand3")]


@moves("LinalgSolveEx")
def solve(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # A X = B: the columns of X come from those of B, or the rows with left=False. The other of the last two dims is
    # mixed. B may also be a batch of vectors.
    matrix, sides = children
    last = len(shape) - 1
    if matrix is None or len(matrix) > len(shape) or place.dim == (last - 1 if scalar(node, "left") else last):
        return [None, None]
    return [_broadcast(place, shape, matrix) if place.dim < last - 1 else None, _broadcast(place, shape, sides)]


@moves("Cdist", "EuclideanDist")
def distances(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # Points (..., P, d) and (..., R, d), distances (..., P, R).
    last = len(shape) - 1
    if place.dim < last - 1:
        return [_broadcast(place, shape, child) for child in children]
    operand = int(place.dim == last)  # the one whose points are samples; those of the other meet all of them
    places: list[SampleDim | None] = [None, None]
    child = children[operand]
    places[operand] = None if child is None else SampleDim(len(child) - 2, place.post)
    return places


@moves("Convolution")
def convolution(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    return [place if place.dim == 0 else None, None, None]


@moves(*FUSED_ATTENTION)
def attention(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # Only the batch dimension: with grouped-query attention, keys and queries have different numbers of heads.
    places: list[SampleDim | None] = [None] * len(children)
    for position, child in enumerate(children[:3]):
        is_batched = place.dim == 0 and child is not None and child[0] == shape[0]
        places[position] = place if is_batched else UNDECIDED
    return places


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
    return [place if batched else UNDECIDED] * len(children)


@moves("NllLoss", "NllLoss2D")
def nll_loss(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # Output (n,) of (n, classes), or (n, h, w) of (n, classes, h, w). Ignored targets have no gradient: where owners
    # differ along a row, as for the first label of each packed document, they must not count.
    if not isinstance(place.post, int) and bool((node._saved_target == scalar(node, "ignore_index")).any()):
        return [UNDECIDED] * len(children)
    return [SampleDim(place.dim + (place.dim > 0), place.post)] * len(children)


@moves("CtcLoss", "CudnnCtcLoss")
def ctc_loss(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # Log probabilities (T, N, classes), losses (N,).
    return [SampleDim(1, place.post)]


@moves("MkldnnRnnLayer")
def recurrent_layer(node: Node, place: SampleDim, shape: Shape, children: list[Shape | None]) -> list[SampleDim | None]:
    # Outputs: sequence (T, N, h) or last states (N, h). Operands: input (T, N, i), four weights, first states (N, h).
    if place.dim != len(shape) - 2:
        return [None] * len(children)
    return [SampleDim(1, place.post), None, None, None, None, SampleDim(0, place.post), SampleDim(0, place.post)]
