"""Products by oneDNN and by MKL: the same values, whatever the layout of the operands."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samplewise.engine.grads import kernels
from samplewise.engine.grads.kernels import bmm, mm, prefers_onednn


@pytest.fixture
def by_onednn(monkeypatch):
    """Products of any size by oneDNN, also on processors for which MKL is as fast."""
    monkeypatch.setattr(kernels, "LARGE", 0)
    monkeypatch.setattr(kernels, "NARROW", 1)
    monkeypatch.setattr(kernels, "_mkl_is_slow", lambda: True)


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


LEFT = {
    "contiguous": lambda: noise(33, 40),
    "transposed": lambda: noise(40, 33).t(),
    "columns of a larger matrix": lambda: noise(33, 60)[:, 7:47],
    "every other row": lambda: noise(66, 40)[::2],
    "expanded": lambda: noise(1, 40).expand(33, 40),
    "wide": lambda: noise(400, 40).t().contiguous().t(),
}
RIGHT = {
    "contiguous": lambda: noise(40, 24),
    "transposed": lambda: noise(24, 40).t(),
    "columns of a larger matrix": lambda: noise(40, 50)[:, 3:27],
    "every other row": lambda: noise(80, 24)[::2],
    "expanded": lambda: noise(40, 1).expand(40, 24),
    "one column": lambda: noise(40, 1),
}


def assert_is_product(found, a, b):
    bound = a.double().abs() @ b.double().abs()
    assert ((found.double() - a.double() @ b.double()).abs() <= 1e-6 * bound).all()


@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("left", LEFT)
def test_product_of_operands_in_any_layout(by_onednn, left, right):
    a, b = LEFT[left](), RIGHT[right]()
    product = mm(a, b)
    assert_is_product(product, a, b)
    assert product.is_contiguous()


def test_batched_product(by_onednn):
    a, b = noise(5, 12, 30), noise(5, 7, 30).transpose(1, 2)
    product = bmm(a, b)
    assert product.shape == (5, 12, 7)
    for one, left, right in zip(product, a, b, strict=True):
        assert_is_product(one, left, right)


class WeightLayouts(TorchDispatchMode):
    """Records whether each second operand that oneDNN gets is dense: for others it calls a slow kernel."""

    def __init__(self):
        super().__init__()
        self.dense = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.dense.append(args[1].is_contiguous() or args[1].t().is_contiguous())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("left", LEFT)
def test_the_second_operand_is_dense(by_onednn, left, right):
    with WeightLayouts() as layouts:
        mm(LEFT[left](), RIGHT[right]())
        bmm(LEFT[left]()[None], RIGHT[right]()[None])
    assert layouts.dense and all(layouts.dense)


def test_infinity_stays_in_its_row(by_onednn):
    a = noise(33, 40)
    a[3, 4] = torch.inf
    assert mm(a, noise(40, 24)).isfinite().all(1).tolist() == [row != 3 for row in range(33)]


@pytest.mark.parametrize("change", ["double", "differentiable", "switched off", "small"])
def test_other_products_stay_with_torch(by_onednn, monkeypatch, change):
    a, b = noise(33, 40), noise(40, 24)
    assert prefers_onednn(a, b, 33, 24, 40)
    if change == "double":
        a, b = a.double(), b.double()
    elif change == "differentiable":
        a.requires_grad_()
    elif change == "small":
        monkeypatch.setattr(kernels, "LARGE", 33 * 24 * 40)
    elif change == "switched off":
        switch_off_onednn(monkeypatch)
    assert not prefers_onednn(a, b, 33, 24, 40)
    assert torch.equal(mm(a, b), torch.mm(a, b))
    assert mm(a, b).requires_grad == (change == "differentiable")


def switch_off_onednn(monkeypatch):
    """As torch.backends.mkldnn.enabled = False, until the end of the test."""
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
