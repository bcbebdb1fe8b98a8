"""Results of a script in a process of its own."""

import json
import os
import subprocess
import sys
from typing import Any


def call(script: str, *arguments: object, **environment: str) -> Any:
    """JSON that the script prints as its last line; an error has the last line of its stderr."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise RuntimeError(last_line(done.stderr) or f"exit {done.returncode}")
    return json.loads(last_line(done.stdout))


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""
