"""Conjugate gradients on the Gauss-Newton matrix, against the matrix from rows of the Jacobian, in float64."""

import pytest
import torch
import torch.nn.functional as F
from plain_loop import batches, loss_fn, make, rows
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.attribution import GaussNewton
from samplewise.testing.case import noise


def explicit_matrix(model, x, y, loss_fn=loss_fn):
    """Mean over samples of J^T H J: a row of J for each output, and H from torch's Hessian of the loss."""
    parameters = list(model.parameters())
    total = 0
    for k in range(len(x)):
        with sdpa_kernel(SDPBackend.MATH):
            outputs = model(x[k : k + 1])
        jacobian = torch.stack(
            [
                torch.cat(
                    [g.flatten() for g in torch.autograd.grad(z, parameters, retain_graph=True, materialize_grads=True)]
                )
                for z in outputs.flatten()
            ]
        )

        def loss(z, k=k, shape=outputs.shape):
            return loss_fn(lambda _: z.view(shape), (x[k : k + 1], y[k : k + 1])).sum()

        total = total + jacobian.T @ torch.autograd.functional.hessian(loss, outputs.detach().flatten()) @ jacobian
    return total / len(x)


def exact_scores(model, train, query, shift, loss_fn=loss_fn):
    matrix = explicit_matrix(model, *train, loss_fn)
    damped = matrix + shift * torch.eye(len(matrix)).double()
    return rows(model, *query, loss_fn) @ torch.linalg.solve(damped, rows(model, *train, loss_fn).T)


class Attention(nn.Module):
    """Tokens (b, t) -> logits (b, t, 3), with an embedding, fused attention and a normalization."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.qkv = nn.Linear(4, 12)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens):
        x = self.tokens(tokens)
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, -1)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def token_losses(model, batch):
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none").mean(1)


def squared_errors(model, batch):
    return (model(batch[0]) - batch[1]).square().mean(1)


def smoothed(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none", label_smoothing=0.1)


def convolutions():
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(3, 2, 2), nn.GELU(), nn.Flatten(), nn.Linear(8, 3)),
    )


def tokens(n):
    return torch.arange(n * 5).reshape(n, 5) * 7 % 11 % 6


MODELS = {  # model, data, loss, labels of sw.ekfac
    "convolutions": (convolutions, lambda n: (noise(n, 1, 6, 6).double(), torch.arange(n) % 3), loss_fn, "expected"),
    "attention": (Attention, lambda n: (tokens(n), tokens(n) % 3), token_losses, "expected"),
    "recurrent": (
        Recurrent,
        lambda n: (noise(n, 4, 3).double(), noise(n, 2).double()),
        squared_errors,
        "expected",
    ),
    "another loss": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)),
        lambda n: (noise(n, 5).double(), torch.arange(n) % 3),
        smoothed,
        "data",
    ),
}


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("name", MODELS)
def test_scores_equal_the_exact_solution(name):
    make_model, data, loss, labels = MODELS[name]
    torch.manual_seed(0)
    model = make_model().double().eval()
    x, y = data(12)
    query = (x[:3], y[:3])
    curvature = sw.ekfac(model, loss, batches(x, y, 5), labels=labels)
    for damping in (None, 3.0):
        multiple = 10 if damping is None else damping  # the default without a run
        wanted = exact_scores(model, (x, y), query, multiple * curvature.mean_eigenvalue, loss)
        found = sw.influence(model, loss, batches(x, y, 5), [query], curvature=curvature, refine=500, damping=damping)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8 * wanted.abs().max())


def test_any_division_of_the_work_gives_the_same_scores(monkeypatch, capsys):
    """Batches, microbatches, batches of queries, layers, and vectors that are multiplied at a time."""
    model, x, y = make(n=20)
    curvature = sw.ekfac(model, loss_fn, [(x, y)])
    options = dict(curvature=curvature, refine=300, damping=3.0)
    wanted = exact_scores(model, (x, y), (x[:5], y[:5]), 3 * curvature.mean_eigenvalue)
    for size, query_size, microbatch in ((20, 5, "auto"), (7, 2, None), (20, 5, 3), (6, 5, sw.auto(memory=900))):
        found = sw.influence(
            *(model, loss_fn, batches(x, y, size), batches(x[:5], y[:5], query_size)), microbatch=microbatch, **options
        )
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-8)
    by_layer = sw.influence(model, loss_fn, [(x, y)], [(x[:5], y[:5])], by="layer", **options)
    assert list(by_layer) == ["0", "2"]
    torch.testing.assert_close(sum(by_layer.values()), wanted, rtol=1e-7, atol=1e-8)
    monkeypatch.setattr("samplewise.attribution.gauss_newton.VECTOR_BYTES", 1)
    one_at_a_time = sw.influence(model, loss_fn, [(x, y)], [(x[:5], y[:5])], **options)
    torch.testing.assert_close(one_at_a_time, wanted, rtol=1e-7, atol=1e-8)


class Unbatched(torch.autograd.Function):
    """Square whose backward pass vmap does not support, because it reads values."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        assert gradient.sum().item() == gradient.sum().item()
        return 2 * x * gradient


def test_operations_without_vmap():
    class Squares(nn.Sequential):
        def forward(self, x):
            return self[1](Unbatched.apply(self[0](x)))

    _, x, y = make(n=10)
    model = Squares(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    curvature = sw.ekfac(model, loss_fn, [(x, y)])
    found = sw.influence(model, loss_fn, [(x, y)], [(x[:2], y[:2])], curvature=curvature, refine=300, damping=1.0)
    wanted = exact_scores(model, (x, y), (x[:2], y[:2]), curvature.mean_eigenvalue)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-8)


def test_stops_at_the_tolerance_or_at_the_limit(capsys):
    model, x, y = make(n=20)
    train = batches(x, y, 8)
    matrix = explicit_matrix(model, x, y)
    gradients = sw.gradients(loss_fn(model, (x[:4], y[:4])), model).full()
    flat = torch.cat([g.flatten(1) for g in gradients.values()], 1)
    ekfac = sw.ekfac(model, loss_fn, train)
    for options, reason in (({"iterations": 3}, "limit of iterations after 3 iterations"), ({}, "tolerance after")):
        curvature = GaussNewton(model, loss_fn, train, ekfac, **{"iterations": 500, "damping": 0.5, **options})
        assert "of conjugate gradients; damping" in repr(curvature)
        solved = torch.cat([s.flatten(1) for s in curvature.solve(gradients).values()], 1)
        assert curvature.damping == 0.5 * ekfac.mean_eigenvalue
        residual = solved @ matrix + curvature.damping * solved - flat
        (stop,) = curvature.stops
        largest = (residual.norm(dim=1) / flat.norm(dim=1)).max().item()
        assert stop.residual == pytest.approx(largest, rel=1e-3, abs=1e-12)
        assert stop.converged == (largest < 2e-12)
        assert f"stopped at the {reason}" in repr(curvature)
        assert f"residual of {largest:.2g}" in repr(curvature) or stop.converged
    loose = GaussNewton(model, loss_fn, train, ekfac, 500, damping=0.5, tolerance=0.01)
    loose.solve(gradients)
    assert loose.stops[0].converged and 1e-4 < loose.stops[0].residual <= 0.01
    capsys.readouterr()
    sw.influence(model, loss_fn, train, [(x[:2], y[:2])], curvature=ekfac, refine=3, damping=0.5)
    assert capsys.readouterr().err.startswith(
        "sw.influence: conjugate gradients stopped at the limit of iterations after 3 iterations, with a relative "
    )


def test_zero_rows_and_unused_parameters():
    model, x, y = make(n=10)
    model.register_parameter("unused", nn.Parameter(torch.zeros(2).double()))
    model[2].bias.requires_grad_(False)
    ekfac = sw.ekfac(model, loss_fn, [(x, y)])
    gradients = sw.gradients(loss_fn(model, (x, y)), model).full()
    gradients = {name: g.index_fill(0, torch.tensor([1]), 0) for name, g in gradients.items()}
    curvature = GaussNewton(model, loss_fn, [(x, y)], ekfac, 300)
    solved = curvature.solve(gradients)
    assert list(solved) == list(gradients)
    assert not any(s[1].any() for s in solved.values()) and solved["unused"].abs().max() < 1e-15
    assert solved["0.weight"][0].any() and curvature.stops[0].converged


def test_rows_share_their_search_directions():
    """Equal rows, multiples and more rows than parameters; as many rows as parameters are solved in few iterations."""
    model, x, y = make(n=80)
    ekfac = sw.ekfac(model, loss_fn, [(x, y)])
    matrix = explicit_matrix(model, x, y)
    gradients = sw.gradients(loss_fn(model, (x, y)), model).full()
    flat = torch.cat([g.flatten(1) for g in gradients.values()], 1)
    assert len(flat) > flat.shape[1]
    for chosen, iterations in ((list(range(80)), 3), ([0, 1, 0, 0], 60), ([5], 60)):
        curvature = GaussNewton(model, loss_fn, [(x, y)], ekfac, 60, damping=1.0)
        solved = curvature.solve(
            {
                name: g[chosen] * torch.arange(1, len(chosen) + 1).double().view(-1, *[1] * (g.dim() - 1))
                for name, g in gradients.items()
            }
        )
        damped = matrix + curvature.damping * torch.eye(len(matrix)).double()
        wanted = torch.linalg.solve(damped, flat[chosen].T).T * torch.arange(1, len(chosen) + 1)[:, None]
        found = torch.cat([s.flatten(1) for s in solved.values()], 1)
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)
        (stop,) = curvature.stops
        assert stop.converged and stop.iterations <= iterations


def test_tiny_gradients_in_float32():
    """Their squares are zero in float32."""
    model, x, y = make(n=10)
    model, x = model.float(), x.float()
    gradients = sw.gradients(loss_fn(model, (x, y)), model).full()
    curvature = GaussNewton(model, loss_fn, [(x, y)], sw.ekfac(model, loss_fn, [(x, y)]), 100)
    solved = curvature.solve(gradients)
    of_tiny = curvature.solve({name: g * 1e-26 for name, g in gradients.items()})
    for name, values in of_tiny.items():
        torch.testing.assert_close(values * 1e26, solved[name], rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------- damping of a run


def train_run(path, model, x, y, optimizer=None, scheduler=None, epochs=4):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = {} if scheduler is None else {"scheduler": scheduler(optimizer)}
    step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples=5, **schedule)
    loader = DataLoader(TensorDataset(x, y), 5, shuffle=True)
    sw.Trainer(step, path, progress=False, log_every=1).fit(loader, epochs=epochs)


def test_damping_of_a_run(tmp_path, capsys):
    model, x, y = make(n=20)
    train_run(tmp_path / "plain", model, x, y)
    ekfac = sw.ekfac(model, loss_fn, [(x, y)])
    curvature = GaussNewton(model, loss_fn, [(x, y)], ekfac, run=tmp_path / "plain")
    assert curvature.damping == pytest.approx(1 / (0.1 * 16))
    assert "damping 0.625 = 1 / (learning rate 0.1 * 16 updates))" in repr(curvature)
    query = (x[:3], y[:3])
    wanted = exact_scores(model, (x, y), query, 1 / 1.6)
    for options in ({"run": tmp_path / "plain"}, {"checkpoints": tmp_path / "plain" / "checkpoints" / "16"}):
        if "checkpoints" in options:
            options = {"checkpoints": max((tmp_path / "plain" / "checkpoints").iterdir())}
        found = sw.influence(model, loss_fn, [(x, y)], [query], curvature=ekfac, refine=200, **options)
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
        assert "damping 0.625 = 1 / (learning rate 0.1 * 16 updates)" in capsys.readouterr().err
    capsys.readouterr()
    sw.influence(*(model, loss_fn, [(x, y)], [query], tmp_path / "plain"), curvature=ekfac, refine=200, damping=1.0)
    assert "= 1 * mean eigenvalue" in capsys.readouterr().err


def test_damping_with_momentum_weight_decay_and_a_schedule(tmp_path):
    model, x, y = make(n=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8, weight_decay=0.01)
    train_run(tmp_path / "run", model, x, y, optimizer, lambda o: torch.optim.lr_scheduler.LinearLR(o, 1, 0.5, 8))
    rates = [0.2 * (1 - 0.5 * min(k, 8) / 8) for k in range(16)]
    curvature = GaussNewton(model, loss_fn, [(x, y)], sw.ekfac(model, loss_fn, [(x, y)]), run=tmp_path / "run")
    assert curvature.damping == pytest.approx(0.2 / sum(rates) + 0.01, rel=0.03)
    assert "(1 - momentum 0.8) / (learning rate 0.1" in repr(curvature)
    assert "* 16 updates) + weight decay 0.01" in repr(curvature)


def test_runs_without_a_rule(tmp_path):
    model, x, y = make(n=10)
    ekfac = sw.ekfac(model, loss_fn, [(x, y)])
    train_run(tmp_path / "adam", model, x, y, torch.optim.AdamW(model.parameters()), epochs=1)
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.2}]
    train_run(tmp_path / "groups", model, x, y, torch.optim.SGD(groups), epochs=1)
    for run, cause in (("adam", "found AdamW in"), ("groups", "found 2 groups of parameters with different settings")):
        with pytest.raises(sw.CheckpointError, match=rf"a training with SGD, .*{cause}.* Pass damping= in place"):
            GaussNewton(model, loss_fn, [(x, y)], ekfac, run=tmp_path / run)
    with pytest.raises(sw.CheckpointError, match="must be a checkpoint or a run directory"):
        GaussNewton(model, loss_fn, [(x, y)], ekfac, run=tmp_path)


# ------------------------------------------------------------- refusals


def test_refusals(tmp_path):
    model, x, y = make(n=10)
    data = [(x, y)]
    ekfac = sw.ekfac(model, loss_fn, data)
    for refine in (0, 2.0, True):
        with pytest.raises(ValueError, match=r"refine must be the largest number of iterations, 1 or more; found"):
            sw.influence(model, loss_fn, data, data, curvature=ekfac, refine=refine)
    for curvature in (None, sw.attribution.hessian(model, loss_fn, data)):
        with pytest.raises(TypeError, match=r"refine needs curvature=sw.ekfac\(...\), .*; found (none|Hessian)"):
            sw.influence(model, loss_fn, data, data, curvature=curvature, refine=5)
    with pytest.raises(ValueError, match=r"run needs refine, .* Pass refine=20"):
        sw.influence(model, loss_fn, data, data, curvature=ekfac, run=tmp_path)
    with pytest.raises(ValueError, match=r"damping must be given by damping= or by run="):
        sw.influence(model, loss_fn, data, data, curvature=ekfac, refine=5, run=tmp_path, damping=1.0)
    with pytest.raises(ValueError, match=r"cosine=True needs a curvature .*; found conjugate gradients"):
        sw.influence(model, loss_fn, data, data, curvature=ekfac, refine=5, cosine=True)
    other = nn.Linear(5, 3).double()
    with pytest.raises(sw.ParameterError, match="the curvature must be of a model with the same trainable parameters"):
        sw.influence(other, loss_fn, data, data, curvature=ekfac, refine=5)


def test_losses_must_depend_on_the_output_only():
    model, x, y = make(n=10)
    ekfac = sw.ekfac(model, loss_fn, [(x, y)])

    def penalized(model, batch):
        return loss_fn(model, batch) + 0.1 * model[0].weight.square().sum()

    def detached(model, batch):
        model(batch[0])
        return loss_fn(model[:], batch)

    for loss in (penalized, detached):
        with pytest.raises(sw.LossesError, match="refine needs losses that depend on the parameters through the outp"):
            sw.influence(model, loss, [(x, y)], [(x, y)], curvature=ekfac, refine=5)
    with pytest.raises(sw.LossesError, match="refine needs a loss_fn that calls the model once; found 2 calls"):
        sw.influence(
            *(model, lambda m, b: loss_fn(m, b) + loss_fn(m, b), [(x, y)], [(x, y)]), curvature=ekfac, refine=5
        )


def test_losses_that_are_not_convex_in_the_output():
    model, x, y = make(n=10)
    ekfac = sw.ekfac(model, loss_fn, [(x, y)])
    with pytest.raises(ValueError, match="plus damping must be positive definite; found a direction of curvature -"):
        sw.influence(
            *(model, lambda m, b: -m(b[0]).square().sum(1), [(x, y)], [(x, y)]), curvature=ekfac, refine=5, damping=0.1
        )


def test_samples_must_be_finite():
    model, x, y = make(n=10)
    ekfac = sw.ekfac(model, loss_fn, [(x, y)])
    bad = x.clone()
    bad[3, 0] = torch.nan
    with pytest.raises(sw.NonFiniteLossError, match=r"losses must be finite on train; found nan\. Remove"):
        sw.influence(model, loss_fn, [(bad, y)], [(x, y)], curvature=ekfac, refine=5)


def test_random_augmentation_is_refused():
    class Augmented:
        def __iter__(self):
            for x, y in data:
                yield x + 0.1 * torch.randn_like(x), y

    model, x, y = make(n=10)
    data = batches(x, y, 5)
    ekfac = sw.ekfac(model, loss_fn, data)
    with pytest.raises(sw.BatchError, match=r"train must yield the same batches in each pass, .* Switch random"):
        sw.influence(model, loss_fn, Augmented(), data, curvature=ekfac, refine=5)
