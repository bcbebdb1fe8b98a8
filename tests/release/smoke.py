"""Smoke test of an installed samplewise, run by tests/release/distributions.py in environments with different extras.

python smoke.py VERSION [EXTRA]

Works from any directory and needs torch alone. The features of installed extras must work; those of the others must
raise one line that names the extra.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import torch
from torch import nn

import samplewise as sw


def problem(seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.randn(6, 4).double(), torch.randint(3, (6,))


def losses_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


# --- the library without extras ---------------------------------------------------------------------------------------


def gradients_are_those_of_autograd() -> None:
    model, x, y = problem()
    g = sw.gradients(losses_of(model, (x, y)), model)
    for k in range(len(x)):
        expected = torch.autograd.grad(losses_of(model, (x, y))[k], list(model.parameters()))
        for name, row in zip(dict(model.named_parameters()), expected, strict=True):
            torch.testing.assert_close(g[name][k], row)


def a_step_clips_each_sample() -> None:
    model, x, y = problem()
    rows = sw.gradients(losses_of(model, (x, y)), model)
    scale = (0.5 / rows.norms()).clamp(max=1)
    expected = {n: p - 0.1 * rows.sum(scale)[n] / len(x) for n, p in model.named_parameters()}
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), losses_of, transforms=[sw.clip(0.5)])
    (update,) = step((x, y))
    assert update.samples == len(x)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected[name])


# --- features of extras -----------------------------------------------------------------------------------------------


def train() -> None:
    model, x, y = problem()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), losses_of)
    with tempfile.TemporaryDirectory() as run:
        sw.Trainer(step, run=run, device="cpu", progress=False).fit([(x, y)], epochs=2)
        assert sw.load_checkpoint(run)["model"].keys() == model.state_dict().keys()


def ledger() -> None:
    model, x, y = problem()
    data = sw.Indexed(torch.utils.data.TensorDataset(x, y))
    with tempfile.TemporaryDirectory() as run:
        step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: losses_of(m, b[:2]))
        recorder = sw.Ledger(run)
        recorder.listen(step)
        for update in step.over(torch.utils.data.DataLoader(data, batch_size=3)):
            recorder.add(update, epoch=0)
        recorder.flush()
        assert sw.read_ledger(run).num_rows == len(x)


def report() -> None:
    from samplewise.report.page import write_report

    with tempfile.TemporaryDirectory() as run:
        Path(run, "run.json").write_text('{"format_version": 2, "name": "smoke"}')
        lines = [f'{{"kind": "train", "epoch": 0, "update": {k}, "samples": {k}, "loss": {1 / k}}}' for k in (1, 2, 3)]
        Path(run, "log.jsonl").write_text("\n".join(lines) + "\n")
        assert "<svg" in write_report(Path(run)).read_text(encoding="utf-8")


def cli() -> None:
    """Run the command; without typer, the line on standard error is raised."""
    run = command("--version")
    if run.returncode:
        raise ImportError(run.stderr.strip().splitlines()[-1])  # after the warning of torch without NumPy
    assert run.stdout.startswith(f"samplewise {sw.__version__}, torch "), run.stdout
    assert command("doctor").stdout.startswith("samplewise ")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = Path(sysconfig.get_path("scripts"), "samplewise")
    return subprocess.run([str(script), *arguments], capture_output=True, text=True, timeout=600)


def privacy() -> None:
    plan = sw.Privacy(epsilon=3.0, delta=1e-5, updates=20, sample_rate=0.1, clip=1.0, secure=True)
    assert plan.epsilon <= 3.0 and plan.noise_multiplier > 0


def remote() -> None:
    sw.callbacks.Upload("s3://bucket/run")


def huggingface() -> None:
    per_sample = import_module("samplewise.integrations.huggingface").PerSample  # first: its message names the extra
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    kind = type("PerSampleTrainer", (per_sample, Trainer), {})
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=8))
    data = [{"input_ids": [k, 1, 2], "labels": k % 2} for k in range(8)]
    with tempfile.TemporaryDirectory() as output:
        quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
        args = TrainingArguments(output, max_steps=1, per_device_train_batch_size=8, **quiet)
        kind(model, args, train_dataset=data, transforms=[sw.clip(1.0)]).train()


def lightning() -> None:
    per_sample = import_module("samplewise.integrations.lightning").PerSample
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.x, self.y = problem()

        def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
            return losses_of(self.net, (self.x, self.y))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        max_steps=1, accelerator="cpu", enable_model_summary=False, callbacks=[per_sample([sw.clip(1.0)])], **quiet
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(range(1)))


def keras() -> None:
    gradients = import_module("samplewise.integrations.keras").gradients
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    _, x, y = problem()
    assert len(gradients(model, x.float(), y, loss).norms()) == len(x)


def export() -> None:
    model, x, y = problem()
    batch = x[:1].float(), y[:1]
    optimizer = torch.optim.SGD(model.float().parameters(), lr=0.1)
    step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples=1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "update.pte")
        sw.export_update(step, path, batch)
        assert sw.load_update(path).update(*batch).loss > 0


def faiss() -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = sw.attribution.ProjectedStore(Path(directory, "store"), 4)
        store.add(torch.randn(20, 4))
        index = sw.attribution.FaissIndex(store, Path(directory, "index"))
        assert index.search(store.rows(0, 3), 5)[1].shape == (3, 5) and index.recall == 1


FEATURES: dict[str, Callable[[], None]] = {
    "train": train,
    "ledger": ledger,
    "report": report,
    "cli": cli,
    "privacy": privacy,
    "huggingface": huggingface,
    "lightning": lightning,
    "keras": keras,
    "export": export,
    "faiss": faiss,
    "remote": remote,
}


def demo() -> None:
    run = command("demo")
    assert run.returncode == 0 and "wrong" in run.stdout, run.stderr


def installed(extra: str) -> bool:
    """True if the packages of an extra are installed, whichever extra they came with."""
    for requirement in requires("samplewise") or []:
        if f'extra == "{extra}"' in requirement.replace("'", '"'):
            name = "".join(c if c.isalnum() or c in "-_." else " " for c in requirement).split()[0]
            try:
                version(name)
            except PackageNotFoundError:
                return False
    return True


def check_feature(extra: str) -> str:
    """Use the feature; returns "works", or the line about the missing extra."""
    try:
        FEATURES[extra]()
    except ImportError as missing:
        line = str(missing)
        assert not installed(extra), f"{extra} is installed; found {line!r}"
        assert f"pip install 'samplewise[{extra}]'" in line and "\n" not in line, line
        return line
    return "works"


def main(expected: str, extra: str = "") -> None:
    assert sw.__version__ == expected, (sw.__version__, expected)
    assert "site-packages" in Path(sw.__file__).parts, sw.__file__
    gradients_are_those_of_autograd()
    a_step_clips_each_sample()
    assert not extra or installed(extra), f"the extra {extra} must be installed here"
    for name in FEATURES:
        result = check_feature(name)
        assert extra or result != "works", f"{name} must need its extra"
        print(f"{name:12} {result}")
    if extra == "demo":
        demo()


if __name__ == "__main__":
    main(*sys.argv[1:])
