"""Load Fashion-MNIST from Debian's package: 60,000 training images of clothes, 10,000 test images.

    apt-get install dataset-fashion-mnist
    python examples/fashion_mnist.py            # print shapes and class counts

Other examples import `load` from here. Files of other datasets in the format of MNIST (IDX) work as well.
"""

import gzip
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

PLACE = Path("/usr/share/datasets/fashion-mnist")
NAMES = "T-shirt trousers pullover dress coat sandal shirt sneaker bag boot".split()
BYTES = 8  # type code of unsigned bytes


def load(part: str = "train", place: Path = PLACE) -> tuple[Tensor, Tensor]:
    """Return pixels (N, 1, 28, 28) in [0, 1] and labels (N,). `part` is "train" or "t10k"."""
    pixels = read(place / f"{part}-images-idx3-ubyte.gz", dimensions=3)
    labels = read(place / f"{part}-labels-idx1-ubyte.gz", dimensions=1)
    if len(pixels) != len(labels):
        raise ValueError(f"each picture must have one label; found {len(pixels)} and {len(labels)} in {place}.")
    return pixels[:, None].float() / 255, labels.long()


def load_or_digits(part: str = "train") -> tuple[Tensor, Tensor, Sequence[str]]:
    """Return pixels, labels and class names of Fashion-MNIST; of scikit-learn's digits if it is not installed.

    The 1797 digits are enlarged to 28 × 28 pixels; the last 300 are the part "t10k".
    """
    if PLACE.exists():
        return (*load(part), NAMES)
    from sklearn.datasets import load_digits

    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    pixels = F.interpolate(pixels.view(-1, 1, 8, 8).float() / 16, size=28, mode="bilinear")
    which = slice(-300, None) if part == "t10k" else slice(-300)
    return pixels[which], labels[which], [str(k) for k in range(10)]


def read(path: Path, dimensions: int) -> Tensor:
    """Read an IDX file: two zero bytes, type code, number of dimensions, their sizes (4 bytes each), then the data."""
    if not path.exists():
        what_to_do = "Install Debian's package dataset-fashion-mnist, or say where the files are."
        raise FileNotFoundError(f"Fashion-MNIST must be on this machine; found no {path}. {what_to_do}")
    data = bytearray(gzip.decompress(path.read_bytes()))
    start = 4 + 4 * dimensions
    sizes = [int.from_bytes(data[at : at + 4]) for at in range(4, start, 4)]
    if data[:4] != bytes([0, 0, BYTES, dimensions]) or len(data) != start + math.prod(sizes):
        found = f"{len(data)} bytes that begin with {bytes(data[:start]).hex(' ', 4)}"
        raise ValueError(
            f"{path} must hold bytes in {dimensions} dimensions, all of them; found {found}. Copy it again."
        )
    return torch.frombuffer(data, dtype=torch.uint8, offset=start).view(sizes)


def main() -> None:
    for part in ("train", "t10k"):
        pixels, labels = load(part)
        print(f"{part}: pixels {tuple(pixels.shape)}, labels {tuple(labels.shape)}")
        print(", ".join(f"{n} {name}" for n, name in zip(labels.bincount(), NAMES, strict=True)))


if __name__ == "__main__":
    try:
        main()
    except FileNotFoundError as why:
        print(why)
