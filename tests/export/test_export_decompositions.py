"""Decompositions for ExecuTorch against torch's own operations, in float64."""

import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from samplewise.export import decompositions as ours

aten = torch.ops.aten

GEOMETRIES = [  # size, kernel, stride, padding, dilation
    ((5, 7), (3, 3), (1, 1), (0, 0), (1, 1)),
    ((6, 5), (3, 2), (2, 1), (1, 0), (1, 1)),
    ((9, 8), (3, 3), (2, 3), (2, 1), (1, 2)),
    ((4, 4), (1, 1), (2, 2), (0, 0), (1, 1)),
    ((3, 3), (5, 3), (1, 1), (2, 1), (1, 1)),
]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("bias", [True, False])
def test_convolution_of_one_image(geometry, bias, groups):
    check_convolution(*geometry, bias, groups)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(
    "geometry",
    [((7,), (3,), (1,), (1,), (1,)), ((9,), (2,), (2,), (0,), (3,)), ((4,), (1,), (1,), (0,), (1,))],
)
def test_convolution_of_one_sequence(geometry, groups):
    check_convolution(*geometry, True, groups)


def check_convolution(size, kernel, stride, padding, dilation, bias, groups):
    torch.manual_seed(0)
    x = torch.randn(1, 4, *size, dtype=torch.float64)
    weight = torch.randn(8, 4 // groups, *kernel, dtype=torch.float64)
    b = torch.randn(8, dtype=torch.float64) if bias else None
    rest = (stride, padding, dilation, False, (0,) * len(size), groups)
    expected = aten.convolution(x, weight, b, *rest)
    torch.testing.assert_close(ours.convolution(x, weight, b, *rest), expected)

    g = torch.randn_like(expected)
    for mask in itertools.product((True, False), repeat=3):
        results = ours.convolution_backward(g, x, weight, [8], *rest, mask)
        expected_results = aten.convolution_backward(g, x, weight, [8], *rest, mask)
        for result, expected_result, is_needed in zip(results, expected_results, mask, strict=True):
            if is_needed:
                torch.testing.assert_close(result, expected_result)
            else:
                assert result is None


@pytest.mark.parametrize(
    ("x", "weight", "transposed"),
    [
        ((2, 4, 5, 5), (3, 4, 3, 3), False),  # two images
        ((1, 4, 5, 5), (4, 3, 3, 3), True),  # transposed
        ((1, 2, 4, 4, 4), (3, 2, 2, 2, 2), False),  # three dimensions
    ],
)
def test_other_convolutions_keep_their_kernel(x, weight, transposed):
    x, weight = torch.randn(x), torch.randn(weight)
    ones, zeros = [1] * (x.dim() - 2), [0] * (x.dim() - 2)

    def forward(x, weight):
        return aten.convolution(x, weight, None, ones, zeros, ones, transposed, zeros, 1)

    graph = make_fx(forward, ours.decompositions())(x, weight)
    assert aten.convolution.default in {node.target for node in graph.graph.nodes}
    torch.testing.assert_close(graph(x, weight), forward(x, weight))


def test_the_index_of_a_convolution_is_a_constant_of_the_graph():
    x, weight = torch.randn(1, 2, 6, 6), torch.randn(3, 2, 3, 3)

    def forward(x, weight):
        return aten.convolution(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    graph = make_fx(forward, ours.decompositions())(x, weight)
    targets = {node.target for node in graph.graph.nodes}
    assert not targets & {aten.arange.default, aten.scatter.value, aten.convolution.default}
    other = torch.randn_like(x)
    torch.testing.assert_close(graph(other, weight), forward(other, weight))


@pytest.mark.parametrize("settings", [((2, 2), (2, 2), (0, 0)), ((3, 3), (1, 2), (1, 1))])
def test_the_backward_pass_of_max_pooling(settings):
    torch.manual_seed(0)
    kernel, stride, padding = settings
    x = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    y, indices = aten.max_pool2d_with_indices(x, kernel, stride, padding)
    g = torch.randn_like(y)
    rest = (x, kernel, stride, padding, (1, 1), False, indices)
    torch.testing.assert_close(ours.max_pool2d_backward(g, *rest), aten.max_pool2d_with_indices_backward(g, *rest))


@pytest.mark.parametrize("divisor", [None, 3])
@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize("settings", [((2, 2), (), (0, 0)), ((3, 2), (1, 2), (1, 1)), ((3, 3), (2, 2), (1, 0))])
def test_the_backward_pass_of_average_pooling(settings, count_include_pad, divisor):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    rest = (*settings, False, count_include_pad, divisor)
    g = torch.randn_like(aten.avg_pool2d(x, *rest))
    torch.testing.assert_close(ours.avg_pool2d_backward(g, x, *rest), aten.avg_pool2d_backward(g, x, *rest))
