"""The data loader of the examples, on small files in the format of Fashion-MNIST."""

import gzip
import re
import runpy
from pathlib import Path

import pytest
import torch

fashion = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "fashion_mnist.py"))
load = fashion["load"]


def write(path, sizes, numbers, kind=8):
    head = bytes([0, 0, kind, len(sizes)]) + b"".join(size.to_bytes(4) for size in sizes)
    path.write_bytes(gzip.compress(head + bytes(numbers)))


@pytest.fixture
def place(tmp_path):
    write(tmp_path / "train-images-idx3-ubyte.gz", (2, 3, 2), [0, 51, 102, 153, 204, 255, *[255] * 6])
    write(tmp_path / "train-labels-idx1-ubyte.gz", (2,), [9, 0])
    return tmp_path


def test_pixels_and_labels(place):
    pixels, labels = load("train", place)
    assert pixels.shape == (2, 1, 3, 2) and pixels.dtype == torch.float32
    torch.testing.assert_close(pixels[0].flatten(), torch.linspace(0, 1, 6))
    assert (pixels[1] == 1).all()
    assert labels.tolist() == [9, 0] and labels.dtype == torch.int64


def test_error_if_files_are_missing(place):
    missing = place / "t10k-images-idx3-ubyte.gz"
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"must be on this machine; found no {missing}. Install")
    ) as e:
        load("t10k", place)
    assert "Debian's package dataset-fashion-mnist" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("sizes", "numbers", "kind"), [((3,), [9, 0], 8), ((1,), [9, 0], 8), ((2,), [9, 0], 9), ((2, 1), [9, 0], 8)]
)
def test_a_truncated_file_or_one_of_another_format(place, sizes, numbers, kind):
    write(place / "train-labels-idx1-ubyte.gz", sizes, numbers, kind)
    with pytest.raises(
        ValueError, match=r"must hold bytes in 1 dimensions, all of them; found \d+ bytes .* Copy it ag"
    ):
        load("train", place)


def test_a_label_for_each_picture(place):
    write(place / "train-labels-idx1-ubyte.gz", (3,), [9, 0, 1])
    with pytest.raises(ValueError, match="each picture must have one label; found 2 and 3 in"):
        load("train", place)


def test_digits_take_the_place_of_a_missing_package(tmp_path):
    """The tutorials then have images of the same size and ten classes; no image is in both parts."""
    module = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "fashion_mnist.py"))
    either = module["load_or_digits"]
    either.__globals__["PLACE"] = tmp_path / "missing"
    pixels, labels, names = either()
    tests, answers, _ = either("t10k")
    assert pixels.shape == (1497, 1, 28, 28) and tests.shape == (300, 1, 28, 28)
    assert labels.shape == (1497,) and answers.shape == (300,)
    assert names == list("0123456789") and pixels.min() >= 0 and pixels.max() <= 1
