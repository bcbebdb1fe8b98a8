"""Simplifications of a traced update for runtimes that run one kernel per operation.

A compiler fuses operations; an interpreter writes each intermediate result to memory. With one sample, the gradient of
a weight matrix is a column times a row. Written naively, an update passes over every matrix ten times. These rewrites
keep one pass for the gradient and as few as possible for the optimizer:

- views, permutations of dimensions of size 1 and sums over them become one view, or nothing
- a norm of column × row is the product of their norms
- a number that multiplies column × row multiplies the column; a selection (where) selects both
- row × transposed matrix is matrix × column, which needs no transposed copy
- a + s·b is one operation

Each rewrite changes results by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
VIEWS = {
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.alias.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.detach.default, aten.permute.default),
    *(aten.t.default, aten.transpose.int, aten.sum.dim_IntList, aten.cat.default, aten.expand.default),
    *(aten.slice.Tensor, aten.select.int, aten.clone.default),
}
# Names of operations that fix the layout in memory; the second one is registered by the compiler.
MEMORY_LAYOUT = {"aten::as_strided", "prims::inductor_force_stride_order"}
SCALINGS = {aten.mul.Tensor, aten.div.Tensor}


def simplify(graph: fx.GraphModule, *, scaled_sums: bool) -> None:
    """Apply the rewrites in place. scaled_sums: write a + s·b with `s` as a number that is read from its tensor."""
    rewriter = Rewriter(graph)
    for rewrite in (permutation, view, product_without_transpose, norm, unit_factor, joint_scaling, scaled_product):
        rewriter.run(rewrite)
    for rewrite in (selected_product, view, sum_with_scaled, constant):
        if rewrite is not sum_with_scaled or scaled_sums:
            rewriter.run(rewrite)
    graph.recompile()


class Rewriter:
    """Replaces nodes of a graph, whose `meta["val"]` are fake tensors."""

    def __init__(self, module: fx.GraphModule):
        self.module = module
        self.graph = module.graph
        self.numbers: dict[tuple[fx.Node, bool], fx.Node] = {}
        self.stored = 0
        self.quotients: dict[tuple[fx.Node, fx.Node, Any], fx.Node] = {}

    def run(self, rewrite: Callable[[Rewriter, fx.Node], fx.Node | None]) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor):
                with self.graph.inserting_before(node):
                    new = rewrite(self, node)
                if new is not None and new is not node:
                    node.replace_all_uses_with(new)
        self.graph.eliminate_dead_code()

    def call(self, function: Any, *args: Any) -> fx.Node:
        """Insert a call, with its fake result."""
        node = self.graph.call_function(function, args)
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
        node.meta["val"] = function(*values)
        return node

    def view(self, node: fx.Node, shape: list[int]) -> fx.Node:
        return node if list(value(node).shape) == shape else self.call(aten.view.default, node, shape)

    def number(self, node: fx.Node, negative: bool) -> fx.Node:
        """Value of a tensor with one element as a Python number, or its negative."""
        if (node, negative) not in self.numbers:
            tensor = self.call(aten.neg.default, node) if negative else node
            self.numbers[node, negative] = self.graph.call_function(aten._local_scalar_dense.default, (tensor,))
        return self.numbers[node, negative]


def value(node: fx.Node) -> Tensor:
    result: Tensor = node.meta["val"]
    return result


def is_number(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor) and value(node).numel() == 1


# --- views ------------------------------------------------------------------------------------------------------------


def permutation(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """Two permutations that cancel each other, as of a matrix that is transposed twice, are the origin."""
    before = node.args[0] if node.args else None
    if not (isinstance(before, fx.Node) and node.target is before.target is aten.permute.default):
        return None
    first, second = before.args[1], node.args[1]
    cancel = [first[k] for k in second] == list(range(len(second)))  # type: ignore[index, union-attr, arg-type]
    return before.args[0] if cancel else None  # type: ignore[return-value]


def view(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """An operation that keeps all elements in their order is a view of its origin, or the origin itself."""
    origin = node
    while keeps_order(origin):
        origin = argument(origin)
    if origin is node:
        return None
    return rewriter.view(origin, list(value(node).shape))


def keeps_order(node: fx.Node) -> bool:
    """Test whether the result has the elements of the first argument, in the same order."""
    layout = getattr(getattr(node.target, "_schema", None), "name", None) in MEMORY_LAYOUT
    if node.op != "call_function" or not (layout or node.target in VIEWS):
        return False
    before = argument(node)
    if not isinstance(before, fx.Node) or not isinstance(before.meta.get("val"), Tensor):
        return False
    if node.target is aten.cat.default and len(node.args[0]) != 1:  # type: ignore[arg-type]
        return False
    a, b = value(before), value(node)
    if a.numel() != b.numel() or a.dtype != b.dtype or not a.is_contiguous():
        return False
    if layout:
        return a.shape == b.shape and a.stride() == b.stride()
    if node.target in (aten.permute.default, aten.t.default, aten.transpose.int):
        return [n for n in a.shape if n != 1] == [n for n in b.shape if n != 1] and not _reorders(node, a)
    return True


def _reorders(node: fx.Node, before: Tensor) -> bool:
    """Test whether a permutation exchanges dimensions that have several elements."""
    places = torch.empty(before.shape, device="meta")
    result = node.target(places, *node.args[1:])  # type: ignore[operator]
    strides = [stride for size, stride in zip(result.shape, result.stride(), strict=True) if size != 1]
    return strides != sorted(strides, reverse=True)


def argument(node: fx.Node) -> Any:
    first = node.args[0]
    return first[0] if node.target is aten.cat.default and isinstance(first, (list, tuple)) else first


# --- products ---------------------------------------------------------------------------------------------------------


def outer_product(node: Any) -> fx.Node | None:
    """The matrix product column × row that `node` is, or is a view of."""
    while isinstance(node, fx.Node) and node.target is aten.view.default:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not aten.mm.default:
        return None
    column, row = node.args
    return node if value(column).shape[1] == 1 and value(row).shape[0] == 1 else None  # type: ignore[arg-type]


def product_without_transpose(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """row @ matrix.t() → (matrix @ column) as a row, also with a bias."""
    bias = None
    if node.target is aten.addmm.default and not node.kwargs and len(node.args) == 3:
        bias, row, matrix = node.args
    elif node.target is aten.mm.default:
        row, matrix = node.args
    else:
        return None
    if not isinstance(row, fx.Node) or not isinstance(matrix, fx.Node) or value(row).shape[0] != 1:
        return None
    if matrix.target is not aten.permute.default or list(matrix.args[1]) != [1, 0]:  # type: ignore[arg-type]
        return None
    column = rewriter.view(row, [value(row).shape[1], 1])
    product = rewriter.call(aten.mm.default, matrix.args[0], column)
    product = rewriter.view(product, list(value(node).shape))
    return product if bias is None else rewriter.call(aten.add.Tensor, product, bias)


def norm(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """Norm of all elements → square root of the product of a row with itself; of column × row, product of the norms."""
    if node.target is not aten.linalg_vector_norm.default or node.kwargs:
        return None
    size = node.args[1] if len(node.args) > 1 else 2
    if size != 2 or value(node).numel() != 1:
        return None
    product = outer_product(node.args[0])
    squares = [_square(rewriter, factor) for factor in (node.args[:1] if product is None else product.args)]
    square = squares[0] if len(squares) == 1 else rewriter.call(aten.mul.Tensor, *squares)
    return rewriter.view(rewriter.call(aten.sqrt.default, square), list(value(node).shape))


def _square(rewriter: Rewriter, node: Any) -> fx.Node:
    """Sum of squares, as a product of a row and a column."""
    count = value(node).numel()
    return rewriter.call(aten.mm.default, rewriter.view(node, [1, count]), rewriter.view(node, [count, 1]))


def unit_factor(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """1 · x → x; x + 0 → x."""
    if node.target is aten.mul.Tensor and node.args[1] in (1, 1.0) and not isinstance(node.args[1], bool):
        return _if_alike(node, node.args[0])
    if node.target is aten.add.Tensor and node.args[1] in (0, 0.0) and not node.kwargs:
        return _if_alike(node, node.args[0])
    return None


def _if_alike(node: fx.Node, origin: Any) -> fx.Node | None:
    alike = isinstance(origin, fx.Node) and value(origin).dtype == value(node).dtype
    return origin if alike else None


def joint_scaling(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """(x · s) · t → x · (s · t), and the same with quotients, for tensors s and t with one element."""
    if node.target not in SCALINGS or not is_number(node.args[1]) or is_number(node.args[0]):
        return None
    inner = node.args[0]
    while isinstance(inner, fx.Node) and inner.target is aten.view.default and len(inner.users) == 1:
        inner = inner.args[0]
    if not isinstance(inner, fx.Node) or inner.target is not aten.mul.Tensor or len(inner.users) != 1:
        return None
    x, s = inner.args
    t = node.args[1]
    if not is_number(s) or is_number(x) or value(s).dtype != value(t).dtype:  # type: ignore[arg-type]
        return None
    key = (s, t, node.target)
    if key not in rewriter.quotients:
        rewriter.quotients[key] = rewriter.view(rewriter.call(node.target, s, t), [])  # type: ignore[index]
    scaled = rewriter.call(aten.mul.Tensor, x, rewriter.quotients[key])  # type: ignore[index]
    return rewriter.view(scaled, list(value(node).shape))


def scaled_product(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """(column × row) · s → (column · s) × row, for a tensor s with one element."""
    if node.target not in SCALINGS:
        return None
    matrix, number = node.args
    if is_number(matrix) and node.target is aten.mul.Tensor:
        matrix, number = number, matrix
    product = outer_product(matrix)
    if product is None or not (is_number(number) or isinstance(number, (int, float))):
        return None
    if isinstance(number, fx.Node) and value(number).dtype != value(product).dtype:
        return None
    if value(node).numel() != value(product).numel():
        return None
    column, row = product.args
    if isinstance(number, fx.Node):
        number = rewriter.view(number, [1, 1])
    column = rewriter.call(node.target, column, number)
    return rewriter.view(rewriter.call(aten.mm.default, column, row), list(value(node).shape))


def selected_product(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """where(c, column × row, 0) → where(c, column, 0) × where(c, row, 0), for a condition c with one element."""
    if node.target is not aten.where.self or not is_number(node.args[0]) or not _is_zero(node.args[2]):
        return None
    condition = node.args[0]
    product = outer_product(node.args[1])
    if product is None:
        return None
    factors = [rewriter.call(aten.where.self, condition, factor, node.args[2]) for factor in product.args]
    return rewriter.view(rewriter.call(aten.mm.default, *factors), list(value(node).shape))


def _is_zero(node: Any) -> bool:
    makes = isinstance(node, fx.Node) and node.target in (aten.scalar_tensor.default, aten.full.default)
    return makes and (node.args[0] if node.target is aten.scalar_tensor.default else node.args[1]) == 0


# --- sums -------------------------------------------------------------------------------------------------------------


def sum_with_scaled(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """a ± s · b → one operation, for a tensor s with one element."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or node.kwargs:
        return None
    a, b = node.args
    scaled = _scaled(b, value(node))
    if scaled is None and node.target is aten.add.Tensor:
        a, b = b, a
        scaled = _scaled(b, value(node))
    if scaled is None or not isinstance(a, fx.Node) or value(a).shape != value(node).shape:
        return None
    number, matrix = scaled
    negative = node.target is aten.sub.Tensor  # torch.export cannot trace a difference with a variable number
    if isinstance(number, fx.Node):
        alpha: Any = rewriter.number(number, negative)
    else:
        alpha = -number if negative else number
    new = rewriter.graph.call_function(aten.add.Tensor, (a, matrix), {"alpha": alpha})
    new.meta["val"] = value(node)
    return new


def _scaled(node: Any, like: Tensor) -> tuple[Any, fx.Node] | None:
    """Number and tensor whose product `node` is, if only one operation reads it."""
    if not isinstance(node, fx.Node) or node.target is not aten.mul.Tensor or len(node.users) != 1:
        return None
    if value(node).shape != like.shape or like.numel() == 1 or not like.is_floating_point():
        return None
    first, second = node.args
    for number, matrix in ((first, second), (second, first)):
        if not isinstance(matrix, fx.Node) or value(matrix).shape != like.shape or value(matrix).dtype != like.dtype:
            continue
        if is_number(number) or isinstance(number, (int, float)):
            return number, matrix
    return None


# --- constants --------------------------------------------------------------------------------------------------------

SOURCES = {aten.scalar_tensor.default, aten.full.default, aten.arange.start_step, aten.full_like.default}
FEW = 64  # elements of a constant that is stored in the file instead of being computed in each update


def constant(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """Small tensors that do not depend on any input are stored."""
    if node.target not in SOURCES or value(node).numel() > FEW:
        return None
    like = [torch.empty(value(arg).shape, dtype=value(arg).dtype) for arg in node.args if isinstance(arg, fx.Node)]
    tensor = node.target(*like, *node.args[len(like) :], **node.kwargs)
    rewriter.stored += 1
    name = f"stored_{rewriter.stored}"
    rewriter.module.register_buffer(name, tensor)
    new = rewriter.graph.get_attr(name)
    new.meta["val"] = value(node)
    return new
