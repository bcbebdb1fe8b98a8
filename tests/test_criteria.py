"""Torch's criteria as loss functions: however a window is cut, it is `criterion(model(x), y)` on the whole."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.core.losses import CRITERIA, Criterion, as_loss_fn, per_sample

# Torch's own word on KLDivLoss(): what it is compared with says it, not the step.
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss:UserWarning")

GENERATOR = torch.Generator().manual_seed(0)


def noise(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


N, C, T = 7, 4, 3
X = noise(N, 5)
CLASSES, TOKENS = torch.arange(N) % C, (torch.arange(N * T) * 3 % C).view(N, T)
SOFT, SOFT_TOKENS = noise(N, C).softmax(1), noise(N, C, T).softmax(1)
REAL, ZERO_ONE, SIGNS = noise(N, C), (noise(N, C) > 0).double(), noise(N, C).sign()
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
MARGINS = torch.tensor([[3, 0, -1, 1], [0, -1, 2, 3], [1, 2, 3, 0]])[torch.arange(N) % 3]  # classes, up to a -1


def with_ignored(target):
    """Some of every sample, and all of sample 2."""
    target = target.clone()
    target[1::3] = -100
    target[2] = -100
    return target


# name: (criterion, what the model ends in, targets)
CASES = {
    "cross entropy": (nn.CrossEntropyLoss(), None, CLASSES),
    "cross entropy, weights": (nn.CrossEntropyLoss(WEIGHT), None, CLASSES),
    "cross entropy, ignored": (nn.CrossEntropyLoss(), None, with_ignored(CLASSES)),
    "cross entropy, a class ignored": (nn.CrossEntropyLoss(ignore_index=1), None, CLASSES),
    "cross entropy, weights and ignored": (nn.CrossEntropyLoss(WEIGHT), None, with_ignored(CLASSES)),
    "cross entropy, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), None, CLASSES),
    "cross entropy, all of it": (
        nn.CrossEntropyLoss(WEIGHT, ignore_index=2, label_smoothing=0.1),
        nn.Unflatten(1, (C, T)),
        TOKENS,
    ),
    "cross entropy, soft": (nn.CrossEntropyLoss(), None, SOFT),
    "cross entropy, soft and weights": (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), None, SOFT),
    "cross entropy, tokens": (nn.CrossEntropyLoss(), nn.Unflatten(1, (C, T)), TOKENS),
    "cross entropy, tokens ignored": (nn.CrossEntropyLoss(WEIGHT), nn.Unflatten(1, (C, T)), with_ignored(TOKENS.T).T),
    "cross entropy, soft tokens": (nn.CrossEntropyLoss(WEIGHT), nn.Unflatten(1, (C, T)), SOFT_TOKENS),
    "nll": (nn.NLLLoss(), nn.LogSoftmax(1), CLASSES),
    "nll, weights and ignored": (nn.NLLLoss(WEIGHT), nn.LogSoftmax(1), with_ignored(CLASSES)),
    "nll, tokens": (
        nn.NLLLoss(WEIGHT, ignore_index=3),
        nn.Sequential(nn.Unflatten(1, (C, T)), nn.LogSoftmax(1)),
        TOKENS,
    ),
    "mse": (nn.MSELoss(), None, REAL),
    "mse, one number each": (nn.MSELoss(), nn.Flatten(0), REAL[:, 0]),
    "mse, images": (nn.MSELoss(), nn.Unflatten(1, (2, 2)), REAL.view(N, 2, 2)),
    "l1": (nn.L1Loss(), None, REAL),
    "smooth l1": (nn.SmoothL1Loss(beta=0.5), None, REAL),
    "huber": (nn.HuberLoss(delta=0.7), None, REAL),
    "bce": (nn.BCELoss(), nn.Sigmoid(), ZERO_ONE),
    "bce, weights": (nn.BCELoss(WEIGHT), nn.Sigmoid(), ZERO_ONE),
    "bce with logits": (nn.BCEWithLogitsLoss(), None, ZERO_ONE),
    "bce with logits, weights": (nn.BCEWithLogitsLoss(WEIGHT, pos_weight=WEIGHT.flip(0)), None, ZERO_ONE),
    "kl, mean": (nn.KLDivLoss(reduction="mean"), nn.LogSoftmax(1), SOFT),
    "kl, batchmean": (nn.KLDivLoss(reduction="batchmean"), nn.LogSoftmax(1), SOFT),
    "kl, logarithms": (nn.KLDivLoss(reduction="batchmean", log_target=True), nn.LogSoftmax(1), SOFT.log()),
    "poisson": (nn.PoissonNLLLoss(), None, REAL.abs()),
    "poisson, full": (nn.PoissonNLLLoss(full=True, log_input=False), nn.Softplus(), REAL.abs() * 3),
    "soft margin": (nn.SoftMarginLoss(), None, SIGNS),
    "hinge embedding": (nn.HingeEmbeddingLoss(margin=0.5), None, SIGNS),
    "multi-label soft margin": (nn.MultiLabelSoftMarginLoss(WEIGHT), None, ZERO_ONE),
    "multi-label margin": (nn.MultiLabelMarginLoss(), None, MARGINS),
    "multi-margin": (nn.MultiMarginLoss(p=2, weight=WEIGHT), None, CLASSES),
}

every_case = pytest.mark.parametrize("case", CASES)


def outputs(end, target):
    if isinstance(end, nn.Flatten):
        return 1
    return C * T if target.dim() > 1 and target.shape[-1] == T else C


def task(case):
    criterion, end, target = CASES[case]
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs(end, target))]
    return criterion, nn.Sequential(*layers, *([end] if end else [])).double(), target


def test_every_criterion_is_here():
    assert {type(criterion) for criterion, _, _ in CASES.values()} == set(CRITERIA)


@pytest.mark.sweep(1 / 4)
@every_case
@pytest.mark.parametrize(("batch", "microbatch"), [(N, None), (N, 1), (N, 3), (2, None), (4, 3)])
def test_any_cut_is_the_criterion_on_the_whole(case, batch, microbatch):
    criterion, model, target = task(case)
    twin = copy.deepcopy(model)
    loss = criterion(twin(X), target)
    loss.backward()
    step = sw.Step(model, sw.sgd(1.0), criterion, samples=N, microbatch=microbatch)
    (update,) = step.over(DataLoader(TensorDataset(X, target), batch_size=batch))
    assert update.loss == pytest.approx(loss.item(), rel=1e-10)
    expected = parameters_to_vector(p - p.grad for p in twin.parameters())
    torch.testing.assert_close(parameters_to_vector(model.parameters()), expected, rtol=0, atol=1e-10)


@every_case
def test_check_and_scan_take_criteria(case):
    criterion, model, target = task(case)
    found = sw.check(model, criterion, (X, target))
    assert found.ok, str(found)
    sizes, total = [], 0
    for _, g in sw.scan(model, criterion, [(X, target)], microbatch=3):
        sizes.append(len(g))
        total = total + parameters_to_vector(g.sum().values())
    assert sizes == [3, 3, 1]
    losses, counts = per_sample(Criterion(criterion)(model, (X, target)))
    counts = torch.ones_like(losses) if counts is None else counts
    whole = parameters_to_vector(torch.autograd.grad(criterion(model(X), target), list(model.parameters())))
    torch.testing.assert_close(total / counts.sum(), whole, rtol=0, atol=1e-10)
    assert losses.shape == counts.shape == (N,)


def test_check_takes_float32_weights():
    """It computes in float64, on a copy; the criterion's weights must not be in the way."""
    model = nn.Linear(5, C)
    criterion = nn.CrossEntropyLoss(WEIGHT.float())
    assert sw.check(model, criterion, (X.float(), CLASSES)).ok
    assert criterion.weight.dtype == torch.float32


def test_with_transforms_the_counts_stay_the_denominator():
    criterion, model, target = task("cross entropy, weights")
    twin = copy.deepcopy(model)
    sw.Step(model, sw.sgd(1.0), criterion, transforms=sw.weight(lambda losses: torch.full_like(losses, 0.5))).run(
        [(X, target)]
    )
    (0.5 * criterion(twin(X), target)).backward()
    expected = parameters_to_vector(p - p.grad for p in twin.parameters())
    torch.testing.assert_close(parameters_to_vector(model.parameters()), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(WEIGHT, reduction="none"), nn.NLLLoss(reduction="none")])
def test_reduction_none_is_the_mean_over_samples(criterion):
    """Its own denominators are nobody's: one each."""
    _, model, target = task("nll")
    twin = copy.deepcopy(model)
    (update,) = sw.Step(model, sw.sgd(1.0), criterion, samples=N, microbatch=3).over([(X, target)])
    loss = criterion(twin(X), target).mean()
    assert update.loss == pytest.approx(loss.item(), rel=1e-10)
    loss.backward()
    expected = parameters_to_vector(p - p.grad for p in twin.parameters())
    torch.testing.assert_close(parameters_to_vector(model.parameters()), expected, rtol=0, atol=1e-10)


def test_reduction_none_with_several_numbers_each_is_no_loss_per_sample():
    _, model, target = task("mse")
    with pytest.raises(sw.LossesError, match=r"losses must be 1-D.*found shape \(7, 4\)"):
        sw.Step(model, sw.sgd(1.0), nn.MSELoss(reduction="none")).run([(X, target)])


def test_reduction_sum_is_refused():
    with pytest.raises(
        sw.LossesError, match=r"MSELoss as loss_fn must have reduction='mean'.*found 'sum'\. Leave reduction out"
    ):
        sw.Step(nn.Linear(5, 4), sw.sgd(1.0), nn.MSELoss(reduction="sum"))


class Mine(nn.CrossEntropyLoss):
    """May do anything."""


@pytest.mark.parametrize("criterion", [nn.CTCLoss(), nn.CosineEmbeddingLoss(), nn.GaussianNLLLoss(), Mine()])
def test_unknown_criteria_are_refused_with_the_remedy(criterion):
    name = type(criterion).__name__
    example = r"Write for example lambda model, batch: F.cross_entropy\(.*reduction='none'\)"
    message = rf"found {name}(, whose first .*)?\. {example}"
    with pytest.raises(TypeError, match=message):
        sw.Step(nn.Linear(5, 4), sw.sgd(1.0), criterion)
    with pytest.raises(TypeError, match=message):
        next(sw.scan(nn.Linear(5, 4), criterion, []))
    with pytest.raises(TypeError, match=message):
        sw.check(nn.Linear(5, 4), criterion, (X, CLASSES))


@pytest.mark.parametrize(
    ("criterion", "target", "wanted"),
    [
        (nn.MSELoss(), torch.zeros(N), r"\(7, 1\)"),
        (nn.L1Loss(), torch.zeros(N), r"\(7, 1\)"),
        (nn.BCEWithLogitsLoss(), torch.zeros(N), r"\(7, 1\)"),
        (nn.MSELoss(), torch.zeros(1, 1), r"\(7, 1\)"),
        (nn.CrossEntropyLoss(), torch.zeros(N, 1, dtype=torch.long), r"\(7,\)"),
        (nn.MultiMarginLoss(), torch.zeros(N, 1, dtype=torch.long), r"\(7,\)"),
    ],
)
def test_shapes_that_do_not_fit(criterion, target, wanted):
    outputs = 1 if target.is_floating_point() else 2
    model = nn.Linear(5, outputs).double()
    found = rf"needs a target of shape {wanted} for predictions of shape \(7, {outputs}\); found \({target.shape[0]}"
    with pytest.raises(sw.LossesError, match=found):
        sw.Step(model, sw.sgd(1.0), criterion).run([(X, target)])


def test_shapes_that_do_not_fit_after_batches_that_do():
    step = sw.Step(nn.Linear(5, 4).double(), sw.sgd(1.0), nn.CrossEntropyLoss())
    step.run([(X, CLASSES), (X, CLASSES)])
    with pytest.raises(sw.LossesError, match=r"needs a target of shape \(7,\) for predictions of shape \(7, 4\)"):
        step.run([(X, CLASSES), (X, CLASSES[:, None])])
    with pytest.raises(sw.LossesError, match="needs class indices, or class probabilities"):
        step.run([(X, CLASSES), (X, CLASSES.double())])


def test_a_float_target_of_another_shape_is_no_class_probability():
    message = (
        r"CrossEntropyLoss needs class indices, or class probabilities of shape \(7, 4\); found a target of "
        r"torch.float64 and shape \(7,\)\. Use target.long\(\) for class indices, or nn.MSELoss\(\) for regression"
    )
    with pytest.raises(sw.LossesError, match=message):
        sw.Step(nn.Linear(5, 4).double(), sw.sgd(1.0), nn.CrossEntropyLoss()).run([(X, REAL[:, 0])])


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.MultiMarginLoss()])
@pytest.mark.parametrize("target", [torch.zeros(N, dtype=torch.long), torch.zeros(N, 1)], ids=["labels", "column"])
def test_one_class_gives_no_loss(criterion, target):
    """The loss of a single class is zero, whatever the model predicts."""
    message = r"needs predictions for at least two classes; found shape \(7, 1\), one class, for which the loss is alw"
    with pytest.raises(sw.LossesError, match=message):
        sw.Step(nn.Linear(5, 1).double(), sw.sgd(1.0), criterion).run([(X, target)])


@pytest.mark.parametrize(
    ("batch", "found"), [(X, "found Tensor"), ((X,), "found a tuple of 1"), ({"x": X}, "found dict")]
)
def test_batches_that_are_not_pairs(batch, found):
    with pytest.raises(sw.BatchError, match=rf"a criterion needs batches \(x, y\); {found}\. Write a loss function"):
        sw.Step(nn.Linear(5, 4).double(), sw.sgd(1.0), nn.MSELoss()).run([batch])


# --- the unit of a sample's loss -------------------------------------------------------------------------------------

MEANS = {
    "mse": (nn.MSELoss(), lambda out, y: (out - y).square().mean(1)),
    "l1": (nn.L1Loss(), lambda out, y: (out - y).abs().mean(1)),
    "bce with logits": (
        nn.BCEWithLogitsLoss(),
        lambda out, y: F.binary_cross_entropy_with_logits(out, y, reduction="none").mean(1),
    ),
    "kl, mean": (nn.KLDivLoss(reduction="mean"), lambda out, y: F.kl_div(out, y, reduction="none").mean(1)),
    "mse, images": (nn.MSELoss(), lambda out, y: (out - y).square().mean((1, 2))),
}


@pytest.mark.parametrize("case", MEANS)
@pytest.mark.parametrize("microbatch", [None, 3])
def test_clip_bounds_the_gradient_of_a_samples_mean(case, microbatch):
    """The criterion, and the same loss written as one mean per sample, have the same norms and updates."""
    criterion, written = MEANS[case]
    _, model, target = task(case)
    twin = copy.deepcopy(model)
    options = {"samples": N, "microbatch": microbatch, "transforms": [sw.clip(0.2)]}
    (update,) = sw.Step(model, sw.sgd(1.0), criterion, **options).over([(X, target)])
    (expected,) = sw.Step(twin, sw.sgd(1.0), lambda m, b: written(m(b[0]), b[1]), **options).over([(X, target)])
    for quantity in ("losses", "norms", "weights", "counts"):
        torch.testing.assert_close(getattr(update, quantity), getattr(expected, quantity), rtol=0, atol=1e-12)
    assert update.weights.min() < 1
    after = parameters_to_vector(twin.parameters())
    torch.testing.assert_close(parameters_to_vector(model.parameters()), after, rtol=0, atol=1e-12)


def test_tokens_are_sums_with_counts():
    """Where the denominator depends on the targets, `update.losses` are sums, and `update.counts` are the numbers of
    valid elements.
    """
    criterion, model, target = task("cross entropy, tokens ignored")
    elements = F.cross_entropy(model(X), target, criterion.weight, reduction="none")
    (update,) = sw.Step(model, sw.sgd(1.0), criterion, samples=N, microbatch=2).over([(X, target)])
    torch.testing.assert_close(update.losses, elements.detach().sum(1), rtol=0, atol=1e-12)
    weights = criterion.weight[target.clamp(min=0)] * (target >= 0)
    torch.testing.assert_close(update.counts, weights.sum(1), rtol=0, atol=1e-12)
    assert update.loss == pytest.approx((update.losses.sum() / update.counts.sum()).item(), rel=1e-12)


# --- functions of torch.nn.functional --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "criterion", "case"),
    [
        (F.mse_loss, nn.MSELoss(), "mse"),
        (F.cross_entropy, nn.CrossEntropyLoss(), "cross entropy"),
        (F.nll_loss, nn.NLLLoss(), "nll"),
        (partial(F.cross_entropy, label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.1), "cross entropy"),
        (partial(F.huber_loss, delta=0.7), nn.HuberLoss(delta=0.7), "huber"),
    ],
)
def test_functions_are_taken_as_their_criteria(function, criterion, case):
    _, model, target = task(case)
    expected = criterion(model(X), target).item()
    (update,) = sw.Step(model, sw.sgd(1.0), function, samples=N, microbatch=3).over([(X, target)])
    assert update.loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", CRITERIA)
def test_every_function_is_that_of_its_class(kind):
    assert repr(as_loss_fn(CRITERIA[kind])) == repr(kind())


@pytest.mark.parametrize(
    ("loss_fn", "found"),
    [
        (partial(F.cross_entropy, label_smooting=0.1), "label_smoothing; found label_smooting. Write a loss function"),
        (partial(F.mse_loss, weight=torch.ones(3)), "reduction; found weight. Write a loss function"),
        (partial(F.cross_entropy, None), "label_smoothing; found None. Write a loss function"),
        (nn.CrossEntropyLoss, r"found the class CrossEntropyLoss. Write CrossEntropyLoss\(\)."),
    ],
)
def test_options_that_a_criterion_does_not_have(loss_fn, found):
    model = nn.Linear(4, 3)
    with pytest.raises(TypeError, match=found):
        sw.Step(model, sw.sgd(0.1), loss_fn)


def test_a_function_as_optimizer_in_place_of_the_loss():
    with pytest.raises(TypeError, match="found Linear, function, GradientDescent"):
        sw.Step(nn.Linear(4, 3), F.cross_entropy, sw.sgd(0.1))


def test_other_functions_of_predictions_are_refused():
    message = r"loss_fn must be a function \(model, batch\).*found {}, whose first argument is {!r}\. Write for example"
    for function, name, first in [
        (F.cosine_embedding_loss, "cosine_embedding_loss", "input1"),
        (F.gaussian_nll_loss, "gaussian_nll_loss", "input"),
        (F.ctc_loss, "ctc_loss", "log_probs"),
        (lambda pred, y: (pred - y).square(), "<lambda>", "pred"),
        (lambda out, y: (out - y).square(), "<lambda>", "out"),
        (lambda y_true, y_pred: (y_pred - y_true).square(), "<lambda>", "y_true"),
        (partial(F.gaussian_nll_loss, full=True), "partial", "input"),
    ]:
        with pytest.raises(TypeError, match=message.format(name, first)):
            sw.Step(nn.Linear(5, 4), sw.sgd(1.0), function)


# --- further columns of the batch ------------------------------------------------------------------------------------

WEIGHTS = noise(N).abs()
GROUPS = torch.arange(N) % 3


@pytest.mark.parametrize(
    "transforms",
    [
        [sw.weight(2)],
        [sw.weight(-1)],
        [sw.weight(lambda batch: batch[2])],
    ],
    ids=str,
)
def test_a_column_of_weights_beside_x_and_y(transforms):
    criterion, model, target = task("mse")
    twin = copy.deepcopy(model)
    sw.Step(model, sw.sgd(1.0), criterion, samples=N, microbatch=3, transforms=transforms).run([(X, target, WEIGHTS)])
    (WEIGHTS * (twin(X) - target).square().mean(1)).mean().backward()
    expected = parameters_to_vector(p - p.grad for p in twin.parameters())
    torch.testing.assert_close(parameters_to_vector(model.parameters()), expected, rtol=0, atol=1e-12)


def test_columns_of_groups_and_of_listeners_are_accepted():
    criterion, model, target = task("cross entropy")
    step = sw.Step(model, sw.sgd(1.0), criterion, transforms=[sw.group(2), sw.clip(1.0)])
    step.run([(X, target, GROUPS)])
    step = sw.Step(model, sw.sgd(1.0), criterion)
    step.require(columns={"user": 2})
    (update,) = step.over([(X, target, GROUPS)])
    assert update.columns["user"].tolist() == GROUPS.tolist()
    step.transforms = [sw.weight(3)]
    step.run([(X, target, GROUPS, WEIGHTS)])


@pytest.mark.parametrize("transforms", [[], [sw.clip(1.0)], [sw.weight(3)]], ids=str)
def test_a_column_that_nothing_reads_is_refused(transforms):
    criterion, model, target = task("mse")
    message = (
        r"a criterion needs batches \(x, y\), or further columns that are strings, or that a transform or the ledger "
        r"reads by key; found a list of 4, whose column 2 nothing reads\. Name it, for example with sw\.weight\(2\)"
    )
    with pytest.raises(sw.BatchError, match=message):
        sw.Step(model, sw.sgd(1.0), criterion, transforms=transforms).run([[X, target, WEIGHTS, WEIGHTS]])


@pytest.mark.parametrize("options", [{}, {"microbatch": 2}, {"samples": 3}, {"transforms": [sw.clip(1.0)]}])
def test_columns_of_strings_are_ignored(options):
    criterion, model, target = task("cross entropy")
    other = copy.deepcopy(model)
    names = [f"images/{k}.png" for k in range(len(X))]
    sw.Step(model, sw.sgd(1.0), criterion, **options).run([(X, target, names, tuple(names))] * 3)
    sw.Step(other, sw.sgd(1.0), criterion, **options).run([(X, target)] * 3)
    for p, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, expected)


def test_inputs_may_have_any_structure():
    class Sum(nn.Linear):
        def forward(self, parts):
            return super().forward(parts["a"] + parts["b"])

    torch.manual_seed(0)
    model = Sum(5, C).double()
    expected = nn.CrossEntropyLoss()(model({"a": X, "b": X}), CLASSES).item()
    (update,) = sw.Step(model, sw.sgd(1.0), nn.CrossEntropyLoss(), samples=N, microbatch=2).over(
        [[{"a": X, "b": X}, CLASSES]]
    )
    assert update.loss == pytest.approx(expected, rel=1e-10)


def test_the_criterion_stays_as_it_is_and_may_be_moved_later():
    criterion = nn.CrossEntropyLoss(WEIGHT.float())
    model = nn.Linear(5, C).double()
    step = sw.Step(model, sw.sgd(1.0), criterion)
    assert criterion.reduction == "mean"
    criterion.double()
    expected = criterion(model(X), CLASSES).item()
    (update,) = step.over([(X, CLASSES)])
    assert update.loss == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("microbatch", [None, 3])
def test_a_window_without_a_target_that_counts(microbatch):
    """The criterion itself says NaN."""
    model = nn.Linear(5, C).double()
    step = sw.Step(model, sw.sgd(1.0), nn.CrossEntropyLoss(), microbatch=microbatch)
    with pytest.raises(sw.NonFiniteLossError, match="denominator of a window must be positive and finite"):
        step.run([(X, torch.full((N,), -100))])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_prediction_columns_of_any_dtype_of_labels(dtype):
    model = nn.Linear(5, C).double()
    step = sw.Step(model, sw.sgd(1.0), nn.CrossEntropyLoss())
    step.require(predictions=["label", "margin"])
    logits = model(X).detach()
    (update,) = step.over([(X, CLASSES.to(dtype))])
    own = logits[torch.arange(N), CLASSES]
    others = logits.masked_fill(F.one_hot(CLASSES, C).bool(), -torch.inf).amax(1)
    torch.testing.assert_close(update.columns["margin"], own - others)
    assert update.columns["label"].tolist() == CLASSES.tolist()


# --- targets of the wrong dtype, class indices out of range -----------------------------------------------------------


@pytest.mark.parametrize(
    ("criterion", "target", "message"),
    [
        (
            nn.CrossEntropyLoss(),
            CLASSES.int(),
            r"CrossEntropyLoss needs a target of torch.int64; found torch.int32\. Use",
        ),
        (
            nn.CrossEntropyLoss(),
            CLASSES > 0,
            r"needs a target of torch.int64; found torch.bool\. Use target.long\(\)\.",
        ),
        (
            nn.CrossEntropyLoss(),
            CLASSES + 1,
            r"class indices from 0 to 3 for predictions of shape \(7, 4\); found 1 to 4",
        ),
        (nn.NLLLoss(), CLASSES - 1, r"NLLLoss needs class indices from 0 to 3 .*; found -1 to 2\. Number the classes"),
        (nn.CrossEntropyLoss(ignore_index=0), CLASSES + 1 - (CLASSES == 0).long(), r"from 0 to 3 .*; found 2 to 4\."),
        (
            nn.BCEWithLogitsLoss(),
            ZERO_ONE.long(),
            r"needs a target of torch.float64; found torch.int64\. Use target.to",
        ),
        (nn.BCEWithLogitsLoss(), ZERO_ONE > 0, r"found torch.bool\. Use target.to\(torch.float64\)\."),
    ],
)
def test_targets_of_the_wrong_dtype_or_range(criterion, target, message):
    model = nn.Linear(5, C).double()
    with pytest.raises(sw.LossesError, match=message):
        sw.Step(model, sw.sgd(0.1), criterion).run([(X, target)])


def test_an_error_of_the_model_stays_as_it_is():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        sw.Step(nn.Linear(6, C).double(), sw.sgd(0.1), nn.CrossEntropyLoss()).run([(X, CLASSES)])
    assert not hasattr(caught.value, "__notes__")
