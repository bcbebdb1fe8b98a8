"""Deprecated functions, arguments and names of modules."""

import re
import sys
import tomllib
import types
import warnings
from pathlib import Path

import pytest

from samplewise.core.package import deprecated, renamed_argument, renamed_names

ROOT = Path(__file__).parents[1]
TWO_VERSIONS = {"since": "0.3", "removed_in": "0.5"}


def line_of(function):
    return function.__code__.co_firstlineno


@deprecated("longer()", **TWO_VERSIONS)
def shorter(x, *, y=1):
    """Add."""
    return x + y


@renamed_argument("size", "samples", **TWO_VERSIONS)
def take(samples, rest=0):
    return samples, rest


class Model:
    @deprecated("Model.new", **TWO_VERSIONS)
    def old(self):
        return self


def only_warning(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    (warning,) = caught
    assert warning.category is DeprecationWarning
    return result, warning


def test_a_function_works_and_warns_at_the_line_of_its_caller():
    def caller():
        return shorter(2, y=3)

    result, warning = only_warning(caller)
    assert result == 5
    assert str(warning.message) == (
        "shorter() is deprecated since samplewise 0.3 and will be removed in 0.5. Use longer()."
    )
    assert (warning.filename, warning.lineno) == (__file__, line_of(caller) + 1)


def test_a_function_keeps_name_and_docstring():
    assert (shorter.__name__, shorter.__doc__) == ("shorter", "Add.")


def test_a_method():
    model = Model()
    result, warning = only_warning(lambda: model.old())
    assert result is model
    assert str(warning.message).startswith("Model.old() is deprecated")
    assert warning.filename == __file__


def test_a_renamed_argument():
    def caller():
        return take(size=4, rest=1)

    result, warning = only_warning(caller)
    assert result == (4, 1)
    assert str(warning.message) == (
        "the argument 'size' of take() is deprecated since samplewise 0.3 and will be removed in 0.5. Use 'samples'."
    )
    assert (warning.filename, warning.lineno) == (__file__, line_of(caller) + 1)


def test_the_new_argument_gives_no_warning():
    assert take(samples=4) == take(4) == (4, 0)  # a warning would be an error


def test_both_names_of_an_argument_are_refused():
    with pytest.raises(TypeError, match=r"^take\(\) must get one of 'samples' and its former name 'size'; found both"):
        take(samples=1, size=2)
    with (
        pytest.warns(DeprecationWarning, match="'size'"),
        pytest.raises(TypeError, match="multiple values for argument 'samples'"),
    ):
        take(1, size=2)


@pytest.fixture
def package(monkeypatch):
    """A package with the name `new`, which was `old`."""
    module = types.ModuleType("renamed_package")
    module.__path__ = []
    module.new = object()
    module.__getattr__ = renamed_names("renamed_package", {"old": "new"}, **TWO_VERSIONS)
    monkeypatch.setitem(sys.modules, "renamed_package", module)
    return module


def test_a_renamed_name_of_a_module(package):
    result, warning = only_warning(lambda: package.old)
    assert result is package.new
    assert str(warning.message) == (
        "renamed_package.old is deprecated since samplewise 0.3 and will be removed in 0.5. Use renamed_package.new."
    )
    assert warning.filename == __file__


def test_a_renamed_name_that_is_imported(package):
    with pytest.warns(DeprecationWarning, match="^renamed_package.old is deprecated") as caught:
        from renamed_package import old
    assert old is package.new
    assert {warning.filename for warning in caught} == {__file__}


def test_an_unknown_name_of_a_module(package):
    with pytest.raises(AttributeError, match=r"^module 'renamed_package' has no attribute 'older'$"):
        package.older  # noqa: B018


# --- policy -----------------------------------------------------------------------------------------------------------


def version_numbers(version):
    return tuple(int(number) for number in version.split("."))


def overdue(text, version):
    """Versions in `removed_in="..."` that are not later than `version`."""
    stated = re.findall(r"""removed_in=["']([\d.]+)["']""", text)
    return [removal for removal in stated if version_numbers(removal) <= version_numbers(version)]


def test_no_name_outlives_the_version_that_removes_it():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    found = {str(path): overdue(path.read_text(), version) for path in (ROOT / "src").rglob("*.py")}
    assert {path: removals for path, removals in found.items() if removals} == {}


@pytest.mark.parametrize(("version", "found"), [("0.4.9", []), ("0.5", ["0.5"]), ("0.10.0", ["0.5"])])
def test_overdue_removals_are_found(version, found):
    assert overdue('@deprecated("f", since="0.3", removed_in="0.5")', version) == found
