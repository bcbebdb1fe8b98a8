"""The command `samplewise`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

try:
    import typer
    from typer.core import TyperGroup
except ImportError:
    raise SystemExit("the command line needs typer: pip install 'samplewise[cli]'") from None

from samplewise.cli.demo import demo
from samplewise.cli.doctor import doctor
from samplewise.cli.output import OutputError, guarded_output
from samplewise.cli.recipe import RecipeError
from samplewise.cli.report import report
from samplewise.cli.train import train


class OneLine(TyperGroup):
    """A bad argument gets one line instead of a page, and a failing recipe its own lines."""

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
        with guarded_output():
            code = self._code(lambda: super(OneLine, self).main(args, prog_name, complete_var, False, **settings))
        sys.exit(code)

    def _code(self, run: Callable[[], Any]) -> int:
        """The exit code, after what has to be said."""
        try:
            code = run()
            if sys.stdout is not None:
                sys.stdout.flush()
        except OutputError as error:
            if not error.quiet:
                typer.echo(f"samplewise: {error}", err=True)
            code = error.code
        except typer.TyperException as error:
            said = " ".join(error.format_message().split())
            more = "" if isinstance(error, typer.BadParameter) else " See samplewise --help."
            typer.echo(f"samplewise: {said}{more}", err=True)
            code = error.exit_code
        except RecipeError as error:
            typer.echo(str(error), err=True)
            code = error.code
        return code or 0


app = typer.Typer(
    name="samplewise",
    cls=OneLine,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback()
def _about() -> None:
    """Train PyTorch models with every sample's gradient within reach.

    Begin with a recipe: a Python file with functions model() and data(). Ask the doctor whether all is well with it,
    train it, and look at the report. `samplewise train --help` says what else a recipe may hold.
    """


app.command()(train)
app.command()(doctor)
app.command()(report)
app.command()(demo)


def _said(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """A warning of ours says all by itself: the line of ours that gave it helps nobody."""
    ours = category.__module__.startswith("samplewise.")
    return f"warning: {message}\n" if ours else f"{filename}:{lineno}: {category.__name__}: {message}\n"


def main() -> None:
    warnings.formatwarning = _said
    app(prog_name="samplewise")


if __name__ == "__main__":
    main()
