"""The adapter of other training loops, without a framework; and privacy= in other trainers, which is refused."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

os.environ.setdefault("KERAS_BACKEND", "torch")

import samplewise as sw
from samplewise.integrations.adapter import Adapter, BatchLoss, NormLog, refuse_privacy
from samplewise.parallel import collectives
from samplewise.step.backward import BackwardResult
from samplewise.transforms.chain import as_chain
from samplewise.transforms.stats import SampleStats

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(6) % 3
BATCH = {"id": torch.arange(6) + 10, "y": Y, "z": ["p", "q", "r", "s", "t", "u"]}


class Framework:
    """Scales the loss, as a gradient scaler does, and counts its backward passes of losses."""

    def __init__(self):
        self.losses = []

    def backward(self, loss):
        self.losses.append(loss)
        (loss * 8).backward()


def one_pass(adapter, framework=None, **values):
    """The model after the backward pass of a batch, and the losses (B,)."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    outputs = model(X)
    losses = F.cross_entropy(outputs, Y, reduction="none")
    adapter.backward(BatchLoss(losses.mean(), [outputs], 6, losses.detach(), **values), model, framework, 6, BATCH, 3)
    return model, losses


def expected(bound=None):
    """Sums of the gradients of the samples, each clipped to the bound, over 6."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    sums = [torch.zeros_like(p) for p in model.parameters()]
    norms = []
    for x, y in zip(X, Y, strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        norms.append(torch.cat([g.flatten() for g in gradients]).norm().item())
        factor = 1.0 if bound is None else min(1.0, bound / norms[-1])
        sums = [s + factor * g / 6 for s, g in zip(sums, gradients, strict=True)]
    return sums, norms


@pytest.mark.parametrize("ledger", [False, True], ids=["", "ledger"])
@pytest.mark.parametrize("bound", [None, 0.4])
@pytest.mark.parametrize("framework", [None, Framework], ids=["torch", "framework"])
def test_gradients_equal_a_loop_over_samples(ledger, bound, framework, tmp_path):
    transforms = [] if bound is None else [sw.clip(bound)]
    adapter = Adapter(as_chain(transforms), sw.Ledger(tmp_path) if ledger else None)
    assert adapter.per_sample == (ledger or bound is not None)
    assert adapter.reads_losses == ledger
    model, _ = one_pass(adapter, framework and framework())
    sums, _ = expected(bound)
    scale = 1 if framework is None else 8
    torch.testing.assert_close([p.grad for p in model.parameters()], [scale * s for s in sums])


def test_without_transforms_and_norms_the_pass_is_that_of_the_framework(tmp_path):
    """One pass, of the loss itself: none that measures a loss scale."""
    adapter = Adapter(as_chain(()), sw.Ledger(tmp_path, norms=False))
    framework = Framework()
    one_pass(adapter, framework)
    assert len(framework.losses) == 1 and not adapter.per_sample
    adapter.record(adapter.take_passes(), 0)
    assert all(norm != norm for norm in adapter.ledger.read()["norm"].to_pylist())


@pytest.mark.parametrize("transforms", [[], [sw.clip(1.0)]], ids=["recorded", "used"])
def test_a_ledger_without_norms_is_named_if_norms_are_only_recorded(transforms, tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    outputs = model(X)
    values = BatchLoss(F.cross_entropy(outputs, Y), [outputs], 6)
    with pytest.raises(sw.SamplesInteractError, match="found BatchNorm in training mode: module '1'") as caught:
        Adapter(as_chain(transforms), sw.Ledger(tmp_path)).backward(values, model, None, 6, BATCH)
    assert ("sw.Ledger(norms=False)" in str(caught.value)) == (not transforms)


def test_rows_are_recorded_once_per_update(tmp_path):
    adapter = Adapter(as_chain([sw.clip(0.4)]), sw.Ledger(tmp_path, columns=["z"]))
    with adapter.training():
        _, losses = one_pass(adapter, columns={"label": Y, "z": Y})
        one_pass(adapter, ids=torch.arange(6))
        passes = adapter.take_passes()
        assert adapter.take_passes() == []
        adapter.record(passes, 7)
        one_pass(adapter)
        adapter.record(adapter.take_passes(), 8, skipped=True, epoch=5)
    rows = sw.read_ledger(tmp_path)
    assert rows["id"].to_pylist() == [*range(10, 16), *range(6), *range(10, 16)]
    assert rows["update"].to_pylist() == 12 * [7] + 6 * [8]
    assert rows["epoch"].to_pylist() == 12 * [3] + 6 * [5]
    assert rows["z"].to_pylist() == 3 * BATCH["z"]  # from the batch, not from the column of the same name
    assert rows["label"].to_pylist()[:6] == Y.tolist()
    assert rows["weight"].to_pylist()[12:] == 6 * [0]
    _, norms = expected()
    assert rows["norm"].to_pylist()[:6] == pytest.approx(norms)
    assert rows["loss"].to_pylist()[:6] == pytest.approx(losses.tolist())


def test_rows_are_written_after_an_error(tmp_path):
    adapter = Adapter(as_chain(()), sw.Ledger(tmp_path))

    def interrupted():
        with adapter.training():
            one_pass(adapter)
            adapter.record(adapter.take_passes(), 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sw.read_ledger(tmp_path).num_rows == 6


# --- log of the trainer -----------------------------------------------------------------------------------------------


def logged(transforms, *, ledger=None, ids=None):
    """Values for a log after two passes."""
    adapter = Adapter(as_chain(transforms), ledger)
    for _ in range(2):
        one_pass(adapter, ids=ids)
    adapter.record(adapter.take_passes(), 0)
    values = adapter.take_log()
    assert adapter.take_log() == {}  # of no samples
    return values


@pytest.mark.parametrize("by", [None, "parameter"])
def test_norms_of_all_passes_are_logged(by):
    norms = torch.tensor(expected()[1], dtype=torch.float64)
    values = logged([sw.clip(0.4, by=by)])
    assert list(values) == [f"samplewise/{name}" for name in ("norm_median", "norm_p95", "clipped", "largest_id")]
    assert values["samplewise/norm_median"] == pytest.approx(norms.repeat(2).quantile(0.5).item())
    assert values["samplewise/norm_p95"] == pytest.approx(norms.repeat(2).quantile(0.95).item())
    assert values["samplewise/largest_id"] == 10 + norms.argmax().item()
    if by is None:
        assert values["samplewise/clipped"] == (norms > 0.4).double().mean().item()


def test_ids_that_are_strings_and_the_log_of_a_ledger_without_transforms(tmp_path):
    largest = torch.tensor(expected()[1]).argmax()
    values = logged([], ledger=sw.Ledger(tmp_path), ids=[f"s{k}" for k in range(6)])
    assert "samplewise/clipped" not in values
    assert values["samplewise/largest_id"] == f"s{largest}"


def test_norms_are_not_logged_if_they_are_not_computed_or_logs_are_off(tmp_path):
    assert logged([], ledger=sw.Ledger(tmp_path, norms=False)) == {}
    adapter = Adapter(as_chain([sw.clip(0.4)]), None)
    adapter.logs = False
    one_pass(adapter)
    assert adapter.take_passes() == [] and adapter.take_log() == {}


def test_batches_without_ids_are_logged_without_a_ledger(monkeypatch):
    monkeypatch.delitem(BATCH, "id")
    assert "samplewise/largest_id" not in logged([sw.clip(0.4)])


def test_norms_that_are_not_finite_are_left_out():
    log = NormLog()
    norms = torch.tensor([1.0, torch.nan, 3.0, torch.inf])
    results = BackwardResult(SampleStats(norms, raw_norms=norms, coefficients=torch.tensor([1.0, 0.5, 0.5, 0.5])))
    log.add("a", results, torch.arange(4))
    assert log.take() == {"a/norm_median": 2.0, "a/norm_p95": pytest.approx(2.9), "a/clipped": 0.5, "a/largest_id": 2}
    log.add("a", BackwardResult(SampleStats(norms[1:2], raw_norms=norms[1:2])), None)
    assert log.take() == {}


def test_the_log_covers_all_ranks(monkeypatch):
    """Each rank sends a summary of its samples; another one has a sample with a larger norm."""
    monkeypatch.setattr(
        collectives,
        "all_gather_object",
        lambda mine: [mine, {"a": (torch.tensor([5.0]).double(), torch.tensor([True]), (5.0, "other"))}],
    )
    log = NormLog()
    norms = torch.tensor([1.0, 3.0])
    log.add("a", BackwardResult(SampleStats(norms, raw_norms=norms, coefficients=torch.ones(2))), ["p", "q"])
    values = log.take()
    assert values["a/norm_median"] == 3.0 and values["a/largest_id"] == "other"
    assert values["a/clipped"] == pytest.approx(1 / 3)


# --- privacy= --------------------------------------------------------------------------------------------------------

PRIVACY = dict(noise_multiplier=1.0, delta=1e-5, updates=10, sample_rate=0.1, clip=1.0, seed=0)
MESSAGE = "privacy= must be used with sw.Step, which draws samples as the accountant assumes .* Use sw.Step"


def test_no_privacy_is_accepted():
    refuse_privacy(None, "the Trainer")


def test_lightning_refuses_privacy():
    pytest.importorskip("lightning")
    from samplewise.integrations.lightning import PerSample

    with pytest.raises(sw.PrivacyError, match=MESSAGE):
        PerSample(privacy=sw.Privacy(**PRIVACY))


def test_keras_refuses_privacy():
    keras = pytest.importorskip("keras")
    from samplewise.integrations.keras import PerSample

    model = PerSample.of(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(sw.PrivacyError, match=MESSAGE):
        model.compile("sgd", "mse", privacy=sw.Privacy(**PRIVACY))
