"""Errors in recipes are shown with the lines of the recipe and without a traceback of samplewise."""

import pytest
from recipes import HEALTHY, command, one_line, process

BROKEN = {
    "a syntax error": ("def model(:\n    pass\n", ["recipe.py:1", "    def model(:", "SyntaxError: invalid syntax"]),
    "a failing import": (
        "import torch\nimport no_such_thing\n",
        [
            "recipe.py:2: in <module>",
            "    import no_such_thing",
            "ModuleNotFoundError: No module named 'no_such_thing'",
        ],
    ),
    "no model": (
        "def data():\n    return []\n",
        ["recipe.py: a recipe must have a function model() that returns the model; found none."],
    ),
    "no data": (
        "def model():\n    return 1\n",
        [
            "recipe.py: a recipe must have a function data() that returns a loader, or (loader, validation loader); "
            "found none."
        ],
    ),
    "a model that is none": (
        "def data():\n    return []\n\ndef model():\n    return 1\n",
        ["recipe.py:4: model() must return a torch.nn.Module; found int."],
    ),
    "data that are none": (
        HEALTHY.replace("return loader, loader", "return 3"),
        ["recipe.py:11: data() must return a loader, or (loader, validation loader); found int."],
    ),
    "too many loaders": (
        HEALTHY.replace("return loader, loader", "return loader, loader, loader"),
        ["recipe.py:11: data() must return a loader, or (loader, validation loader); found a tuple of 3."],
    ),
    "an optimizer that is none": (
        HEALTHY + "\n\ndef optimizer(model):\n    pass\n",
        ["recipe.py:21: optimizer() must return a torch.optim.Optimizer; found NoneType."],
    ),
    "metrics that are none": (
        HEALTHY + "\n\ndef metrics():\n    return []\n",
        ["recipe.py:21: metrics() must return a dict of names and functions (outputs, batch); found list."],
    ),
    "a failing function": (
        HEALTHY.replace("    x = ", "    1 / 0\n    x = "),
        ["recipe.py:12: in data", "    1 / 0", "ZeroDivisionError: division by zero"],
    ),
    "a failing loss": (
        HEALTHY + "\n\ndef loss(model, batch):\n    return model(batch)\n",
        [
            "recipe.py:22: in loss",
            "    return model(batch)",
            "TypeError: linear(): argument 'input' (position 1) must be Tensor, not list",
        ],
    ),
    "layers that do not fit": (
        HEALTHY.replace("nn.Linear(8, 3)", "nn.Linear(9, 3)"),
        [
            "recipe.py: error while using the objects that it returns:",
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (20x8 and 9x3)",
        ],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_recipe_is_shown_with_its_own_lines(recipe, name):
    text, wanted = BROKEN[name]
    result = command("train", recipe(text))
    assert result.stderr.splitlines() == wanted
    assert (result.exit_code, result.stdout) == (1, "")


def test_doctor_shows_the_lines_of_a_broken_recipe(recipe):
    text, wanted = BROKEN["a failing loss"]
    result = command("doctor", recipe(text))
    assert result.stderr.splitlines() == wanted
    assert result.exit_code == 1


FAILING_IN_A_WORKER = """
import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return torch.zeros(6), label(i)


def label(i):
    if i == 13:
        raise ValueError("no label\\nfor 13")
    return 0


def model():
    return torch.nn.Linear(6, 3)


def data():
    return DataLoader(Samples(), batch_size=5, num_workers=1)
"""


def test_errors_in_a_loader_worker(recipe):
    result = process("train", recipe(FAILING_IN_A_WORKER))
    assert result.stderr.splitlines() == [
        "recipe.py:11: in __getitem__",
        "    return torch.zeros(6), label(i)",
        "recipe.py:16: in label",
        '    raise ValueError("no label\\nfor 13")',
        "ValueError: no label",
        "for 13",
    ]
    assert result.returncode == 1


def test_errors_of_samplewise_are_shown_without_location(recipe):
    text = HEALTHY + "\n\ndef loss(model, batch):\n    return model(batch[0]).sum()\n"
    result = command("train", recipe(text), "--clip", 1)
    assert result.exit_code == 1
    assert one_line(result).startswith("LossesError: ")


def test_a_missing_file():
    result = command("train", "none.py")
    assert one_line(result) == (
        "none.py: a recipe must be a Python file that can be read; found: No such file or directory. Check the path "
        "and its permissions."
    )
    assert result.exit_code == 2  # the argument is wrong, not the recipe


def test_modules_beside_the_recipe_can_be_imported(recipe):
    recipe("def f():\n    raise ValueError('no')\n", "neighbour_of_the_recipe.py")
    result = command("train", recipe("import neighbour_of_the_recipe as n\n\nn.f()\n"))
    lines = result.stderr.splitlines()
    assert lines[:2] == ["recipe.py:3: in <module>", "    n.f()"]
    assert lines[2].endswith("neighbour_of_the_recipe.py:2: in f")
    assert lines[-1] == "ValueError: no"
    assert result.exit_code == 1
