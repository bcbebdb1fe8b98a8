"""The Lightning callback against plain Lightning, and against one sample at a time."""

import builtins
import importlib
import logging
import sys
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning_module import Module, fitted, loader, trainer
from small_problem import BOUND, LR, SAMPLES, dataset, flat, network, one_by_one, windows_of
from torch.utils.data import DataLoader

import samplewise as sw
from samplewise.errors import DistributedError, GraphError, LedgerError, LossesError, TransformError
from samplewise.integrations.lightning import PerSample


def assert_equal(module, expected, tolerance=1e-12):
    torch.testing.assert_close(flat(module), expected, rtol=tolerance, atol=tolerance)


# --- the training is that of Lightning -------------------------------------------------------------------------------


@pytest.mark.parametrize("returns", ["losses", "outputs", "both"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_recording_is_bit_identical_with_dropout(tmp_path, returns, accumulate):
    def trained(returns, *callbacks):
        module = Module(returns, torch.float32, dropout=0.3)
        torch.manual_seed(5)
        settings = dict(dtype=torch.float32, accumulate_grad_batches=accumulate, gradient_clip_val=0.5, max_epochs=2)
        return flat(fitted(4, callbacks, module, **settings))

    expected = trained("mean")
    assert torch.equal(trained(returns, PerSample(ledger=sw.Ledger(tmp_path))), expected)
    assert sw.read_ledger(tmp_path).num_rows == 2 * SAMPLES


def test_names_in_a_batch_are_the_ids(tmp_path):
    samples = [(*sample, f"{k}.png") for k, sample in enumerate(dataset())]
    trainer([PerSample(ledger=sw.Ledger(tmp_path))]).fit(Module(), DataLoader(samples, batch_size=8))
    assert sw.read_ledger(tmp_path)["id"].to_pylist() == [f"{k}.png" for k in range(SAMPLES)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
@pytest.mark.parametrize("returns", ["losses", "outputs"])
def test_clipping_equals_one_sample_at_a_time(tmp_path, returns, dtype, tolerance):
    callback = PerSample([sw.clip(BOUND)], sw.Ledger(tmp_path))
    module = fitted(8, [callback], Module(returns, dtype), dtype=dtype, max_epochs=2)
    expected, norms = one_by_one(windows_of(8, epochs=2), dtype=dtype)
    assert_equal(module, expected, tolerance)
    table = sw.read_ledger(tmp_path)
    found = torch.tensor(table["norm"].to_pylist(), dtype=dtype)
    torch.testing.assert_close(found, norms, rtol=1e-5, atol=1e-5)
    weights = torch.tensor(table["weight"].to_pylist(), dtype=dtype)
    torch.testing.assert_close(weights, (BOUND / norms).clamp(max=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("returns", ["losses", "counted", "counted outputs"])
@pytest.mark.parametrize(("batch_size", "accumulate"), [(8, 1), (2, 4), (3, 2), (1, 8)])
def test_exact_accumulation_with_a_ragged_end(batch_size, accumulate, returns):
    callback = PerSample([sw.clip(BOUND)], exact_accumulation=True)
    module = fitted(batch_size, [callback], Module(returns), accumulate_grad_batches=accumulate)
    expected, _ = one_by_one(windows_of(batch_size * accumulate), counted=returns.startswith("counted"))
    assert_equal(module, expected)


def test_without_exact_accumulation_lightning_divides_by_the_full_length():
    """The behavior that exact_accumulation corrects: the last window has 2 of 4 batches, and half the update."""
    found = fitted(4, [PerSample([sw.clip(BOUND)])], Module("losses"), accumulate_grad_batches=4)
    full, _ = one_by_one([range(16)])
    expected, _ = one_by_one([range(16), range(16, 22)])
    with pytest.raises(AssertionError):
        assert_equal(found, expected)
    assert 0 < (flat(found) - full).norm() < 0.8 * (expected - full).norm()


@pytest.mark.slow
def test_batches_of_different_sizes_in_a_window():
    sizes = [5, 1, 2, 3, 7, 1, 3]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    batches = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    module = Module()
    data = DataLoader(sw.Indexed(dataset()), batch_sampler=batches)
    trainer([PerSample([sw.clip(BOUND)], exact_accumulation=True)], accumulate_grad_batches=3).fit(module, data)
    assert_equal(module, one_by_one([range(8), range(8, 19), range(19, 22)])[0])


@pytest.mark.slow
class Counted(Module):
    """Losses with counts that are fractions; those of the second batch are 0."""

    def training_step(self, batch, batch_idx):
        x, y, *_ = batch
        counts = torch.full((len(x),), 0.0 if batch_idx == self.without else 0.01, dtype=torch.float64)
        return {"loss": counts * F.cross_entropy(self.net(x), y, reduction="none"), "counts": counts}


@pytest.mark.slow
@pytest.mark.parametrize("without", [None, 0, 1])
def test_counts_that_are_fractions_or_zero(without):
    module = Counted()
    module.without = without
    fitted(8, [PerSample(exact_accumulation=True)], module, accumulate_grad_batches=2, limit_train_batches=2)
    counted = {None: range(16), 0: range(8, 16), 1: range(8)}[without]
    assert_equal(module, one_by_one([counted], bound=torch.inf)[0])


def test_full_windows_are_bit_identical_with_exact_accumulation():
    def trained(*callbacks):
        settings = dict(accumulate_grad_batches=2, limit_train_batches=4)
        return flat(fitted(4, callbacks, Module("losses" if callbacks else "mean"), **settings))

    assert torch.equal(trained(PerSample(exact_accumulation=True)), trained())


# --- manual optimization, precision ----------------------------------------------------------------------------------


class Manual(Module):
    """Two updates in each training_step, of the first three samples and of the others."""

    def __init__(self, scalar):
        super().__init__()
        self.automatic_optimization = False
        self.scalar = scalar

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        x, y, _, ids = batch
        for rows in (slice(0, 3), slice(3, None)):
            logits = self.net(x[rows])
            losses = F.cross_entropy(logits, y[rows], reduction="none")
            optimizer.zero_grad()
            if self.scalar:
                self.manual_backward(losses.mean(), outputs=logits, losses=losses, id=ids[rows])
            else:
                self.manual_backward(losses, id=ids[rows])
            optimizer.step()


@pytest.mark.parametrize("scalar", [False, True])
def test_manual_optimization_with_several_updates_in_a_step(tmp_path, scalar):
    module = fitted(8, [PerSample([sw.clip(BOUND)], sw.Ledger(tmp_path))], Manual(scalar))
    windows = [range(3), range(3, 8), range(8, 11), range(11, 16), range(16, 19), range(19, 22)]
    expected, norms = one_by_one(windows)
    assert_equal(module, expected)
    table = sw.read_ledger(tmp_path)
    assert table["id"].to_pylist() == list(range(SAMPLES))
    assert table["update"].to_pylist() == [k for k, window in enumerate(windows) for _ in window]
    torch.testing.assert_close(torch.tensor(table["norm"].to_pylist()).double(), norms, rtol=1e-6, atol=1e-6)
    assert min(table["loss"].to_pylist()) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype")  # float64 inputs are not cast
def test_bf16_mixed_precision(tmp_path):
    def trained(returns, *callbacks):
        return flat(fitted(8, callbacks, Module(returns, torch.float32), dtype=torch.float32, precision="bf16-mixed"))

    plain = trained("mean")
    assert torch.equal(trained("losses", PerSample(ledger=sw.Ledger(tmp_path))), plain)
    clipped = trained("outputs", PerSample([sw.clip(BOUND)]))
    torch.testing.assert_close(clipped.double(), one_by_one(windows_of(8))[0], rtol=0.02, atol=0.02)
    assert not torch.equal(clipped, plain)


class Overflowing(Module):
    """Returns losses so large in one batch that half-precision gradients overflow."""

    def training_step(self, batch, batch_idx):
        losses = super().training_step(batch, batch_idx)
        return losses * 1e30 * 1e8 if batch_idx == 1 else losses


@pytest.mark.slow
def test_a_gradient_scaler_skips_an_update_and_its_rows_have_weight_0(tmp_path):
    """Lightning has a gradient scaler on the CPU only if it gets one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    callback = PerSample([sw.clip(BOUND)], sw.Ledger(tmp_path))
    module = Overflowing("losses", torch.float32)
    fitted(8, [callback], module, dtype=torch.float32, plugins=[plugin])
    assert scaler.get_scale() == 128.0
    table = sw.read_ledger(tmp_path)
    weights = torch.tensor(table["weight"].to_pylist())
    norms = torch.tensor(table["norm"].to_pylist())
    assert table["update"].to_pylist() == [0] * 8 + [1] * 8 + [2] * 6
    assert weights[8:16].eq(0).all() and weights[:8].gt(0).all() and weights[16:].gt(0).all()
    expected, by_hand = one_by_one([range(8), range(16, 22)])
    torch.testing.assert_close(norms[:8].double(), by_hand[:8], rtol=0.01, atol=0.01)
    torch.testing.assert_close(flat(module).double(), expected, rtol=0.01, atol=0.01)


# --- ledger ----------------------------------------------------------------------------------------------------------


def test_the_ledger_has_predictions_and_finds_suspects(tmp_path):
    fitted(8, [PerSample(ledger=sw.Ledger())], Module("outputs"), max_epochs=2, default_root_dir=tmp_path)
    table = sw.read_ledger(tmp_path)
    _, y, _ = dataset().tensors
    assert table["label"].to_pylist() == y.tolist() * 2
    assert table["epoch"].to_pylist() == [0] * SAMPLES + [1] * SAMPLES
    assert table["update"].to_pylist() == [k for k, window in enumerate(windows_of(8, 2)) for _ in window]
    assert set(table["prediction"].to_pylist()) <= {0, 1, 2}
    assert len(sw.suspects(table).top(3)) == 3


@pytest.mark.slow
def test_dict_batches_and_ids_of_training_step(tmp_path):
    class Named(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch):
            losses = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
            return {"loss": losses, "id": [f"s{y}" for y in batch["y"].tolist()]}

        configure_optimizers = Module.configure_optimizers

    data = [{"x": x, "y": y} for x, y, _ in dataset()]
    trainer([PerSample(ledger=sw.Ledger(tmp_path / "own"))]).fit(Named(), DataLoader(data, batch_size=8))
    assert sw.read_ledger(tmp_path / "own")["id"].to_pylist() == [f"s{each['y']}" for each in data]
    callback = PerSample(ledger=sw.Ledger(tmp_path / "missing"))
    with pytest.raises(sw.BatchError, match="the batch must hold 'id'; found a list of 3 entries"):
        trainer([callback]).fit(Module(), DataLoader(dataset(), batch_size=8))


@pytest.mark.slow
def test_batches_whose_gradients_are_reset_have_weight_0(tmp_path):
    class Skipping(Module):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if batch_idx == 1:
                optimizer_closure()
            else:
                optimizer.step(closure=optimizer_closure)

    module = fitted(8, [PerSample([sw.clip(BOUND)], sw.Ledger(tmp_path))], Skipping())
    table = sw.read_ledger(tmp_path)
    assert table["id"].to_pylist() == list(range(SAMPLES))
    weights = torch.tensor(table["weight"].to_pylist())
    assert weights[8:16].eq(0).all() and weights[:8].gt(0).all() and weights[16:].gt(0).all()
    assert table["update"].to_pylist() == [0] * 8 + [1] * 8 + [2] * 6
    assert_equal(module, one_by_one([range(8), range(16, 22)])[0])


def test_a_ledger_without_norms_records_samples_that_interact(tmp_path):
    def trained(*callbacks):
        module = Module("outputs", torch.float32)
        module.net.insert(1, torch.nn.BatchNorm1d(7))
        return flat(fitted(8, callbacks, module, dtype=torch.float32))

    with_ledger = trained(PerSample(ledger=sw.Ledger(tmp_path, norms=False)))
    assert torch.equal(with_ledger, trained(PerSample()))
    assert torch.equal(with_ledger, trained())
    table = sw.read_ledger(tmp_path)
    assert table["id"].to_pylist() == list(range(SAMPLES))
    assert torch.tensor(table["norm"].to_pylist()).isnan().all()
    assert min(table["loss"].to_pylist()) > 0


def test_a_directory_with_rows_is_refused_before_the_first_update(tmp_path):
    fitted(8, [PerSample(ledger=sw.Ledger(tmp_path))])
    module = Module()
    with pytest.raises(LedgerError, match="a new ledger must have a run directory without parts"):
        fitted(8, [PerSample(ledger=sw.Ledger())], module, default_root_dir=tmp_path)
    assert torch.equal(flat(module), flat(network()))
    assert sw.read_ledger(tmp_path).num_rows == SAMPLES


@pytest.mark.slow
def test_a_fast_dev_run_records_nothing(tmp_path):
    fitted(8, [PerSample(ledger=sw.Ledger(tmp_path))], fast_dev_run=True)
    assert not (tmp_path / "samples").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_training_step_that_skips_a_batch(tmp_path):
    class Skipping(Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    callback = PerSample([sw.clip(BOUND)], sw.Ledger(tmp_path), exact_accumulation=True)
    module = fitted(4, [callback], Skipping(), accumulate_grad_batches=3)
    assert_equal(module, one_by_one([[*range(4), *range(8, 12)], range(12, 22)])[0])
    assert sw.read_ledger(tmp_path)["id"].to_pylist() == [*range(4), *range(8, 22)]


# --- log of the trainer -----------------------------------------------------------------------------------------------


class LogOf(Logger):
    """Keeps all lines of the log."""

    name = "lines"
    version = 0

    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append({name: value for name, value in metrics.items() if name.startswith("samplewise/")})

    def log_hyperparams(self, *args):
        pass


@pytest.mark.parametrize("accumulate", [1, 2])
def test_norms_are_logged(tmp_path, accumulate):
    """6 batches of 4: every 2 updates, and at the end of the epoch those since then."""
    log = LogOf()
    callback = PerSample([sw.clip(BOUND)], sw.Ledger(tmp_path))
    every = 4 // accumulate
    trained = fitted(4, [callback], accumulate_grad_batches=accumulate, logger=log, log_every_n_steps=every)
    table = sw.read_ledger(tmp_path).to_pydict()
    lines = [line for line in log.lines if line]
    assert len(lines) == 2
    for line, rows in zip(lines, [slice(0, 16), slice(16, 22)], strict=True):
        norms = torch.tensor(table["norm"][rows], dtype=torch.float64)
        assert line["samplewise/norm_median"] == pytest.approx(norms.quantile(0.5).item(), rel=1e-6)
        assert line["samplewise/norm_p95"] == pytest.approx(norms.quantile(0.95).item(), rel=1e-6)
        assert line["samplewise/clipped"] == pytest.approx(sum(w < 1 for w in table["weight"][rows]) / len(norms))
        assert line["samplewise/largest_id"] == table["id"][rows][int(norms.argmax())]
    silent = fitted(4, [PerSample([sw.clip(BOUND)])], accumulate_grad_batches=accumulate)
    assert torch.equal(flat(trained), flat(silent))


def test_large_ids_are_logged_exactly():
    class Numbered(Module):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "id": batch[-1] + 2**24 + 1}

    fit = trainer([PerSample([sw.clip(BOUND)])])
    fit.fit(Numbered(), loader(8))
    assert fit.callback_metrics["samplewise/largest_id"].item() == 2**24 + 1 + one_by_one(windows_of(8))[1].argmax()


# --- the module is left as it was ------------------------------------------------------------------------------------


def test_methods_are_restored_after_fit_and_after_an_exception(tmp_path):
    class Failing(Module):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("stop here")
            return super().training_step(batch, batch_idx)

    module = Module()
    before = set(vars(module))
    fitted(8, [PerSample()], module)
    assert "training_step" not in vars(module) and "backward" not in vars(module)
    assert before <= set(vars(module))
    module = Failing()
    with pytest.raises(RuntimeError, match="stop here"):
        fitted(8, [PerSample(ledger=sw.Ledger(tmp_path))], module)
    assert "training_step" not in vars(module) and "backward" not in vars(module)
    assert sw.read_ledger(tmp_path).num_rows == 16  # of the updates before


@pytest.mark.slow
def test_methods_of_the_object_and_an_overridden_backward():
    class Counting(Module):
        calls = 0

        def backward(self, loss, *args, **kwargs):
            self.calls += 1
            loss.backward(*args, **kwargs)

    module = Counting()
    own = module.training_step
    module.training_step = own
    fitted(8, [PerSample([sw.clip(BOUND)])], module)
    assert vars(module)["training_step"] is own
    assert module.calls == 3
    assert_equal(module, one_by_one(windows_of(8))[0])


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_scalar_without_outputs_is_refused():
    message = (
        r"training_step must return the losses of the samples, \(B,\), or {'loss': scalar, 'outputs': tensor .* found "
        r"a scalar without outputs\. Compute the losses with reduction='none' and return them, or return the outputs"
    )
    with pytest.raises(LossesError, match=message):
        fitted(8, [PerSample()], Module("mean"))


def test_labels_of_another_length_are_refused(tmp_path):
    class Labelling(Module):
        def training_step(self, batch, batch_idx):
            return {**super().training_step(batch, batch_idx), "labels": batch[1][:3]}

    with pytest.raises(LossesError, match=r"labels must have one row per sample, 8; found shape \(3,\)"):
        fitted(8, [PerSample(ledger=sw.Ledger(tmp_path))], Labelling("outputs"))


def test_manual_optimization_without_manual_backward_is_refused():
    class Bypassing(Module):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx).backward()
            self.optimizers().step()

    message = r"must run the backward pass; found an optimizer step without it\. Call self\.manual_backward\(losses"
    with pytest.raises(GraphError, match=message):
        fitted(8, [PerSample([sw.clip(BOUND)])], Bypassing("mean"))


def test_counts_of_another_shape_are_refused():
    class Counting(Module):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "counts": torch.ones(3)}

    with pytest.raises(LossesError, match=r"counts must have one value per sample, \(8,\); found \(3,\)"):
        fitted(8, [PerSample()], Counting())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("outputs", [], "outputs must be a tensor .* found a list of nothing"),
        ("outputs", {"logits": torch.ones(8)}, "outputs must be a tensor .* found dict"),
        ("counts", [1] * 8, r"counts must be a tensor \(B,\); found list"),
        ("labels", [1] * 8, r"labels must be a tensor \(B,\); found list"),
    ],
)
def test_values_that_are_not_tensors_are_refused(key, value, message):
    class Wrong(Module):
        def training_step(self, batch, batch_idx):
            return {**super().training_step(batch, batch_idx), key: value}

    with pytest.raises(LossesError, match=message):
        fitted(8, [PerSample()], Wrong("outputs"))


class Optimizers(Module):
    def __init__(self, *kinds):
        super().__init__()
        self.kinds = kinds

    def configure_optimizers(self):
        return [kind(self.parameters(), LR) for kind in self.kinds]


def test_optimizers_that_are_refused():
    with pytest.raises(ValueError, match="one backward pass per batch; found LBFGS, which evaluates the loss many"):
        fitted(8, [PerSample()], Optimizers(torch.optim.LBFGS))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch.compile
def test_compiled_modules_are_refused():
    message = "found a module compiled with torch.compile, whose graph cannot be read. Train the module itself"
    with pytest.raises(GraphError, match=message):
        trainer([PerSample()]).fit(torch.compile(Module()), loader(8))
    module = Module()
    module.net = torch.compile(module.net)
    with pytest.raises(GraphError, match=message):
        fitted(8, [PerSample()], module)


@pytest.mark.parametrize("strategy", [DeepSpeedStrategy, FSDPStrategy])
def test_strategies_that_are_refused(strategy):
    """They need GPUs or another package to start, so the check is called without a training run."""
    fake = SimpleNamespace(strategy=strategy.__new__(strategy), optimizers=[])
    with pytest.raises(DistributedError, match=f"leaves the parameters whole.*; found {strategy.__name__}"):
        PerSample().on_fit_start(fake, Module())


@pytest.mark.parametrize("transform", [sw.noise(1.0), sw.drop(largest=1), sw.group("user")], ids=str)
def test_transforms_of_a_whole_update_are_refused(transform):
    with pytest.raises(TransformError, match=r"must (get all samples of an update|be applied once per update); found"):
        fitted(4, [PerSample([transform])], accumulate_grad_batches=2)


def test_exact_accumulation_with_manual_optimization_is_refused():
    with pytest.raises(ValueError, match="exact_accumulation=True needs automatic optimization; found manual"):
        fitted(8, [PerSample(exact_accumulation=True)], Manual(False))


@pytest.mark.parametrize(
    ("positional", "keywords", "found"),
    [([1], {}, "a second positional argument"), ([], {"create_graph": True}, "create_graph")],
)
def test_arguments_of_manual_backward_that_are_refused(positional, keywords, found):
    class Calling(Module):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx), *positional, **keywords)

    message = f"must get the loss, and outputs, losses, counts, labels, id, retain_graph as keywords; found {found}"
    with pytest.raises(TypeError, match=message):
        fitted(8, [PerSample()], Calling())


def test_invalid_arguments():
    with pytest.raises(TypeError, match=r"ledger must be a sw\.Ledger, or None; found str"):
        PerSample(ledger="runs/a")
    with pytest.raises(TransformError, match=r"Call sw.clip\(...\)"):
        PerSample([sw.clip])


def test_clipping_twice_warns_once(caplog):
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        fitted(8, [PerSample([sw.clip(BOUND)])], gradient_clip_val=0.1)
        fitted(8, [PerSample()], gradient_clip_val=0.1)
    said = [record.message for record in caplog.records if "samplewise" in record.message]
    assert said == [
        "samplewise: gradient_clip_val=0.1 also clips the gradient of each update, after chain(clip(0.7)) of the "
        "samples' gradients."
    ]


def test_a_missing_framework_is_one_line(monkeypatch):
    real = builtins.__import__

    def without_lightning(name, *args, **kwargs):
        if name.split(".")[0] == "lightning":
            raise ModuleNotFoundError(f"No module named {name!r}", name="lightning")
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("samplewise.integrations.lightning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_lightning)
    with pytest.raises(ImportError) as caught:
        importlib.import_module("samplewise.integrations.lightning")
    message = "samplewise.integrations.lightning needs lightning: pip install 'samplewise[lightning]'"
    assert str(caught.value) == message
