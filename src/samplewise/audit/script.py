"""Audit of an unmodified training script: run once, or once for each variation of its arguments."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from samplewise.audit.audit import Audit, audit, read_audit
from samplewise.audit.comparison import Comparison, compare
from samplewise.audit.totals import Per


class EnoughUpdatesError(BaseException):
    """Ends the script after the last audited update. No Exception: scripts catch these and go on."""


class ScriptError(Exception):
    """A variation of the script has failed, and has printed why."""


def audit_script(
    script: Path, arguments: Sequence[str], per: Per = None, allow: Collection[str] = (), max_updates: int | None = None
) -> tuple[Audit, BaseException | None]:
    """Run a script as `python script arguments...` does, and audit every model that it trains. Returns the audit, and
    the exception that has ended the script.
    """
    result = audit(None, per=per, allow=allow, norms=True)
    complete = True
    error: BaseException | None = None

    def end(updates: int) -> None:
        if max_updates is not None and updates >= max_updates:
            raise EnoughUpdatesError

    result._observer.on_update = end
    with _as_main(script, arguments), result:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except EnoughUpdatesError:
            complete = False
        except SystemExit as exit:
            error = exit if exit.code else None
        except (Exception, KeyboardInterrupt) as failure:
            error = failure
        result.stop(complete and error is None)
    return result, error


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Context manager: sys.argv and sys.path as for a script that Python runs."""
    argv, path = sys.argv, sys.path
    sys.argv = [str(script), *arguments]
    sys.path = [str(script.resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv = argv
        sys.path = path


def compare_variations(
    command: Sequence[str], variations: Sequence[Sequence[str]]
) -> Iterator[tuple[Sequence[str], Comparison]]:
    """Run a command of `samplewise audit` once with each variation of its arguments, in processes of their own, and
    compare the updates of the first one with those of each other one.
    """
    with tempfile.TemporaryDirectory() as directory:
        first = None
        for number, variation in enumerate(variations):
            path = Path(directory) / f"{number}.json"
            print(f"--- {' '.join(variation)}", flush=True)
            run = [sys.executable, "-m", "samplewise.cli.main", "audit", "--to", str(path), *command, *variation]
            status = subprocess.run(run, check=False).returncode
            if not path.exists():
                raise ScriptError(f"the script must run with {' '.join(variation)!r}; found exit code {status}.")
            saved = read_audit(path)
            if first is None:
                first = saved
            else:
                yield variation, compare(first["summary"], saved["summary"])
