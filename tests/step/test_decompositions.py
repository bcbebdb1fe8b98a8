"""What is written out for the compiler is what the library computes."""

from __future__ import annotations

import warnings

import pytest
import torch

from samplewise.step.compiled import decompositions as ours
from samplewise.step.compiled import inductor

aten = torch.ops.aten


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def assert_close(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 7, 5), (1, 60, 5), (1, 34, 5), (6, 1, 5), (6, 7, 1), (1, 1, 1), (4, 5, 6)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_products(m, k, n, transposed):
    a, b = noise(m, k), noise(n, k).t() if transposed else noise(k, n)
    assert_close([ours.mm(a, b)], [a @ b])
    assert_close([ours.addmm(noise(n), a, b)], [noise(n) + a @ b])


def test_stored_views_keep_their_values():
    """A view has an offset and strides of its own, whatever layout the compiler gives to the memory below."""
    views = [
        lambda y: y.t(),
        lambda y: y[:, 1:2].t(),
        lambda y: y[1:, 2:],
        lambda y: y[2],
        lambda y: y.expand(2, *y.shape),
    ]

    def function(x):
        return [ours.materialize(view((x + k).tanh())) * 2 for k, view in enumerate(views)]

    x = noise(4, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch uses deprecated functions of its own
        inductor.load_compiler()
    graph = inductor.trace_functional(function, [x], inductor.compiler_decompositions(ours.DECOMPOSITIONS))
    assert_close(inductor.compile_graph(graph, [x], threads=1)([x]), function(x))


def test_what_is_large_or_scaled_is_left_to_the_library():
    assert ours.mm(noise(40, 40), noise(40, 40)) is NotImplemented
    assert ours.addmm(noise(3), noise(2, 4), noise(4, 3), beta=2) is NotImplemented
    weight = noise(5, 3, 3, 3)
    assert ours.convolution(noise(2, 3, 8, 8), weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1) is NotImplemented
    assert ours.convolution(noise(1, 6, 8, 8), weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2) is NotImplemented
    q = noise(1, 8, 128, 4)
    assert ours.attention(q, q, q) is NotImplemented
    assert ours.attention(q[:, :, :8], q[:, :, :8], q[:, :, :8], 0.5) is NotImplemented


@pytest.mark.parametrize("stride", [[1, 1], [2, 1], [3, 2]])
@pytest.mark.parametrize("padding", [[0, 0], [1, 2]])
@pytest.mark.parametrize("dilation", [[1, 1], [2, 1]])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (2, 4)])
def test_one_image(stride, padding, dilation, kernel):
    x, weight, bias = noise(1, 3, 11, 10), noise(5, 3, *kernel), noise(5)
    rest = (stride, padding, dilation, False, [0, 0], 1)
    expected = aten.convolution(x, weight, bias, *rest)
    assert_close([ours.convolution(x, weight, bias, *rest)], [expected])
    assert_close([ours.convolution(x, weight, None, *rest)], [aten.convolution(x, weight, None, *rest)])
    for mask in ([True, True, True], [False, True, True], [True, False, False]):
        given = (noise(*expected.shape), x, weight, [5], *rest, mask)
        found = aten.convolution_backward(*given)
        wanted = [gradient if wanted else None for gradient, wanted in zip(found, mask, strict=True)]
        assert_close(ours.convolution_backward(*given), wanted)


@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_of_few_tokens(causal, masked, scale):
    q, k, v, g = noise(2, 3, 5, 4), noise(2, 3, 7, 4), noise(2, 3, 7, 4) * 2, noise(2, 3, 5, 4) + 1
    mask = noise(2, 3, 5, 7) if masked else None
    options = {"attn_mask": mask, "scale": scale}
    out, total = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, **options)
    assert_close(ours.attention(q, k, v, 0.0, causal, **options), (out, total))
    expected = aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, out, total, 0.0, causal, **options)
    assert_close(ours.attention_backward(g, q, k, v, out, total, 0.0, causal, **options), expected)


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("stride", [[], [1, 1], [2, 1], [3, 2], [4, 5]])
@pytest.mark.parametrize("dilation", [[1, 1], [2, 1]])
@pytest.mark.parametrize("kernel", [[3, 3], [1, 1], [2, 4]])
@pytest.mark.parametrize("values", ["different", "equal", "nan", "infinite"])
def test_max_pooling(stride, dilation, kernel, values):
    x = noise(2, 3, 11, 10).to(memory_format=torch.channels_last)
    if values != "different":  # several of them in a window
        x[x > 0.5] = {"equal": 3.0, "nan": torch.nan, "infinite": -torch.inf}[values]
    rest = (kernel, stride, [0, 0], dilation, False)
    out, indices = aten.max_pool2d_with_indices(x, *rest)
    g = noise(*out.shape)
    expected = aten.max_pool2d_with_indices_backward(g, x, *rest, indices)
    assert_close([ours.max_pool2d_backward(g, x, *rest, indices)], [expected])


@pytest.mark.parametrize(
    ("x", "kernel", "padding", "ceil_mode"),
    [
        (noise(2, 3, 5, 5), [2, 2], [0, 0], False),
        (noise(1, 3, 5, 5).to(memory_format=torch.channels_last), [2, 2], [0, 0], False),
        (noise(2, 3, 5, 5).to(memory_format=torch.channels_last), [2, 2], [1, 0], False),
        (noise(2, 3, 5, 5).to(memory_format=torch.channels_last), [2, 2], [0, 0], True),
        (noise(2, 3, 5, 5).to(memory_format=torch.channels_last), [4, 4], [0, 0], False),
        (noise(3, 5, 5), [2, 2], [0, 0], False),
    ],
    ids=["contiguous", "one image", "padding", "ceil_mode", "large", "without batch"],
)
def test_max_pooling_that_is_left_to_the_compiler(x, kernel, padding, ceil_mode):
    rest = (kernel, [2, 2], padding, [1, 1], ceil_mode)
    out, indices = aten.max_pool2d_with_indices(x, *rest)
    assert ours.max_pool2d_backward(noise(*out.shape), x, *rest, indices) is NotImplemented
