"""The scattering transform of benchmarks/evidence/privacy.py."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]


@pytest.fixture
def scatter(monkeypatch):
    pytest.importorskip("sklearn")
    for place in ("benchmarks", "examples", "benchmarks/evidence"):
        monkeypatch.syspath_prepend(str(ROOT / place))
    before = set(sys.modules)
    yield __import__("privacy").scatter
    for name in {"privacy", "record", "tables", "private_fashion_mnist", "fashion_mnist"} - before:
        sys.modules.pop(name, None)


def test_a_constant_image_has_its_value_and_no_waves(scatter):
    coefficients = scatter(torch.full((2, 1, 28, 28), 0.7))
    assert coefficients.shape == (2, 81, 7, 7)
    torch.testing.assert_close(coefficients[:, 0], torch.full((2, 7, 7), 0.7))
    assert coefficients[:, 1:].abs().max() < 1e-6


def convolve(signal, scale, angle=None):
    """Circular convolution in space with a Morlet wavelet; angle=None: with the Gaussian of the blur."""
    distance = torch.arange(-18.0, 19, dtype=torch.float64)
    row, column = torch.meshgrid(distance, distance, indexing="ij")
    sigma, slant = 0.8 * 2**scale, 1.0 if angle is None else 0.5
    u = row * math.cos(angle or 0) + column * math.sin(angle or 0)
    v = column * math.cos(angle or 0) - row * math.sin(angle or 0)
    kernel = slant / (2 * math.pi * sigma**2) * torch.exp(-(u**2 + (slant * v) ** 2) / (2 * sigma**2)) + 0j
    if angle is not None:
        wave = kernel * torch.exp(0.75j * math.pi / 2**scale * u)
        kernel = wave - kernel * wave.sum() / kernel.sum()
    framed = F.pad(signal[None, None], (18,) * 4, mode="circular")
    return torch.complex(*(F.conv2d(framed, part.flip(0, 1)[None, None]) for part in (kernel.real, kernel.imag)))[0, 0]


def test_coefficients_equal_convolutions_in_space(scatter):
    image = torch.rand(28, 28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    framed = F.pad(image[None, None], (4,) * 4, mode="reflect")[0, 0]
    angles = [(3 - k) * math.pi / 8 for k in range(8)]
    found = scatter(image[None, None].float())[0].double()
    fine = convolve(framed, 0, angles[2]).abs()
    both = convolve(fine, 1, angles[5]).abs()

    def blurred(signal, stride=1):
        """Blur of every stride-th pixel: the coarse moduli are computed at every second one."""
        comb = torch.zeros_like(signal)
        comb[::stride, ::stride] = stride**2 * signal[::stride, ::stride]
        return convolve(comb, 1).real[4:32:4, 4:32:4]

    expected = {
        0: blurred(framed),
        1 + 2: blurred(fine),
        1 + 8 + 5: blurred(convolve(framed, 1, angles[5]).abs(), 2),
        1 + 16 + 8 * 2 + 5: blurred(both, 2),
    }
    for channel, values in expected.items():
        torch.testing.assert_close(found[channel], values, rtol=1e-5, atol=1e-6)
