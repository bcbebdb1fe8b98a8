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
        ["recipe.py:21: optimizer() must return a torch.optim.Optimizer; found None."],
    ),
    "metrics that are none": (
        HEALTHY + "\n\ndef metrics():\n    return []\n",
        ["recipe.py:21: metrics() must return a dict of names and functions (outputs, batch); found list."],
    ),
    "a dataset in place of a loader": (
        HEALTHY.replace("return loader, loader", "return loader.dataset"),
        [
            "recipe.py:11: data() must return a loader, or (loader, validation loader); found TensorDataset. Wrap it "
            "in a DataLoader, for example DataLoader(dataset, batch_size=64, shuffle=True)."
        ],
    ),
    "tensors in place of loaders": (
        HEALTHY.replace("return loader, loader", "return x, x"),
        [
            "recipe.py:11: data() must return a loader, or (loader, validation loader); found (Tensor, Tensor). Wrap "
            "it in a DataLoader, for example DataLoader(dataset, batch_size=64, shuffle=True)."
        ],
    ),
    "a list of loaders": (
        HEALTHY.replace("return loader, loader", "return [loader, loader]"),
        [
            "recipe.py:11: data() must return a loader, or (loader, validation loader); found list. Return a tuple of "
            "two loaders."
        ],
    ),
    "a model in place of a function": (
        HEALTHY.replace("def model():\n    return ", "model = "),
        ["recipe.py:7: model must be a function model(); found Sequential. Write def model() instead."],
    ),
    "a loader in place of a function": (
        HEALTHY.replace("def data():", "def _data():").replace("def optimizer", "data = _data()[0]\n\n\ndef optimizer"),
        ["recipe.py:17: data must be a function data(); found DataLoader. Write def data() instead."],
    ),
    "an optimizer without its argument": (
        HEALTHY.replace("def optimizer(model)", "def optimizer()"),
        [
            "recipe.py:17: optimizer must be a function optimizer(model); found optimizer(). Write def "
            "optimizer(model) instead. Rename it if it is not part of the recipe."
        ],
    ),
    "the class of an optimizer": (
        HEALTHY.replace("torch.optim.SGD(model.parameters(), lr=0.5)", "torch.optim.SGD"),
        ["recipe.py:17: optimizer() must return a torch.optim.Optimizer; found the class SGD."],
    ),
    "a loss without its arguments": (
        HEALTHY + "\n\ndef loss():\n    return nn.CrossEntropyLoss()\n",
        [
            "recipe.py:21: loss must be a function loss(model, batch), or a criterion such as nn.MSELoss(); found "
            "loss(). Write def loss(model, batch) instead. Rename it if it is not part of the recipe."
        ],
    ),
    "the class of a criterion": (
        HEALTHY + "\n\nloss = nn.CrossEntropyLoss\n",
        [
            "recipe.py:21: loss must be a function loss(model, batch), or a criterion such as nn.MSELoss(); found "
            "the class CrossEntropyLoss. Write def loss(model, batch) instead. Rename it if it is not "
            "part of the recipe."
        ],
    ),
    "transforms of images": (
        HEALTHY + "\n\ndef transforms(image):\n    return image\n",
        [
            "recipe.py:21: transforms must be a function transforms(); found transforms(image). Write def "
            "transforms() instead. Rename it if it is not part of the recipe."
        ],
    ),
    "a transform that is none": (
        HEALTHY + "\n\ndef transforms():\n    return [3]\n",
        [
            "recipe.py:21: a transform must be one of clip, weight, drop, normalize, align, guard, group, noise, or a "
            "function; found int."
        ],
    ),
    "transforms without return": (
        HEALTHY + "\n\ndef transforms():\n    pass\n",
        ["recipe.py:21: transforms() must return a list of transforms, such as [sw.clip(1.0)]; found None."],
    ),
    "a callback that is a class": (
        HEALTHY + "\n\ndef callbacks():\n    from samplewise import Ledger\n    return [Ledger]\n",
        ["recipe.py:21: a callback must be an object; found the class Ledger. Pass an instance."],
    ),
    "a callback that is no list": (
        HEALTHY + "\n\ndef callbacks():\n    from samplewise import NoiseScale\n    return NoiseScale()\n",
        ["recipe.py:21: callbacks() must return a list of callbacks, such as [sw.Ledger()]; found NoiseScale."],
    ),
    "a scheduler without return": (
        HEALTHY + "\n\ndef scheduler(optimizer):\n    pass\n",
        ["recipe.py:21: scheduler() must return a torch.optim.lr_scheduler of the optimizer; found None."],
    ),
    "a scheduler that needs a metric": (
        HEALTHY + "\n\ndef scheduler(optimizer):\n    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n",
        [
            "recipe.py:21: scheduler must step once per update without a metric; found ReduceLROnPlateau. Call its "
            "step(metric) yourself, after validation."
        ],
    ),
    "a regression without a loss": (
        HEALTHY.replace("nn.Linear(8, 3)", "nn.Linear(8, 1)").replace("x[:, :3].argmax(1)", "x[:, :1]"),
        [
            "LossesError: CrossEntropyLoss needs predictions for at least two classes; found shape (20, 1), one class, "
            "for which the loss is always zero. Use nn.BCEWithLogitsLoss() for two classes and one output, or "
            "nn.MSELoss() for regression. The recipe defines no loss, so nn.CrossEntropyLoss() is used, which is for "
            "class labels. A recipe for regression must define loss, for example loss = nn.MSELoss()."
        ],
    ),
    "a regression of several numbers without a loss": (
        HEALTHY.replace("x[:, :3].argmax(1)", "x[:, :3]"),
        [
            "LossesError: CrossEntropyLoss needs class indices, or class probabilities that sum to one; found a target "
            "of torch.float32 whose values are not probabilities. Use target.long() for class indices. The recipe "
            "defines no loss, so nn.CrossEntropyLoss() is used, which is for class labels. A recipe for regression "
            "must define loss, for example loss = nn.MSELoss()."
        ],
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
    "a loader of single samples": (
        HEALTHY.replace("batch_size=20", "batch_size=None"),
        [
            "BatchError: a loader must yield batches, whose entries have one row per sample; found entries of shape "
            "(6,) and (), which look like a single sample, and LossesError in the loss function: CrossEntropyLoss "
            "needs a target of shape (3,) for predictions of shape (3,); found (). Use squeeze, unsqueeze or view. "
            "Pass DataLoader(dataset, batch_size=64), or yield batches of one sample, (x[None], y[None]).",
        ],
    ),
    "layers that do not fit": (
        HEALTHY.replace("nn.Linear(8, 3)", "nn.Linear(9, 3)"),
        [
            "recipe.py: an error was raised while the objects of the recipe were used:",
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (20x8 and 9x3)",
        ],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_recipe_is_shown_with_its_own_lines(recipe, name):
    text, wanted = BROKEN[name]
    result = command("train", recipe(text))
    assert result.stderr.replace("addmm: ", "").splitlines() == wanted  # torch 2.15 names the operation
    assert (result.exit_code, result.stdout) == (1, "")


NEAR_MISSES = {
    "def optimiser(model):\n    return torch.optim.SGD(model.parameters(), lr=0.5)\n": ("optimiser", "optimizer"),
    "def metric():\n    return {}\n": ("metric", "metrics"),
    "def metric(outputs, batch):\n    return outputs\n": ("metric", "metrics"),
    "loss_fn = nn.CrossEntropyLoss()\n": ("loss_fn", "loss"),
    "criterion = nn.CrossEntropyLoss()\n": ("criterion", "loss"),
    "lossfn = lambda model, batch: 0\n": ("lossfn", "loss"),
    "def lr_scheduler(optimizer):\n    return None\n": ("lr_scheduler", "scheduler"),
    "if True:\n    def get_callbacks():\n        return []\n": ("get_callbacks", "callbacks"),
    "def transform():\n    return []\n": ("transform", "transforms"),
}
PLAIN = HEALTHY.split("\n\ndef optimizer")[0]


@pytest.mark.parametrize("text", NEAR_MISSES, ids=[f"{name}-{k}" for k, (name, _) in enumerate(NEAR_MISSES.values())])
def test_near_misses_of_optional_names(recipe, text):
    name, known = NEAR_MISSES[text]
    line = 18 if text.startswith("if") else 17
    result = command("train", recipe(f"{PLAIN}\n\n{text}"))
    assert one_line(result) == (
        f"recipe.py:{line}: {name} is not a name of a recipe and would be ignored; did you mean {known}? Rename it, or "
        "begin its name with an underscore if it is not part of the recipe."
    )
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("before", "after", "known"),
    [
        ("def model", "get_model", "model"),
        ("def data", "dataset", "data"),
        ("def data", "train_loader", "data"),
        ("def data", "load_data", "data"),
    ],
)
def test_near_misses_of_required_names(recipe, before, after, known):
    result = command("train", recipe(PLAIN.replace(before, f"def {after}")))
    assert f"a recipe must have a function {known}() that returns" in one_line(result)
    assert result.stderr.endswith(f"; found none. Did you mean {after}, in line {7 if known == 'model' else 11}?\n")


HELPERS = """
from torch import nn as transforms

calls = 0
losses = []
optimize = torch.no_grad()


class Model(nn.Module):
    pass


class Metric:
    pass


def transform(image):
    return image


def metric(outputs, batch):
    return outputs.argmax(1) == transform(batch[1])


def metrics():
    with optimize:
        losses.append(0)
    return {"accuracy": metric}


def _loss(model, batch):
    return model


def date():
    return "today"
"""


def test_helpers_and_imports_are_not_near_misses(recipe):
    """`transform` and `losses` are used by the recipe, `transforms` is a module, `_loss` has an underscore."""
    result = command("train", recipe(HEALTHY + HELPERS))
    assert result.exit_code == 0, result.stderr


def test_a_criterion_as_loss(recipe):
    regression = HEALTHY.replace("nn.Linear(8, 3)", "nn.Linear(8, 1)").replace("x[:, :3].argmax(1)", "x[:, :1]")
    result = command("train", recipe(f"{regression}\n\nloss = nn.MSELoss()\n"))
    assert result.exit_code == 0, result.stderr


def test_class_probabilities_train_with_the_default_loss(recipe):
    result = command("train", recipe(HEALTHY.replace("x[:, :3].argmax(1)", "x[:, :3].softmax(1)")))
    assert result.exit_code == 0, result.stderr


def test_doctor_explains_the_default_loss(recipe):
    text, _ = BROKEN["a regression without a loss"]
    result = command("doctor", recipe(text))
    assert "A recipe for regression must define loss, for example loss = nn.MSELoss().\n" in result.stdout
    assert result.exit_code == 1


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


def test_a_missing_suffix(recipe):
    assert command("train", recipe(HEALTHY).removesuffix(".py")).stderr == (
        "recipe: a recipe must be a Python file that can be read; found: No such file or directory. Did you mean "
        "recipe.py?\n"
    )


def test_a_missing_file():
    result = command("train", "none.py")
    assert one_line(result) == (
        "none.py: a recipe must be a Python file that can be read; found: No such file or directory. Check the path "
        "and its permissions."
    )
    assert result.exit_code == 2  # the argument is wrong, not the recipe


def test_modules_beside_the_recipe_can_be_imported(recipe):
    recipe("def f():\n    raise ValueError('no')\n", "neighbor_of_the_recipe.py")
    result = command("train", recipe("import neighbor_of_the_recipe as n\n\nn.f()\n"))
    lines = result.stderr.splitlines()
    assert lines[:2] == ["recipe.py:3: in <module>", "    n.f()"]
    assert lines[2].endswith("neighbor_of_the_recipe.py:2: in f")
    assert lines[-1] == "ValueError: no"
    assert result.exit_code == 1


# --- a recipe that ends the process -----------------------------------------------------------------------------------

ENDED = "A recipe must not end the process, as sys.exit does. Raise an exception, or call trainer.stop in a callback."
LOSS = "\n\ndef loss(model, batch):\n    import sys\n    sys.exit({})\n"
PLACES = {
    "at import": "import sys\nsys.exit({})\n" + HEALTHY,
    "in model": HEALTHY.replace("def model():", "def model():\n    raise SystemExit({})"),
    "in data": HEALTHY.replace("def data():", "def data():\n    exit({})"),
    "in optimizer": HEALTHY + "\n\ndef optimizer(model):\n    quit({})\n",
    "in loss": HEALTHY + LOSS,
    "in metrics": HEALTHY + "\n\ndef metrics():\n    raise SystemExit({})\n",
    "in a callback": HEALTHY
    + "\n\nclass Ends:\n    def on_update(self):\n        exit({})\n\n\ndef callbacks():\n    return [Ends()]\n",
}


CODES = [("", 1), ("3", 3), ("'not today'", 1), ("False", 1)]


@pytest.mark.parametrize(
    ("place", "code", "expected"), [*[(place, "0", 1) for place in PLACES], *[("in model", *code) for code in CODES]]
)
def test_a_recipe_that_calls_exit(recipe, place, code, expected):
    """The command does not report success for work that was not done."""
    path = recipe(PLACES[place].format(code))
    result = command("train", path, "--device", "cpu")
    assert result.exit_code == expected
    *_, shown, last = result.stderr.strip().splitlines()
    assert last == ENDED
    assert shown.startswith("SystemExit") and code.strip("'") in shown
    assert "recipe.py:" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [("doctor",), ("attribute",)], ids=str)
def test_exit_in_other_commands(recipe, arguments):
    result = command(*arguments, recipe(PLACES["in model"].format(0)))
    assert result.exit_code != 0


@pytest.mark.parametrize("place", ["at import", "in model", "in loss"])
def test_an_interrupt_is_not_an_error_of_the_recipe(recipe, place):
    text = (
        PLACES[place].replace("sys.exit({})", "raise KeyboardInterrupt").replace("SystemExit({})", "KeyboardInterrupt")
    )
    result = command("train", recipe(text), "--device", "cpu")
    assert result.exit_code != 0
    assert ENDED not in result.output and "KeyboardInterrupt" not in result.stderr.replace(
        "raise KeyboardInterrupt", ""
    )
