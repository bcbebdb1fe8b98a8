"""samplewise doctor."""

import re

import pytest
from notices import wait_for_notices
from recipes import HEALTHY, WITH_BATCH_NORM, command, process

from samplewise.check import Check, ParameterCheck
from samplewise.cli import recipe_check
from samplewise.core import text as progress
from samplewise.diagnostics import profile
from samplewise.step.compiled import CannotCompile, program_cache

GRAPHS = """
class Graph:
    def __init__(self):
        self.x, self.y = torch.randn(4, 6), torch.randint(3, (4,))


def data():
    return [Graph()]


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch.x.to(model[0].weight)), batch.y, reduction="none")
"""


def _busy(*_):
    raise CannotCompile("the compiler is on holiday")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Without compiling, which takes seconds: `test_as_a_process` does it."""
    monkeypatch.setattr(profile, "MAX_ROUNDS", 3)
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    monkeypatch.setattr(program_cache, "trace_backward", _busy)


READY = "No problems found: the recipe is ready for training."


def test_a_healthy_recipe(recipe):
    result = command("doctor", recipe(HEALTHY), "--verbose")
    output = result.stdout
    assert result.exit_code == 0
    assert result.stderr == ""
    assert output.startswith(f"{READY}\n\nengine vs. one backward pass per sample, float64, 16 samples: ok\n")
    assert "Gradient plan\n16 samples, strategy " in output
    assert "Time and memory per update\n16 samples of a batch of 20; MB: tensors saved for backward by" in output
    assert "at a time     ms, plain  MB, plain  ms, with sw.clip(1.0)  MB, with sw.clip(1.0)\n" in output
    assert "\nTime per update with compile=True\nupdate of one sample: " in output
    for name in ("one sample", "16 samples"):
        assert re.search(rf"^update of {name}: [\d.]+ µs eager; not compiled: the compiler is on holi", output, re.M)
    assert "- compile=True would change nothing: updates of this recipe cannot be compiled.\n" in output
    assert "- An update that clips each sample takes " in output
    assert re.search(r"^- Microbatches of 8 take \S+ times as long as all samples at once and 50% of the", output, re.M)
    assert re.search(r"^- Each sample adds about \S+ MB, which makes \S+ MB for the batch of 20\.$", output, re.M)


def test_the_verdict_comes_first_and_tables_need_verbose(recipe):
    verdict, empty, title, *advice = command("doctor", recipe(HEALTHY)).stdout.splitlines()
    assert (verdict, empty, title) == (READY, "", "Advice")
    assert all(line.startswith("- ") for line in advice)
    assert "- compile=True would change nothing: updates of this recipe cannot be compiled." in advice


def test_verbose_needs_a_recipe():
    result = command("doctor", "--verbose")
    assert result.stderr == "samplewise: Invalid value for --verbose: must be used with a recipe; found none.\n"
    assert result.exit_code == 2


ALL = """
import samplewise as sw


def transforms():
    return [sw.clip(0.5), sw.weight(lambda losses: losses)]


def {name}:
    return {returned}
"""


def test_transforms_of_the_recipe(recipe):
    result = command(
        "doctor", recipe(HEALTHY + ALL.format(name="callbacks()", returned="[sw.NoiseScale()]")), "--verbose"
    )
    assert result.exit_code == 0
    assert "at a time     ms, plain  MB, plain  ms, with transforms()  MB, with transforms()\n" in result.stdout
    assert re.search(r"^- An update with transforms\(\) takes \S+ times as long as a plain one\.$", result.stdout, re.M)


def test_table_of_times(recipe):
    """Stages of norms and a weighted sum, after the forward pass."""
    output = command("doctor", recipe(HEALTHY), "--verbose").stdout
    table = output.split("\n\nWhere the time goes\n")[1].split("\n\n")[0]
    assert re.match(
        r"time of norms and a weighted sum; a plain backward pass takes \d+\.\d+ ms\nstage +ms +share ", table
    )
    stages = [re.match(r"(.+?)  +\d+\.\d{3} +\d+% +\d+\.\d\d", line)[1] for line in table.splitlines()[3:]]
    assert stages[:3] == ["forward pass", "reading the graph", "search for hooks"]
    assert stages[-2:] == ["weighted sums", "in all"]
    assert "rules and norms: Addmm" in stages


PRODUCT = """

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x.t(), weight)  # its first dimension is not that of the samples
        return x @ weight.t()

    @staticmethod
    def backward(ctx, g):
        columns, weight = ctx.saved_tensors
        return g @ weight, (columns @ g).t()


class Layer(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight)
"""


def test_slow_paths_are_named_once(recipe):
    text = HEALTHY.replace("nn.Linear(6, 8)", "Layer(6, 8, bias=False)") + PRODUCT
    result = command("doctor", recipe(text), "--verbose")
    assert re.search(
        r"^rules and norms: Function 'Product' .* no rule, one call of its backward per s", result.stdout, re.M
    )
    warning = (
        "warned: per-sample gradients of this model are computed in a slow way in each step: Function 'Product' has "
    )
    assert result.stdout.count(warning) == 1
    assert result.stdout.count("in a slow way") == 1
    assert result.stdout.startswith("Not ready for training: 1 problem.\n- warned: per-sample gradients of this model")
    assert result.exit_code == 1


@pytest.mark.parametrize("name", ["callbacks()", "metrics()", "scheduler(optimizer)"])
def test_functions_that_only_training_needs(recipe, name):
    result = command("doctor", recipe(HEALTHY + ALL.format(name=name, returned="3")))
    assert result.stderr.startswith("recipe.py:27: ")
    assert (result.exit_code, result.stdout) == (1, "")


def test_metrics_are_computed(recipe):
    """A metric that compares with the batch instead of the target would end a training run after its first epoch."""
    text = HEALTHY + "\n\ndef metrics():\n    return {'right': lambda outputs, batch: outputs.argmax(1) == batch}\n"
    result = command("doctor", recipe(text))
    assert "TypeError: metric 'right' must return one number per sample in a tensor, or one number" in result.stderr
    assert result.exit_code == 1
    assert command("doctor", recipe(text.replace("batch:", "y:").replace("== batch", "== y"))).exit_code == 0


def test_memory_of_every_microbatch(recipe):
    """Per sample: 6 inputs, 8 results of tanh, 3 log-probabilities, and an integer target."""
    output = command("doctor", recipe(HEALTHY), "--verbose").stdout
    each = 4 * (6 + 8 + 3) + 8
    for name, samples in {"all at once": 16, "microbatch 8": 8, "microbatch 4": 4}.items():
        plain, clipped = re.search(rf"^{name} +\S+ +(\S+) +\S+ +(\S+)$", output, re.M).groups()
        assert plain == clipped
        assert float(plain) == pytest.approx(samples * each / 1e6, rel=0.1)  # and a few scalars


def test_memory_that_cannot_be_counted(recipe):
    """torch.func does not let saved tensors be watched; time is measured all the same."""
    loss = """

def loss(model, batch):
    slope = torch.func.vmap(torch.func.grad(lambda x: model(x).square().sum()))(batch[0])
    return slope.square().sum(1)
"""
    result = command("doctor", recipe(HEALTHY + loss), "--verbose")
    assert re.search(r"^all at once +[\d.]+ +\? +[\d.]+ +\?$", result.stdout, re.M)
    assert re.search(r"^- Microbatches of 8 take \S+ times as long as all samples at once[:.]", result.stdout, re.M)
    assert "Each sample adds" not in result.stdout


def test_batch_norm_in_training_mode(recipe, monkeypatch):
    """A refused recipe is not compiled and timed."""
    monkeypatch.setattr(profile, "update_costs", None)
    monkeypatch.setattr(profile, "measure_compile_gain", None)
    result = command("doctor", recipe(WITH_BATCH_NORM))
    verdict, problem, *rest = result.stdout.splitlines()
    assert result.exit_code == 1
    assert verdict == "Not ready for training: 1 problem."
    assert problem.startswith(
        "- refused: the loss of a sample must not depend on other samples; found BatchNorm in tra"
    )
    assert rest == [
        "",
        "Advice",
        "- BatchNorm in training mode mixes samples (module 1), so per-sample gradients are not defined. Plain "
        "training works unchanged, also with --ledger losses. For --clip, --ledger with norms and transforms(), return "
        "sw.freeze_batchnorm(model) from model(), or use GroupNorm.",
        "- Fix the problems first: time and memory were not measured.",
    ]
    details = command("doctor", recipe(WITH_BATCH_NORM), "--verbose").stdout
    assert "\nengine vs. one backward pass per sample, float64, 16 samples: NOT OK\nrefused: the loss of a" in details


def test_warnings_are_shown_and_counted(recipe):
    result = command("doctor", recipe(HEALTHY.replace("nn.Linear(8, 3))", "nn.Linear(8, 3)).eval()")))
    assert result.exit_code == 1
    assert result.stdout.startswith(
        "Not ready for training: 1 problem.\n- warned, plain: modules are in eval mode while training: the model."
    )
    assert result.stdout.count("modules are in eval mode") == 1
    assert "- An update that clips each sample takes " in result.stdout


def test_losses_that_are_no_losses(recipe):
    result = command("doctor", recipe(HEALTHY + "\n\ndef loss(model, batch):\n    return model(batch[0]).sum()\n"))
    assert result.exit_code == 1
    assert re.match(r"Not ready for training: \d problems?\.\n- refused: ", result.stdout)
    assert result.stdout.endswith("\nAdvice\n- Fix the problems first: time and memory were not measured.\n")


def test_wrong_gradients(recipe, monkeypatch):
    line = ParameterCheck("0.weight", (8, 6), 1.0, {"rows": 0.5})
    monkeypatch.setattr(recipe_check, "check", lambda *_: Check(16, [line]))
    result = command("doctor", recipe(HEALTHY))
    assert result.stdout.startswith(
        "Not ready for training: 1 problem.\n- wrong: do not rely on per-sample gradients of this model. engine vs. "
    )
    assert "0.weight" in result.stdout and "WRONG" in result.stdout
    assert "time and memory were not measured" in result.stdout
    assert result.exit_code == 1


def test_an_empty_loader(recipe):
    result = command("doctor", recipe(HEALTHY.replace("return loader, loader", "return []")))
    assert result.stderr == "recipe.py: the loader of data() must yield at least one batch; found none.\n"
    assert result.exit_code == 1


def test_notice_for_a_slow_operation(recipe, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    waiting = "def data():\n    from notices import wait_for_notices; wait_for_notices()\n"
    result = command("doctor", recipe(HEALTHY.replace("def data():\n", waiting)))
    assert "... building the model and fetching a batch\n" in result.stderr
    assert result.exit_code == 0


@pytest.mark.slow
def test_as_a_process(recipe):
    result = process("doctor", recipe(HEALTHY), "--verbose")
    assert result.returncode == 0
    for name in ("one sample", "16 samples"):
        assert re.search(rf"^update of {name}: [\d.]+ µs eager, [\d.]+ µs compiled$", result.stdout, re.M)
    assert re.search(r"^- compile=True .*would .*an update of one sample", result.stdout, re.M)
    assert "No problems found" in result.stdout


def test_notice_while_compiling(recipe, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(program_cache, "trace_backward", lambda *_: wait_for_notices() or _busy())
    result = command("doctor", recipe(HEALTHY))
    assert result.stderr.splitlines().count("... compiling and measuring") == 1


def test_a_batch_that_cannot_be_sliced_has_no_updates_of_one_sample(recipe):
    result = command("doctor", recipe(HEALTHY.split("def data")[0] + GRAPHS), "--verbose")
    assert "a batch that cannot be sliced; MB" in result.stdout
    assert "one sample:" not in result.stdout
    assert "update of the batch: " in result.stdout


TRANSFORMERS = """
import torch
from torch.utils.data import DataLoader
from transformers import {config}, {model}


def model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    return {model}({config}(num_labels=3, pad_token_id=0, **sizes, {options}))


def data():
    torch.manual_seed(1)
    samples = [{{"input_ids": torch.randint(1, 20, (5,))}} for _ in range(6)]
    for k, sample in enumerate(samples):
        sample["labels"] = {labels}
    return DataLoader(samples, batch_size=6)
"""
MODELS = {
    "classes": ("BertConfig", "BertForSequenceClassification", "", "k % 3"),
    "tokens": ("LlamaConfig", "LlamaForCausalLM", "", "sample['input_ids'].where(torch.arange(5) < 2 + k % 3, -100)"),
    "labels": (
        "BertConfig",
        "BertForSequenceClassification",
        "problem_type='multi_label_classification'",
        "torch.rand(3).round()",
    ),
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_transformers_computes_its_loss_itself(kind, recipe):
    config, model, options, labels = MODELS[kind]
    dropout = "hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, " if config == "BertConfig" else ""
    text = TRANSFORMERS.format(config=config, model=model, options=dropout + options, labels=labels)
    result = command("doctor", recipe(text), "--verbose")
    assert f"{READY}\n\nengine vs. one backward pass per sample, float64, 6 samples: ok\n" in result.stdout
    assert "3 samples recomputed alone have the same losses as in the batch" in result.stdout
    assert result.exit_code == 0


@pytest.mark.slow
def test_a_model_of_transformers_with_another_loss_or_without_labels(recipe):
    config, model, options, labels = MODELS["classes"]
    text = TRANSFORMERS.format(config=config, model=model, options=options, labels=labels)
    result = command("doctor", recipe(text.replace('sample["labels"]', 'sample["position_ids"]')))
    assert "a model of transformers needs batches that are dicts with a tensor 'labels'; found keys" in result.stdout
    doubled = "class Doubled(BertForSequenceClassification):\n    def forward(self, **inputs):\n        out = super()"
    doubled += ".forward(**inputs)\n        out.loss = 2 * out.loss\n        return out\n\n\ndef model"
    text = text.replace("return BertForSequenceClassification", "return Doubled").replace("def model", doubled)
    result = command("doctor", recipe(text))
    assert "the loss of Doubled must be a cross-entropy of logits and labels" in result.stdout
    assert "nn.CrossEntropyLoss() is used" not in result.stdout
    assert result.exit_code == 1
