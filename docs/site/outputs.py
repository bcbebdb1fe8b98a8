"""Outputs of the tutorials: run each page in a process of its own, once per content, and insert what it printed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import execute
import torch

ROOT = Path(__file__).parents[2]
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
# Output that the page contains, of a run that takes longer or needs data that are not on this machine.
WRITTEN = re.compile(r"\s+(?:```text\n|!\[)")
TIME_LIMIT = 600  # seconds; a tutorial takes less than a minute on two free cores


def run(page: Path, target: Path) -> dict[str, Any]:
    """Run a page unless the outputs of the same page, library and torch version exist."""
    key = digest(page)
    stamp = target / "key"
    if not stamp.exists() or stamp.read_text() != key:
        print(f"running {page.relative_to(ROOT)}", flush=True)
        shutil.rmtree(target, ignore_errors=True)  # figures of an earlier version
        execute_page(page, target)
        stamp.write_text(key)
    return json.loads((target / "outputs.json").read_text(encoding="utf-8"))


def execute_page(page: Path, target: Path) -> None:
    command = [sys.executable, str(ROOT / "docs" / "site" / "execute.py"), str(page), str(target)]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=TIME_LIMIT, check=False)
    if done.returncode:
        sys.exit(f"{page.relative_to(ROOT)} must run without an error or a warning; see the traceback above.")


def digest(page: Path) -> str:
    """Hash of all that the outputs depend on."""
    files = [page, Path(execute.__file__), ROOT / "examples" / "fashion_mnist.py"]
    files += sorted((ROOT / "src").rglob("*.py"))
    content = [f"torch {torch.__version__}, Fashion-MNIST {FASHION_MNIST.exists()}".encode()]
    content += [path.read_bytes() for path in files]
    return hashlib.sha256(b"\0".join(content)).hexdigest()


def shown(text: str, result: dict[str, Any], folder: str) -> str:
    """Page with the outputs below its blocks. `folder` is the path to the figures in the site."""
    parts, end = [], 0
    for block, found in zip(execute.BLOCK.finditer(text), result["blocks"], strict=True):
        parts.append(text[end : block.end()])
        end = block.end()
        if WRITTEN.match(text, end):
            continue
        if found["text"]:
            parts.append(f"\n\n```{{code-block}} none\n:class: output\n\n{found['text'].rstrip()}\n```")
        parts += [f"\n\n![Figure drawn by the code above]({folder}/{name})" for name in found["figures"]]
    if any(WRITTEN.match(text, block.end()) for block in execute.BLOCK.finditer(text)):
        return "".join([*parts, text[end:]])  # the page says where its outputs come from
    note = f"Outputs from torch {torch.__version__}; the code of this page took {result['seconds']:.0f} s of CPU time."
    return "".join([*parts, text[end:], f"\n*{note}*\n"])
