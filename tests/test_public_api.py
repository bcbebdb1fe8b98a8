"""Public names and signatures, compared with tests/public_api.txt."""

import re

import public_api
import pytest


def recorded():
    """Module -> its section in the file."""
    sections = re.split(r"^(?=# )", public_api.FILE.read_text(), flags=re.MULTILINE)
    return {section.split("\n")[0].removeprefix("# "): section.strip() for section in sections if section}


@pytest.mark.parametrize(
    "name", [*public_api.MODULES, *(pytest.param(name, marks=pytest.mark.slow) for name in public_api.FRAMEWORKS)]
)
def test_public_signatures_are_those_recorded(name):
    assert public_api.section(name).strip() == recorded()[name], (
        f"the public names of {name} must be those in tests/public_api.txt. If the change is intended, and does not "
        "break code of users without a deprecation (CONTRIBUTING.md), run `make api` and commit the file."
    )


def test_the_file_has_each_module_once():
    assert list(recorded()) == [*public_api.MODULES, *public_api.FRAMEWORKS]


# --- text form --------------------------------------------------------------------------------------------------------


def function(a: int, *, b: "str | None" = None, c=print) -> bool: ...


class Base:
    def _hidden(self): ...


Base.__module__ = "samplewise.base"


class Kind(Base):
    def __init__(self, size: int = 3): ...

    @property
    def ratio(self) -> float: ...

    @classmethod
    def of(cls, value, /, *rest: int, **named) -> "Kind": ...

    def __len__(self) -> int: ...


Kind.__module__ = "samplewise.kind"


def test_a_function():
    assert list(public_api.entry("f", function, "m")) == [
        "f(a: int, *, b: str | None = None, c = <built-in function print>) -> bool"
    ]


def test_a_class():
    assert list(public_api.entry("Kind", Kind, "m")) == [
        "class Kind(size: int = 3): Base",
        "    __len__() -> int",
        "    of(value, *rest: int, **named) -> Kind",
        "    ratio: float",
    ]


def test_an_error():
    assert list(public_api.entry("E", type("E", (KeyError,), {}), "m")) == ["class E: KeyError"]


def test_a_long_signature_has_a_line_for_each_argument():
    words = [f"argument{k}: int = {k}" for k in range(10)]
    assert public_api.call("f", words, " -> int") == ["f(", *(f"    {word}," for word in words), ") -> int"]


def test_a_name_of_the_package_is_not_repeated():
    from samplewise import fisher

    assert list(public_api.entry("fisher", fisher, "samplewise.diagnostics")) == ["fisher: samplewise.fisher"]
