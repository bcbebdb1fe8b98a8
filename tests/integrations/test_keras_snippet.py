"""The block of docs/snippets.md that needs TensorFlow prints what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "snippets.md"
BLOCK = r"<!-- needs: tensorflow -->\s+```python\n(.*?)^```\s+```text\n(.*?)^```$"


def test_the_snippet_with_a_gradient_tape_prints_what_the_page_shows():
    [(code, shown)] = re.findall(BLOCK, PAGE.read_text(), re.MULTILINE | re.DOTALL)
    environment = os.environ | {"KERAS_BACKEND": "tensorflow"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == shown
