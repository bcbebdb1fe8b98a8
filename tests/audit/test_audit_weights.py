"""Weights of targets, compared with the factors that a loss is made of.

The model of most tests is a table of logits, so that precision and confidence are chosen.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import samplewise as sw

B = 12


class Rows(nn.Module):
    """Returns its parameter, whose rows are the outputs of samples."""

    def __init__(self, values, head=None):
        super().__init__()
        self.values = nn.Parameter(values)
        self.head = head or nn.Identity()

    def forward(self, x):
        return self.head(self.values[x] * 1)


def audited(values, loss, *, head=None, updates=1, **arguments):
    """Audit of updates with loss(outputs)."""
    model = Rows(values, head)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    with sw.audit(model, **arguments) as audit:
        for _ in range(updates):
            loss(model(torch.arange(len(values)))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


def assert_weights(audit, expected, tolerance=1e-6):
    """Compare the weights of all rows, in units of the largest one."""
    assert all(row["known"] for row in audit.updates), str(audit)
    weights = torch.tensor([row["weight"] for row in audit.updates], dtype=torch.float64)
    expected = expected.double()
    assert weights.shape == expected.shape
    assert (weights - expected).abs().max() <= tolerance * expected.abs().max(), str(audit)


def assert_not_wrong(audit, expected, tolerance=1e-4):
    """Weights must be right, or must not be shown as known."""
    if all(row["known"] for row in audit.updates):
        assert_weights(audit, expected, tolerance)


def factors(kind, rows):
    return {
        "equal": torch.full((rows,), 1 / rows, dtype=torch.float64),
        "positive": torch.rand(rows, dtype=torch.float64) + 0.1,
        "signed": torch.randn(rows, dtype=torch.float64),
    }[kind]


# --- cross entropy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("classes", [3, 5000])
@pytest.mark.parametrize("kind", ["equal", "positive", "signed"])
@pytest.mark.parametrize("scale", [1e-2, 3])
def test_cross_entropy_has_the_weights_of_its_terms(scale, kind, classes, dtype):
    torch.manual_seed(0)
    y = torch.randint(0, classes, (B,))
    w = factors(kind, B)
    logits = (torch.randn(B, classes) * scale).to(dtype)
    audit = audited(logits, lambda z: (w.to(dtype) * F.cross_entropy(z, y, reduction="none")).sum())
    assert_weights(audit, w)


@pytest.mark.parametrize("margin", [5, 20, 60])
@pytest.mark.parametrize("classes", [2, 3, 1000])
def test_rows_whose_probability_rounds_to_one_have_their_weight(classes, margin):
    torch.manual_seed(0)
    y = torch.randint(0, classes, (B,))
    logits = torch.randn(B, classes)
    logits[: B // 2] += margin * F.one_hot(y[: B // 2], classes)
    assert_weights(audited(logits, lambda z: F.cross_entropy(z, y)), factors("equal", B), 1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_confident_logits_and_weights_of_both_signs_are_right_or_not_known(seed):
    torch.manual_seed(seed)
    y = torch.randint(0, 10, (B,))
    w = factors("signed", B)
    logits = torch.randn(B, 10, dtype=torch.float64) * 10
    assert_not_wrong(audited(logits, lambda z: (w * F.cross_entropy(z, y, reduction="none")).sum()), w)


@pytest.mark.parametrize("classes", [3, 1000])
@pytest.mark.parametrize("smoothing", [0.05, 0.3])
def test_label_smoothing(smoothing, classes):
    torch.manual_seed(0)
    y = torch.randint(0, classes, (B,))
    logits = torch.randn(B, classes) / 2
    assert_weights(
        audited(logits, lambda z: F.cross_entropy(z, y, label_smoothing=smoothing)), factors("equal", B), 1e-4
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ignored_labels_and_class_weights(reduction):
    torch.manual_seed(0)
    y = torch.randint(0, 5, (B,))
    y[3] = y[8] = -100
    of_class = torch.rand(5) + 0.5
    w = of_class[y.clamp(0)] * (y != -100)
    expected = w / w.sum() if reduction == "mean" else w
    loss = nn.CrossEntropyLoss(of_class, reduction=reduction)
    assert_weights(audited(torch.randn(B, 5), lambda z: loss(z, y)), expected)
    assert_weights(audited(torch.randn(B, 5), lambda z: F.cross_entropy(z, y, of_class, reduction=reduction)), expected)


@pytest.mark.parametrize("shape", [(7,), (5,), (4, 3)])
@pytest.mark.parametrize("first", [True, False])
def test_layouts_of_sequences_and_images(first, shape):
    """Logits (B, V, T), (B, V, H, W) and (B, T, V)."""
    torch.manual_seed(0)
    y = torch.randint(0, 5, (B, *shape))
    w = torch.rand(B, *shape) + 0.1
    logits = torch.randn(B, 5, *shape)

    def loss(z):
        return (w * F.cross_entropy(z if first else z.movedim(-1, 1), y, reduction="none")).sum()

    audit = audited(logits if first else logits.movedim(1, -1).contiguous(), loss)
    assert_weights(audit, w.flatten(1).sum(1))


def test_shifted_labels_and_log_probabilities():
    torch.manual_seed(0)
    y = torch.randint(0, 9, (B, 6))
    y[2, 3:] = -100
    counted = (y[:, 1:] != -100).sum(1)

    def shifted(z):
        return F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten())

    assert_weights(audited(torch.randn(B, 6, 9), shifted), counted / counted.sum())
    w = factors("signed", B)

    def likelihood(log_p):
        return (w * F.nll_loss(log_p, y[:, 0], reduction="none")).sum()

    assert_weights(audited(torch.randn(B, 9), likelihood, head=nn.LogSoftmax(1)), w)
    assert_weights(audited(torch.randn(B, 9), lambda z: likelihood(z.log_softmax(1))), w)


# --- other losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(B,), (B, 1), (B, 4)])
def test_binary_cross_entropy(shape):
    torch.manual_seed(0)
    y = torch.randint(0, 2, shape).float()
    loss = F.binary_cross_entropy_with_logits
    assert_weights(audited(torch.randn(shape), lambda z: loss(z, y)), factors("equal", B), 1e-5)
    positive = torch.tensor(3.0)
    weights = torch.where(y > 0, positive, 1.0).reshape(B, -1).sum(1) / y.numel()
    assert_weights(audited(torch.randn(shape), lambda z: loss(z, y, pos_weight=positive)), weights, 1e-5)
    saturated = torch.randn(shape) + 20 * (y * 2 - 1) * (torch.arange(B) < 3).view(B, *[1] * (len(shape) - 1))
    assert_weights(audited(saturated, lambda z: loss(z, y)), factors("equal", B), 1e-4)


@pytest.mark.parametrize("criterion", [nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss])
def test_criteria_of_elements(criterion):
    torch.manual_seed(0)
    y = torch.rand(B, 3)
    w = factors("positive", B)
    assert_weights(audited(torch.randn(B, 3), lambda z: criterion()(z, y)), factors("equal", B))
    single = criterion(reduction="none")
    assert_weights(audited(torch.randn(B, 3), lambda z: (w * single(z, y).mean(1)).sum()), w)


def test_losses_that_are_passed():
    torch.manual_seed(0)
    y = torch.randn(B, 3)
    w = factors("positive", B)

    def losses(outputs, labels):
        return (outputs - labels).abs().pow(1.5).mean(1)

    audit = audited(torch.randn(B, 3), lambda z: (w * losses(z, y)).sum(), losses=losses, labels=lambda *_: y)
    assert_weights(audit, w)


OTHER_LOSSES = {
    "squared error": lambda z: F.mse_loss(z, torch.ones_like(z)),
    "mean": torch.mean,
    "entropy": lambda z: -(z.softmax(1) * z.log_softmax(1)).sum(1).mean(),
    "margin": lambda z: F.multi_margin_loss(z, torch.arange(B) % 4),
    "temperature": lambda z: F.cross_entropy(z / 2, torch.arange(B) % 4),
}


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_other_losses_are_not_taken_for_known_ones(name):
    torch.manual_seed(0)
    audit = audited(torch.randn(B, 4), OTHER_LOSSES[name])
    assert not any(row["known"] for row in audit.updates)
    assert audit.ok
    assert audit.notes == [
        "weights cannot be seen: the loss is no cross entropy of an output. Pass losses=, a function (outputs, labels) "
        "-> losses; shares of the gradient at the outputs are in audit.updates"
    ]


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("name", ["squared error", "mean"])
def test_outputs_of_zero_explain_no_loss(name, columns):
    assert not any(row["known"] for row in audited(torch.zeros(B, columns), OTHER_LOSSES[name]).updates)


def test_an_output_with_two_names_counts_once():
    class Twice(Rows):
        def forward(self, x):
            logits = super().forward(x)
            return {"logits": logits, "predictions": logits}

    torch.manual_seed(0)
    model = Twice(torch.randn(B, 5))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with sw.audit(model) as audit:
        F.cross_entropy(model(torch.arange(B))["logits"], torch.arange(B) % 5).backward()
        optimizer.step()
    assert_weights(audit, factors("equal", B))


# --- loops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [10, 1000])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_autocast_and_loss_scaling(scale, classes, dtype):
    torch.manual_seed(0)
    unused = torch.amp.GradScaler("cpu", init_scale=4.0)  # another scaler that is alive has no influence
    unused.scale(torch.ones(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    model = nn.Linear(6, classes)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x, y = torch.randn(B, 6), torch.randint(0, classes, (B,))
    with sw.audit(model) as audit:
        with torch.autocast("cpu", dtype):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
    assert_weights(audit, factors("equal", B), 5e-3)


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Sequential(nn.Tanh(), nn.Linear(8, 5))
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.last, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("passes", ["one", "many"])
def test_pieces_and_gradient_checkpointing(passes, pieces, reentrant):
    torch.manual_seed(0)
    model = Recomputed(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x, y, w = torch.randn(B, 6), torch.randint(0, 5, (B,)), factors("positive", B).float()
    with sw.audit(model) as audit:
        losses = (
            (v * F.cross_entropy(model(a), b, reduction="none")).sum()
            for a, b, v in zip(x.chunk(pieces), y.chunk(pieces), w.chunk(pieces), strict=True)
        )
        if passes == "one":
            sum(losses).backward()
        else:
            for loss in losses:
                loss.backward()
        optimizer.step()
    assert audit.sums == pytest.approx([float(w.sum())], rel=1e-6)
    weights = sorted(row["weight"] for row in audit.updates)
    assert weights == pytest.approx(sorted(w.tolist()), rel=1e-6)
