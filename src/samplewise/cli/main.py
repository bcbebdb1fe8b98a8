"""The typer application behind the command `samplewise`.

The modules of the commands import torch, which takes seconds, inside of functions, after the arguments are checked:
help, errors of arguments and completion do not need it.
"""

from __future__ import annotations

import platform
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
except ImportError:
    raise SystemExit("the command line needs typer: pip install 'samplewise[cli]'") from None

from samplewise.cli import audit
from samplewise.cli.attribute import attribute
from samplewise.cli.bench import bench
from samplewise.cli.doctor import doctor
from samplewise.cli.privacy import privacy
from samplewise.cli.recipe_source import RecipeError
from samplewise.cli.replay import replay
from samplewise.cli.report import report
from samplewise.cli.stdio import OutputError, guarded_output
from samplewise.cli.train import TrainCommand, train
from samplewise.core.package import installed_version


class OneLineErrors(TyperGroup):
    """Command group that prints one line for a bad argument, and the user's own lines for a failing recipe."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        settings = {"windows_expand_args": windows_expand_args, **extra}
        first = (sys.argv[1:] if args is None else args)[:1]
        command = " ".join(["samplewise", *(word for word in first if word in self.commands)])
        with guarded_output():
            code = self._exit_code(
                lambda: super(OneLineErrors, self).main(args, prog_name, complete_var, False, **settings), command
            )
        sys.exit(code)

    def _exit_code(self, run: Callable[[], Any], command: str) -> int:
        """Run the command, print its error if there is one, and return the exit code."""
        try:
            code = run()
            if sys.stdout is not None:
                sys.stdout.flush()
        except OutputError as error:
            if not error.quiet:
                typer.echo(f"samplewise: {error}", err=True)
            code = error.code
        except typer.TyperException as error:
            message = " ".join(error.format_message().split())
            end = "" if message.endswith((".", "?")) else "."
            hint = "" if isinstance(error, typer.BadParameter) else f" See {command} --help."
            typer.echo(f"samplewise: {message}{end}{hint}", err=True)
            code = error.exit_code
        except ImportError as error:
            if "pip install" not in str(error):  # not raised by samplewise for a missing package
                raise
            typer.echo(f"samplewise: {error}", err=True)
            code = 1
        except RecipeError as error:
            typer.echo(str(error), err=True)
            code = error.code
        return code or 0


app = typer.Typer(
    name="samplewise",
    cls=OneLineErrors,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(is_set: bool) -> None:
    if is_set:
        versions = f"samplewise {installed_version()}, torch {_torch_version()}, Python {platform.python_version()}"
        typer.echo(versions)
        raise typer.Exit


def _torch_version() -> str:
    """torch.__version__, from the file that defines it. The metadata of the package may lack the name of the build."""
    torch = find_spec("torch")
    try:
        return runpy.run_path(str(Path((torch and torch.origin) or "").with_name("version.py")))["__version__"]
    except (OSError, ValueError, KeyError):
        return installed_version("torch")


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models with access to per-sample gradients.

    Write a recipe first: a Python file with functions model() and data(). Check it with `samplewise doctor`, train it
    with `samplewise train`, write a report with `samplewise report`, and find the training samples behind predictions
    with `samplewise attribute`. `samplewise train --help` describes the other functions of a recipe.
    """


app.command(cls=TrainCommand)(train)
app.command()(doctor)
app.command()(bench)
app.command()(report)
app.command()(replay)
app.command()(attribute)
app.command(context_settings=audit.CONTEXT)(audit.audit)
app.command()(privacy)


@app.command()
def demo() -> None:
    """Find wrong labels in a small dataset with a per-sample ledger.

    Trains a small model on digits of which a tenth have a wrong label, and records every sample at every visit in a
    ledger. Then shows the most suspicious samples, the gradient noise scale and the cost of per-sample norms, and
    writes a report. Takes less than a minute; the data are part of scikit-learn. The run is kept under runs/.
    """
    from samplewise.cli.demo import run_demo

    run_demo()


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning; for warnings of samplewise without file and line, which would point into the library."""
    is_own = category.__module__.startswith("samplewise.")
    return f"warning: {message}\n" if is_own else f"{filename}:{lineno}: {category.__name__}: {message}\n"


def main() -> None:
    warnings.formatwarning = _format_warning
    app(prog_name="samplewise")


if __name__ == "__main__":
    main()
