"""Exported files, run in Python and in C++, against uncompiled updates; and what a failed export leaves behind."""

import copy
import itertools
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samplewise as sw
from samplewise.export import executorch, simplify, verification

# executorch imports torchao, which warns about its own use of torch.
pytestmark = pytest.mark.filterwarnings("ignore")


def mlp(*sizes):
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def classifier(optimizer=None, **options):
    torch.manual_seed(0)
    model = mlp(6, 16, 3)
    optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
    options.setdefault("transforms", [sw.clip(1.0)])
    return sw.Step(model, optimizer(model.parameters()), nn.CrossEntropyLoss(), samples=1, **options)


def stream(n):
    x = torch.randn(n, 6)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def largest_difference(state, model):
    """Largest relative difference of a parameter, without the key bias of attention: its gradient is rounding alone,
    which Adam scales to a full step.
    """
    pairs = [(name, state[name], p.detach()) for name, p in model.named_parameters()]
    for k, (name, value, p) in enumerate(pairs):
        if name.endswith("in_proj_bias"):
            pairs[k] = name, *(torch.cat([bias.chunk(3)[0], bias.chunk(3)[2]]) for bias in (value, p))
    return max(float((value - p).norm() / p.norm()) for _, value, p in pairs)


@pytest.fixture(scope="module", autouse=True)
def _executorch():
    """Skip the tests of this file if executorch is made for another torch."""
    try:
        executorch.require()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _forked(monkeypatch):
    """Verify in a fork of a process that has imported torch. The file of the fixture `exported` is made before, and
    verified in a new process.
    """
    monkeypatch.setattr(verification, "subprocess", forks)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A file, its summary, and a twin of the step at the export."""
    path = tmp_path_factory.mktemp("export") / "update.pte"
    step = classifier()
    x, y = stream(5)
    step.run([(x, y)])
    twin = copy.deepcopy(step)
    return path, sw.export_update(step, path, example=(x[:1], y[:1])), twin


def test_a_thousand_updates_equal_uncompiled_ones(exported):
    path, _, twin = exported
    step = copy.deepcopy(twin)
    loaded = sw.load_update(path)
    x, y = stream(1000)
    for k in range(1000):
        result = loaded.update(x[k : k + 1], y[k : k + 1])
        (update,) = step((x[k : k + 1], y[k : k + 1]))
        assert result.loss.item() == pytest.approx(update.loss, rel=1e-4, abs=1e-5)
        assert result.norm.item() == pytest.approx(update.norms.item(), rel=1e-3, abs=1e-5)
        assert result.weight.item() == pytest.approx(update.weights.item(), rel=1e-3)
    assert largest_difference(loaded.get_state(), step.model) < 1e-5
    torch.testing.assert_close(loaded.predict(x[:1]), step.model(x[:1]).detach())


def test_the_state_is_set_and_read(exported):
    path, summary, _ = exported
    loaded = sw.load_update(path)
    x, y = stream(4)
    before = loaded.get_state()
    assert list(before) == list(summary.state)
    first = [loaded.update(x[k : k + 1], y[k : k + 1]).loss.item() for k in range(4)]
    loaded.set_state(before)
    again = [loaded.update(x[k : k + 1], y[k : k + 1]).loss.item() for k in range(4)]
    assert first == again
    with pytest.raises(sw.ExportError, match=r"state must have the names of get_state\(\); found a difference in"):
        loaded.set_state({"0.weight": torch.zeros(16, 6)})
    with pytest.raises(sw.ExportError, match=r"0.bias must be torch.float32 of shape \(16,\); found torch.float32 of"):
        loaded.set_state({**before, "0.bias": torch.zeros(3)})


def test_the_learning_rate_is_an_input(exported):
    path, _, twin = exported
    step = copy.deepcopy(twin)
    loaded = sw.load_update(path)
    x, y = stream(20)
    for k in range(20):
        step.optimizer.param_groups[0]["lr"] = 0.01 * k
        step((x[k : k + 1], y[k : k + 1]))
        loaded.update(x[k : k + 1], y[k : k + 1], lr=0.01 * k)
    assert largest_difference(loaded.get_state(), step.model) < 1e-5


def test_a_sample_that_is_not_finite_changes_nothing(exported):
    path, _, _ = exported
    loaded = sw.load_update(path)
    x, y = stream(1)
    loaded.update(x, y)
    before = loaded.get_state()
    assert loaded.update(x * torch.nan, y).loss.isnan()
    for name, tensor in loaded.get_state().items():
        assert torch.equal(tensor, before[name])


def test_the_summary_states_what_a_device_needs(exported, capsys):
    path, summary, twin = exported
    size = sum(p.numel() for p in twin.model.parameters())
    assert summary.bytes == path.stat().st_size
    assert summary.constant == 0
    assert summary.mutable >= 2 * 4 * size  # parameters and momentum, float32
    assert summary.scratch > 0
    assert summary.methods == ["update", "predict", "get_state", "set_state"]
    assert summary.inputs == {"x": (1, 6), "y": (1,), "lr": ()}
    assert "aten::mm.out" in summary.operators
    assert summary.deviation.updates == 200
    assert summary.deviation.parameters < 1e-5
    assert f"{summary.bytes:,} bytes" in repr(summary)


def test_an_export_changes_neither_model_nor_optimizer(exported, tmp_path, capsys):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)  # its parameters are "weight" and "bias"; an update also has an output "weight"
    step = sw.Step(model, torch.optim.AdamW(model.parameters(), lr=0.01), nn.CrossEntropyLoss(), samples=1)
    x, y = stream(1)
    before = copy.deepcopy((step.model.state_dict(), step.optimizer.state_dict(), step.counters))
    random = torch.get_rng_state()
    grads = [p.grad for p in step.model.parameters()]
    result = sw.export_update(step, tmp_path / "update.pte", (x, y), predict=False)
    assert repr(result) in capsys.readouterr().out
    assert list(result.state)[:2] == ["weight", "bias"]
    assert 0 < result.deviation.parameters < 1e-5
    after = step.model.state_dict(), step.optimizer.state_dict(), step.counters
    assert str(after) == str(before)
    assert torch.equal(torch.get_rng_state(), random)
    assert [p.grad for p in step.model.parameters()] == grads
    assert sorted(file.name for file in tmp_path.iterdir()) == ["update.pte"]
    with pytest.raises(sw.ExportError, match="exported with predict=False"):
        sw.load_update(tmp_path / "update.pte").predict(x)


@pytest.mark.slow  # the test above has such names, too
def test_parameters_may_have_the_names_of_outputs(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)  # its parameters are "weight" and "bias"; an update also has an output "weight"
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), samples=1)
    x, y = stream(1)
    summary = sw.export_update(step, tmp_path / "update.pte", (x, y))
    assert list(summary.state) == ["weight", "bias"]
    assert 0 < summary.deviation.parameters < 1e-5


@pytest.fixture
def another_file(exported, monkeypatch):
    """Write a copy of the file of `exported` in place of a new one: conversion takes seconds."""
    path, summary, _ = exported

    def write(program, to):
        shutil.copy(path, to)
        return SimpleNamespace(constant=0, mutable=0, scratch=0), summary.operators

    monkeypatch.setattr(executorch, "write", write)


@pytest.mark.usefixtures("another_file")
@pytest.mark.parametrize(
    ("transforms", "factor", "message"),
    [
        ([sw.clip(0.1)], 1.0, "must equal uncompiled ones; found that weight differs by"),
        ([], torch.nan, "cannot be verified: .* non-finite loss or gradient after 0"),
    ],
    ids=["differs", "not finite"],
)
def test_a_file_that_cannot_be_verified_is_not_written(exported, tmp_path, transforms, factor, message):
    path = tmp_path / "update.pte"
    path.write_bytes(b"the file of before")
    step = copy.deepcopy(exported[2])
    step.transforms = transforms
    x, y = stream(1)
    with pytest.raises(sw.ExportError, match=message):
        sw.export_update(step, path, (factor * x, y))
    assert path.read_bytes() == b"the file of before"
    assert [file.name for file in tmp_path.iterdir()] == ["update.pte"]


@pytest.mark.usefixtures("another_file")
def test_a_file_of_another_state_is_not_written(tmp_path):
    with pytest.raises(sw.ExportError, match=r"must begin with the state of the step; found another 0\.weight"):
        sw.export_update(classifier(), tmp_path / "update.pte", stream(1))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_file_that_differs_is_not_written(tmp_path, monkeypatch):
    def wrong(graph, *, scaled_sums):
        simplify.simplify(graph, scaled_sums=scaled_sums)
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.tanh.default
        graph.recompile()

    monkeypatch.setattr(executorch, "simplify", wrong)
    path = tmp_path / "update.pte"
    path.write_bytes(b"the file of before")
    with pytest.raises(sw.ExportError, match="must equal uncompiled ones; found that loss differs by"):
        sw.export_update(classifier(), path, stream(1))
    assert path.read_bytes() == b"the file of before"
    assert [file.name for file in tmp_path.iterdir()] == ["update.pte"]


@pytest.mark.slow
def test_a_small_error_of_the_optimizer_is_found(tmp_path, monkeypatch):
    """A momentum of 0.9001 instead of 0.9."""
    step = classifier()
    trace = executorch.simplify

    def wrong(graph, *, scaled_sums):
        for name, buffer in graph.named_buffers():
            if buffer.numel() == 1 and float(buffer) == pytest.approx(0.9):
                setattr(graph, name, buffer + 1e-4)
        trace(graph, scaled_sums=scaled_sums)
        for name, buffer in graph.named_buffers():
            if buffer.numel() == 1 and float(buffer) == pytest.approx(0.9):
                setattr(graph, name, buffer + 1e-4)

    monkeypatch.setattr(executorch, "simplify", wrong)
    with pytest.raises(sw.ExportError, match="must equal uncompiled ones; found that"):
        sw.export_update(step, tmp_path / "update.pte", stream(1))
    assert not list(tmp_path.iterdir())


# --- refusals ---------------------------------------------------------------------------------------------------------


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


class Mask(Branch):
    def forward(self, x):
        return self.layer(x) + x[x > 0].sum()


class Erfinv(Branch):
    def forward(self, x):
        return torch.special.erfinv(self.layer(x).tanh())


LINEAR = nn.Linear(6, 3)
X, Y = torch.randn(1, 6), torch.tensor([1])
REFUSALS = {
    "dropout": (dict(model=nn.Sequential(LINEAR, nn.Dropout(0.5))), "the model draws random numbers, as in dropout"),
    "batchnorm": (
        dict(model=nn.Sequential(nn.Unflatten(1, (1, 6)), nn.BatchNorm1d(1), nn.Flatten(), LINEAR)),
        "the model changes its buffers in the forward pass, as BatchNorm does in training mode",
    ),
    "branch": (dict(model=Branch()), "reads the value of a tensor"),
    "shape": (dict(model=Mask()), "a shape or a branch of the model or the loss function depends on the values"),
    "kernel": (dict(model=Erfinv()), "ExecuTorch has no kernel for aten::erfinv.out; replace the layer"),
    "window": (dict(samples=None), "has a fixed number of samples; found samples=None. Write samples=1"),
    "optimizer": (
        dict(optimizer=lambda p: torch.optim.Adagrad(p)),
        "the optimizer must be one of torch.optim's SGD, Adam, AdamW, RMSprop, or sw.sgd",
    ),
    "noise": (dict(transforms=[sw.clip(1.0), sw.noise(1.0)]), "with transforms that add noise"),
    "groups": (
        dict(transforms=[sw.group(lambda stats: stats.batch[1]), sw.clip(1.0)]),
        "with transforms that group samples",
    ),
    "precision": (dict(precision="bf16-mixed"), "with precision='bf16-mixed'"),
    "privacy": (
        dict(
            samples=None,
            privacy=sw.Privacy(
                noise_multiplier=1.0, delta=1e-5, updates=5, sample_rate=0.1, clip=1.0, dataset_size=100
            ),
        ),
        "with privacy=: the noise of a private update needs a secure generator",
    ),
    "dampening": (
        dict(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5)),
        "dampening=0.5 differs from the later ones; found no update yet. Make one update before the export",
    ),
    "float64": (dict(model=nn.Linear(6, 3).double(), example=(X.double(), Y)), "exported updates compute in float32"),
    "rows": (dict(example=(X.expand(2, 6), Y.expand(2))), r"found 2. Write example=\(x\[:1\], y\[:1\]\)"),
    "example": (dict(example=(torch.randn(1, 7), Y)), "example must be a batch that the loss function accepts"),
    "no tensors": (dict(example=3), "example must be a batch with tensors; found int"),
    "predict": (
        dict(example={"x": X, "y": Y}, loss_fn=lambda m, b: F.cross_entropy(m(b["x"]), b["y"], reduction="none")),
        r"predict=True calls model\(x\) for batches \(x, ...\); found a batch of another structure",
    ),
    "not finite": (dict(example=(X * torch.nan, Y)), "cannot be verified: .* non-finite loss or gradient after 0"),
}


# test_a_file_that_cannot_be_verified_is_not_written: the last one without converting a program.
*QUICK, LAST = REFUSALS


@pytest.mark.parametrize("name", [*QUICK, pytest.param(LAST, marks=pytest.mark.slow)])
def test_refusals(name, tmp_path):
    case, message = REFUSALS[name]
    case = dict(case)
    model = copy.deepcopy(case.pop("model", LINEAR))
    optimizer = case.pop("optimizer", lambda p: torch.optim.SGD(p, lr=0.1))(model.parameters())
    example = case.pop("example", (X, Y))
    step = sw.Step(model, optimizer, case.pop("loss_fn", nn.CrossEntropyLoss()), **{"samples": 1, **case})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(sw.ExportError, match=message):
        sw.export_update(step, tmp_path / "update.pte", example)
    assert not list(tmp_path.iterdir())
    assert str(model.state_dict()) == str(before)


def test_refusals_of_paths_and_types(tmp_path):
    with pytest.raises(ValueError, match=r"path must end in .pte \(ExecuTorch\) or .pt2 .* found 'u.onnx'"):
        sw.export_update(classifier(), "u.onnx", stream(1))
    with pytest.raises(FileNotFoundError, match="path must be in a directory that exists"):
        sw.export_update(classifier(), tmp_path / "none" / "u.pte", stream(1))
    with pytest.raises(TypeError, match=r"step must be a sw\.Step; found Linear"):
        sw.export_update(LINEAR, tmp_path / "u.pte", stream(1))
    with pytest.raises(TypeError, match="predict must be True, False or a function"):
        sw.export_update(classifier(), tmp_path / "u.pte", stream(1), predict="yes")
    with pytest.raises(FileNotFoundError, match=r"must be a file that sw\.export_update has written"):
        sw.load_update(tmp_path / "u.pte")


@pytest.mark.parametrize("module", ["executorch.exir", "executorch.runtime"])
def test_a_missing_executorch_or_one_for_another_torch_is_one_line(module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    command, version = r"pip install 'samplewise\[export\]'", re.escape(torch.__version__)
    with pytest.raises(ImportError, match=f"needs executorch: {command}, .* torch {version} .found: .*{module}"):
        sw.export_update(classifier(), tmp_path / "u.pte", stream(1))


# --- more formats, models and optimizers ------------------------------------------------------------------------------


def check_file(step, path, example, batches):
    sw.export_update(step, path, example)
    loaded = sw.load_update(path)
    for batch in batches:
        loaded.update(*batch)
        step(batch)
    assert largest_difference(loaded.get_state(), step.model) < 1e-5
    torch.testing.assert_close(loaded.predict(example[0]), step.model.eval()(example[0]).detach(), rtol=1e-4, atol=1e-5)
    return loaded


@pytest.mark.slow
def test_aotinductor_package(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = sw.Step(model, optimizer, nn.MSELoss(), samples=1, transforms=[sw.clip(0.5)])
    batches = [(torch.randn(1, 6), torch.randn(1, 2)) for _ in range(300)]
    loaded = check_file(step, tmp_path / "update.pt2", batches[0], batches)
    state = loaded.get_state()
    loaded.set_state({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert loaded.predict(batches[0][0]).abs().max() == 0


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


ZOO = {
    "linear": (lambda: nn.Linear(10, 4), lambda: torch.randn(1, 10)),
    "mlp": (lambda: mlp(10, 32, 32, 4), lambda: torch.randn(1, 10)),
    "cnn": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)),
            *(nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 4)),
        ),
        lambda: torch.randn(1, 1, 8, 8),
    ),
    "separable": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 4, 1), nn.ReLU()),
            *(nn.Flatten(2), nn.Conv1d(4, 6, 5, 2), nn.SiLU(), nn.Flatten(), nn.Linear(96, 4)),
        ),
        lambda: torch.randn(1, 1, 8, 8),
    ),
    "frozen batchnorm": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 8, 3), sw.freeze_batchnorm(nn.BatchNorm2d(8)), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten()),
            nn.Linear(72, 4),
        ),
        lambda: torch.randn(1, 1, 8, 8),
    ),
    "transformer": (Attention, lambda: torch.randint(0, 20, (1, 12))),
    "gru": (Recurrent, lambda: torch.randn(1, 6, 3)),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ZOO)
def test_executorch_programs_of_models(name, optimizer, tmp_path):
    torch.manual_seed(0)
    make, x = ZOO[name]
    model = make()
    loss_fn = nn.CrossEntropyLoss()
    step = sw.Step(model, OPTIMIZERS[optimizer](model.parameters()), loss_fn, samples=1, transforms=[sw.clip(1.0)])
    batches = [(x(), torch.randint(0, 4, (1,))) for _ in range(1000)]
    check_file(step, tmp_path / "update.pte", batches[0], batches)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_aotinductor_packages_of_models(name, tmp_path):
    torch.manual_seed(0)
    make, x = ZOO[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples=1, transforms=[sw.clip(1.0)])
    batches = [(x(), torch.randint(0, 4, (1,))) for _ in range(1000)]
    check_file(step, tmp_path / "update.pt2", batches[0], batches)


# --- programs in C++ --------------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs" / "export.md"


def cpp_block(word):
    """The C++ program of docs/export.md that contains `word`."""
    (block,) = (b for b in re.findall(r"```cpp\n(.*?)```", DOCS.read_text(), re.DOTALL) if word in b)
    return block


def run_program(directory, block, flags):
    """Compile and run a program beside the exported file; return the losses that it prints."""
    (directory / "main.cpp").write_text(block)
    subprocess.run(["g++", "-std=c++17", "-O1", "main.cpp", "-o", "main", *flags], cwd=directory, check=True)
    output = subprocess.run(["./main"], cwd=directory, check=True, capture_output=True, text=True).stdout
    return [float(line) for line in re.findall(r"loss (\S+)", output)]


def exported_for_cpp(path):
    """A step after its export, and losses of 100 further updates of the sample in docs/export.md."""
    torch.manual_seed(0)
    model = mlp(4, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples=1, transforms=[sw.clip(1.0)])
    sample = torch.tensor([[0.5, -1.0, 0.25, 2.0]]), torch.tensor([1])
    sw.export_update(step, path, sample)
    return [update.loss for _ in range(100) for update in step(sample)]


@pytest.mark.slow
def test_the_executorch_program_of_the_documentation(tmp_path):
    losses = exported_for_cpp(tmp_path / "update.pte")
    package = Path(sysconfig.get_path("purelib")) / "executorch"
    flags = [
        f"-I{package}/include",
        f"-I{package}/include/executorch/runtime/core/portable_type/c10",
        "-DC10_USING_CUSTOM_GENERATED_MACROS",
        *(f"-L{package}/lib", f"-Wl,-rpath,{package}/lib", "-lexecutorch"),
        *("-Wl,--no-as-needed", "-lexecutorch_kernels_optimized", "-lexecutorch_threadpool"),
    ]
    assert run_program(tmp_path, cpp_block("executorch"), flags) == pytest.approx(losses, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_the_libtorch_program_of_the_documentation(tmp_path):
    losses = exported_for_cpp(tmp_path / "update.pt2")
    root = Path(torch.__file__).parent
    flags = [
        *(f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib"),
        *("-ltorch", "-ltorch_cpu", "-lc10"),
    ]
    assert run_program(tmp_path, cpp_block("AOTIModelPackageLoader"), flags) == pytest.approx(
        losses, rel=1e-4, abs=1e-5
    )
