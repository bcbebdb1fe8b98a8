"""`sw.backward` against loss.backward() and against the loop."""

import gc
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import CASES

import samplewise as sw
from samplewise.engine import strategies
from samplewise.errors import LossesError, NonFiniteGradientError, NonFiniteLossError, TransformError

B, CLASSES = 6, 4


def problem(dtype=torch.float64, dropout=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES)).to(dtype)
    return model, torch.randn(B, 5, dtype=dtype), torch.randint(CLASSES, (B,))


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_grads(model, expected, tolerance=1e-12):
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=tolerance, atol=tolerance)


def clipped_mean(model, x, y, bound, parts=1):
    """Mean of clipped gradients from one backward pass per sample, and the norms."""
    norms = []
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(len(x)):
        row = torch.autograd.grad(F.cross_entropy(model(x[[i]]), y[[i]]), list(model.parameters()))
        norms.append(torch.stack([r.norm() for r in row]).norm())
        for name, r in zip(total, row, strict=True):
            total[name] += r * min(1, bound / norms[-1]) / len(x) / parts
    return total, torch.stack(norms)


class Framework:
    """Framework that divides the loss by accumulation steps, and scales it if it has a scaler."""

    def __init__(self, steps=1, scaler=None):
        self.steps = steps
        self.scaler = scaler

    def backward(self, loss, **options):
        loss = loss / self.steps
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(**options)


@pytest.mark.parametrize("through", [None, Framework(), Framework(3)], ids=["torch", "framework", "accumulating"])
def test_without_transforms_gradients_are_bit_identical(through):
    model, x, y = problem(torch.float32, dropout=0.3)

    def loss():
        torch.manual_seed(1)
        z = model(x)
        return F.cross_entropy(z, y, label_smoothing=0.1), z

    (torch.Tensor.backward if through is None else through.backward)(loss()[0])
    expected = grads(model)
    model.zero_grad()
    value, z = loss()
    stats = sw.backward(value, model, outputs=z, through=through, denominator=B)
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
    assert torch.equal(stats.weights, torch.ones(B))
    assert stats.losses.isnan().all()
    value, z = loss()
    torch.testing.assert_close(stats.norms, B * sw.gradients(value, model, outputs=z).norms())


def test_recording_needs_one_pass(monkeypatch):
    model, x, y = problem()

    def record():
        z = model(x)
        return sw.backward(F.cross_entropy(z, y), model, z, through=Framework(2)).norms

    expected = record()  # also verifies the ownership of gradients, with further passes
    model.zero_grad()
    monkeypatch.setattr(strategies, "backward_past", lambda *_, **__: pytest.fail("another backward pass"))
    assert torch.equal(record(), expected)
    with pytest.raises(pytest.fail.Exception, match="another backward pass"):
        sw.backward(model(x).square().mean(1), model, through=lambda loss: loss.backward())  # cannot retain the graph


@pytest.mark.parametrize("steps", [None, 1, 4])
def test_clip_equals_the_loop(steps):
    model, x, y = problem()
    expected, norms = clipped_mean(model, x, y, 0.5, steps or 1)
    through = None if steps is None else Framework(steps)
    z = model(x)
    stats = sw.backward(F.cross_entropy(z, y), model, z, [sw.clip(0.5)], through, denominator=B)
    assert_grads(model, expected)
    torch.testing.assert_close(stats.norms, norms)
    torch.testing.assert_close(stats.weights, (0.5 / norms).clamp(max=1))
    model.zero_grad()
    losses = F.cross_entropy(model(x), y, reduction="none")
    stats = sw.backward(losses, model, transforms=sw.clip(0.5), through=through, denominator=B)
    assert_grads(model, expected)
    torch.testing.assert_close(stats.norms, norms)
    assert torch.equal(stats.losses, losses.detach())


def test_losses_without_denominator_are_summed():
    model, x, y = problem()
    F.cross_entropy(model(x), y, reduction="sum").backward()
    expected = grads(model)
    model.zero_grad()
    sw.backward(F.cross_entropy(model(x), y, reduction="none"), model)
    assert_grads(model, expected)


def test_passes_accumulate():
    model, x, y = problem()
    expected, _ = clipped_mean(model, x, y, 0.5)
    for rows in (slice(0, 2), slice(2, 6)):
        z = model(x[rows])
        loss = F.cross_entropy(z, y[rows], reduction="sum") / B
        sw.backward(loss, model, z, [sw.clip(0.5)], denominator=B)
    assert_grads(model, expected)


def test_a_gradient_scaler():
    model, x, y = problem()
    expected, norms = clipped_mean(model, x, y, 0.5)
    framework = Framework(2, torch.amp.GradScaler("cpu", init_scale=1024.0))
    z = model(x)
    stats = sw.backward(F.cross_entropy(z, y), model, z, [sw.clip(0.5)], framework, denominator=B)
    torch.testing.assert_close(stats.norms, norms)
    assert_grads(model, {name: g * 512 for name, g in expected.items()})
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)  # a scaler in the loop itself: the scale is in the loss
    model.zero_grad()
    z = model(x)
    stats = sw.backward(scaler.scale(F.cross_entropy(z, y)), model, z, [sw.clip(0.5)], denominator=B / 256)
    torch.testing.assert_close(stats.norms, norms)
    assert_grads(model, {name: g * 256 for name, g in expected.items()})


@pytest.mark.parametrize("through", [lambda framework: framework, lambda framework: framework.backward])
def test_a_gradient_scaler_gets_non_finite_gradients_and_skips_the_update(through):
    model, x, y = problem()
    x[2] = torch.inf
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    framework = Framework(1, torch.amp.GradScaler("cpu", init_scale=8.0))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    z = model(x)
    stats = sw.backward(F.cross_entropy(z, y), model, z, [sw.clip(0.5)], through(framework), denominator=B)
    framework.scaler.step(optimizer)
    framework.scaler.update()
    assert stats.norms.isnan().all()
    assert framework.scaler.get_scale() == 4.0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    z = model(x)
    with pytest.raises(NonFiniteLossError, match="sample 2"):
        sw.backward(F.cross_entropy(z, y), model, z, [sw.clip(0.5)], Framework(), denominator=B)


@pytest.mark.parametrize("transforms", [[], [sw.clip(0.5)]], ids=["recorded", "clipped"])
def test_a_gradient_scaler_of_torch(transforms):
    model, x, y = problem(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected, norms = clipped_mean(model, x, y, 0.5 if transforms else torch.inf)
    z = model(x)
    stats = sw.backward(F.cross_entropy(z, y), model, z, transforms, scaler, denominator=B)
    torch.testing.assert_close(stats.norms, norms)
    scaler.unscale_(optimizer)
    assert_grads(model, expected, 1e-6)
    scaler.step(optimizer)
    scaler.update()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    z = model(x)
    sw.backward(F.cross_entropy(z, y) * 1e38, model, z, transforms, scaler, denominator=B)  # overflows when scaled
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("transforms", [[], [sw.clip(1e-3)]])
def test_a_gradient_scaler_never_gets_gradients_without_the_transforms(transforms, monkeypatch):
    model, x, y = problem()

    def overflow(*arguments, **options):
        raise NonFiniteGradientError("norms must be finite; found inf.")

    monkeypatch.setattr("samplewise.engine.gradients.Gradients.norms", overflow)
    z = model(x)
    losses = F.cross_entropy(z, y, reduction="none")
    through = Framework(scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    stats = sw.backward(losses.mean(), model, z, transforms, through, denominator=B, losses=losses)
    assert stats.norms.isnan().all()
    assert torch.equal(stats.losses, losses)
    expected = torch.autograd.grad(4 * F.cross_entropy(model(x), y), list(model.parameters()))
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient * torch.nan if transforms else gradient, equal_nan=True)


def test_transforms_that_read_losses_counts_and_the_batch():
    model, x, y = problem()
    z = model(x)
    own = F.cross_entropy(z, y, reduction="none")
    weights = torch.rand(B, dtype=torch.float64)
    counts = torch.arange(1.0, B + 1)
    transforms = [lambda losses: losses, lambda counts: counts, sw.weight("w")]
    stats = sw.backward(own.mean(), model, z, transforms, losses=own, counts=counts, batch={"w": weights})
    torch.testing.assert_close(stats.weights, own.detach() * counts * weights)
    kept = grads(model)
    z = model(x)
    with pytest.raises(TransformError, match=r"must get the losses of the samples; .* Pass losses= \(B,\)"):
        sw.backward(F.cross_entropy(z, y), model, z, [lambda losses: losses])
    with pytest.raises(LossesError, match=r"losses must have one value per sample, shape \(6,\); found \(2,\)"):
        sw.backward(F.cross_entropy(z, y), model, z, losses=torch.ones(2))
    with pytest.raises(LossesError, match=r"counts must have one value per sample, shape \(6,\); found \(2,\)"):
        sw.backward(F.cross_entropy(z, y), model, z, counts=torch.ones(2))
    with pytest.raises(TransformError, match=r"must get the batch; found none\. Pass batch="):
        sw.backward(F.cross_entropy(z, y), model, z, [sw.weight("w")])
    assert all(torch.equal(p.grad, kept[name]) for name, p in model.named_parameters())


def test_an_iterator_of_parameters():
    model, x, y = problem()
    expected, norms = clipped_mean(model, x, y, 0.5)
    z = model(x)
    stats = sw.backward(F.cross_entropy(z, y), model.parameters(), z, [sw.clip(0.5)], denominator=B)
    torch.testing.assert_close(stats.norms, norms)
    assert_grads(model, expected)


def test_clip_by_parameter_and_align():
    model, x, y = problem()
    z = model(x)
    stats = sw.backward(F.cross_entropy(z, y), model, z, [sw.clip(0.2, by="parameter")], denominator=B)
    rows = sw.gradients(F.cross_entropy(model(x), y, reduction="none"), model)
    expected = {n: (0.2 / norms).clamp(max=1) for n, norms in rows.norms(by="parameter").items()}
    for name, weights in expected.items():
        torch.testing.assert_close(stats.weights[name], weights)
    assert_grads(model, {name: total / B for name, total in rows.sum(expected).items()})
    kept = grads(model)
    direction = rows.mean()
    z = model(x)
    stats = sw.backward(F.cross_entropy(z, y), model, z, [sw.align(lambda: direction)], denominator=B)
    assert stats.weights.shape == (B,)
    added = {name: p.grad - kept[name] for name, p in model.named_parameters()}
    for name, total in rows.sum(stats.weights).items():
        torch.testing.assert_close(added[name], total / B)


@pytest.mark.parametrize(
    "transform",
    [sw.drop(largest=1), sw.normalize("mean"), sw.group("user"), sw.noise(1.0), sw.weight(torch.ones(B))],
    ids=str,
)
def test_transforms_of_a_whole_update_are_refused(transform):
    model, x, y = problem()
    z = model(x)
    with pytest.raises(TransformError, match=r"must (get all samples of an update|be applied once per update); found"):
        sw.backward(F.cross_entropy(z, y), model, z, [transform])
    assert all(p.grad is None for p in model.parameters())


def test_invalid_arguments():
    model, x, y = problem()
    z = model(x)
    loss = F.cross_entropy(z, y)
    with pytest.raises(LossesError, match="outputs=logits"):
        sw.backward(loss, model)
    for denominator in (0, -2, float("nan"), float("inf"), torch.tensor(float("inf")), None, "8", torch.ones(B)):
        with pytest.raises(ValueError, match=r"denominator must be a positive, finite number, .*; found"):
            sw.backward(loss, model, z, denominator=denominator)
    for count in (-1.0, float("nan"), float("inf"), float("-inf")):
        counts = torch.tensor([1.0] * (B - 1) + [count])
        with pytest.raises(LossesError, match=f"counts must be finite, and zero or positive; found {count:g}"):
            sw.backward(loss, model, z, [sw.clip(1.0, per_count=True)], denominator=B, counts=counts)
    with pytest.raises(TypeError, match=r"through must be an Accelerator, a Fabric, .*; found str"):
        sw.backward(loss, model, z, through="accelerator")
    with pytest.raises(TypeError, match="found that it computed no gradient"):
        sw.backward(loss, model, z, through=lambda loss: None)
    with pytest.raises(LossesError, match="losses must be the first argument"):
        sw.backward(model, loss)
    for name in ("losses", "counts"):
        with pytest.raises(LossesError, match=rf"{name} must have one value per sample, shape \(6,\); found \(2,\)"):
            sw.backward(loss, model, z, **{name: torch.ones(2)})
    with pytest.raises(LossesError, match="losses must be left out if the loss has one value per sample"):
        sw.backward(z.sum(1), model, losses=torch.ones(B))
    assert all(p.grad is None for p in model.parameters())


def test_eval_mode_is_noticed():
    """As by a step, in the first pass and after an evaluation that did not call train()."""
    x = torch.randn(4, 3)

    def run(model):
        sw.backward(model(x).square().sum(1), model, transforms=[sw.clip(1.0)])

    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    run(model)
    model.eval()
    with pytest.warns(sw.TrainingWarning, match="modules are in eval mode while training: the model"):
        run(model)
    model.train()
    run(model)
    part = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    part[1].eval()
    with pytest.warns(sw.TrainingWarning, match="modules are in eval mode while training: 1"):
        run(part)
    frozen = nn.Sequential(nn.Linear(3, 3).requires_grad_(False).eval(), nn.BatchNorm1d(3).eval(), nn.Linear(3, 1))
    run(frozen)  # frozen modules and BatchNorm are meant to be in eval mode


def test_a_model_whose_ownership_is_probed():
    """The probe has computed the gradients already; the ordinary backward pass is still run."""
    model, inputs = CASES["per_sample_kernels_by_grouped_convolution"].build()
    model(*inputs).square().sum().backward()
    expected = grads(model)
    model.zero_grad()
    recorded = sw.backward(model(*inputs).square().sum(1), model)
    assert_grads(model, expected)
    assert recorded.norms.shape == (len(inputs[0]),)


# --- the graph is freed, as in torch ----------------------------------------------------------------------------------

FREED = r"sw\.backward\(\) has freed the graph: ask before it, or use sw\.backward\(retain_graph=True\)|second time"


@pytest.mark.parametrize("through", [None, Framework(2), lambda loss: loss.backward()], ids=["torch", "class", "def"])
@pytest.mark.parametrize("transforms", [(), [sw.clip(0.5)], [sw.clip(0.5, by="parameter")]], ids=str)
@pytest.mark.parametrize("scalar", [False, True])
def test_the_graph_is_freed(through, transforms, scalar):
    model, x, y = problem()
    weights = torch.linspace(0.5, 1, B, dtype=torch.float64)
    held = ref(weights)
    z = model(x)
    losses = F.cross_entropy(z, y, reduction="none") * weights
    del weights
    loss = losses.mean() if scalar else losses
    sw.backward(loss, model, z if scalar else None, transforms, through, denominator=B)
    gc.collect()
    assert held() is None
    with pytest.raises(RuntimeError, match=FREED):
        loss.sum().backward()


@pytest.mark.parametrize("transforms", [(), [sw.clip(0.3)]], ids=str)
def test_two_losses_of_one_trunk(transforms):
    """As in torch, the first pass must retain the graph; each pass has its own transforms."""
    model, x, _ = problem()
    heads = [nn.Linear(CLASSES, 2).double() for _ in range(2)]
    both = nn.ModuleList([model, *heads])

    def losses(hidden):
        return [head(hidden).square().sum(1) for head in heads]

    first, second = losses(model(x))
    sw.backward(first, both, transforms=transforms)
    with pytest.raises(RuntimeError, match=FREED):
        sw.backward(second, both, transforms=transforms)
    both.zero_grad()
    for loss in losses(model(x)):
        rows = [torch.autograd.grad(one, list(both.parameters()), retain_graph=True, allow_unused=True) for one in loss]
        for row in rows:
            norm = torch.stack([r.norm() for r in row if r is not None]).norm()
            scale = min(1.0, 0.3 / norm) if transforms else 1.0
            for p, r in zip(both.parameters(), row, strict=True):
                if r is not None:
                    p.grad = r * scale if p.grad is None else p.grad + r * scale
    expected = grads(both)
    both.zero_grad()
    first, second = losses(model(x))
    sw.backward(first, both, transforms=transforms, retain_graph=True)
    sw.backward(second, both, transforms=transforms)
    assert_grads(both, expected)
    with pytest.raises(RuntimeError, match=FREED):
        sw.backward(first, both, transforms=transforms)


def test_a_framework_that_cannot_retain_the_graph():
    model, x, y = problem()
    losses = F.cross_entropy(model(x), y, reduction="none")
    with pytest.raises(TypeError, match=r"through must accept retain_graph, as loss\.backward does"):
        sw.backward(losses, model, through=lambda loss: loss.backward(), retain_graph=True)


def test_representation():
    layer = nn.Linear(1, 1, bias=False).double()
    x = torch.tensor([[1.0], [4.0], [2.0]], dtype=torch.float64)
    shown = "BackwardResult(3 samples, median norm 2, largest 4, {} with weights other than 1)"
    assert repr(sw.backward(layer(x)[:, 0], layer)) == shown.format(0)
    assert repr(sw.backward(layer(x)[:, 0], layer, transforms=[sw.clip(3.0)])) == shown.format(1)
    assert repr(sw.backward(layer(x)[:, 0], layer, transforms=[sw.clip(1.5, by="parameter")])) == shown.format(2)


@pytest.mark.parametrize(
    "mean", [F.cross_entropy, lambda z, y: F.cross_entropy(z, y, reduction="none").mean()], ids=["criterion", "mean"]
)
def test_a_forgotten_denominator_is_a_warning(mean):
    model, x, y = problem()
    z = model(x)
    message = rf"the loss is a mean, but denominator is 1: .* Pass denominator={B}, the number of samples"
    with pytest.warns(sw.TrainingWarning, match=message):
        sw.backward(mean(z, y), model, z, [sw.clip(0.5)])
    z = model(x)
    sw.backward(mean(z, y), model, z, [sw.clip(0.5)])  # once per model
    for arguments in (
        {"transforms": [sw.clip(0.5)], "denominator": B},
        {"transforms": [sw.weight(lambda batch: batch)], "batch": torch.ones(B)},  # does not depend on norms
        {},
    ):
        model, x, y = problem()
        z = model(x)
        sw.backward(mean(z, y), model, z, **arguments)
    model, x, y = problem()
    z = model(x)
    sw.backward(F.cross_entropy(z, y, reduction="sum"), model, z, [sw.clip(0.5)])
    model, x, y = problem()
    z = model(x[:1])
    sw.backward(mean(z, y[:1]), model, z, [sw.clip(0.5)])  # a mean of one sample
