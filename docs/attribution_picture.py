"""Create docs/attribution.png: screenshot of the page of `samplewise attribute` for digits, some with a wrong label.

python docs/attribution_picture.py        # needs Debian's chromium and chromium-driver
"""

import os
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from report_picture import screenshot

TARGET = Path(__file__).with_name("attribution.png")
SIZE = (1180, 720)
RECIPE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from samplewise.cli.demo import digits


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def data():  # a tenth of the training labels is wrong
    torch.manual_seed(0)
    x, y, _, validation = digits()
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    return loader, DataLoader(TensorDataset(*validation), batch_size=128)
"""
SHOW_QUERY = (
    "document.querySelector('nav').remove(); document.documentElement.style.scrollPaddingTop = '1.5rem';"
    "document.querySelector('section[id^=query] h2').scrollIntoView()"
)


def samplewise(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "samplewise", *arguments], check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        Path("digits.py").write_text(RECIPE)
        samplewise("train", "digits.py", "--epochs", "12")
        samplewise("attribute", "digits.py", "--queries", "wrong", "--limit", "3", "--method", "trak")
        page = Path("runs/digits/attribution/attribution.html").resolve()
        picture = Image.open(BytesIO(screenshot(page, SIZE, SHOW_QUERY)))
        os.chdir(TARGET.parent)
    picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(TARGET, optimize=True)
    print(f"{TARGET}: {TARGET.stat().st_size / 1024:.0f} kB")
