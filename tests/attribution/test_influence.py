"""Influence against explicit dot products of rows of the Jacobian."""

import copy

import pytest
import torch
from plain_loop import batches, loss_fn, make, rows
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.core import text as progress


@pytest.mark.parametrize("microbatch", ["auto", 2, sw.auto(memory=500)])
def test_dot_products_over_checkpoints(microbatch):
    model, x, y = make(n=12)
    queries = (x[:5] + 0.3, y[:5])
    before = copy.deepcopy(model.state_dict())
    others = [make(seed=seed)[0] for seed in (1, 2)]
    checkpoints = [(m.state_dict(), rate) for m, rate in zip(others, (0.1, 0.3), strict=True)]
    wanted = sum(rate * rows(m, *queries) @ rows(m, x, y).T for m, (_, rate) in zip(others, checkpoints, strict=True))
    found = sw.influence(
        model, loss_fn, batches(x, y, 5), batches(*queries, 3), checkpoints=checkpoints, microbatch=microbatch
    )
    assert found.shape == (5, 12)
    torch.testing.assert_close(found, wanted)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("refine", [None, 300])
def test_several_models_with_a_curvature_each(refine):
    _, x, y = make(n=12)
    models = [make(seed=seed)[0] for seed in range(3)]
    curvatures = [sw.ekfac(model, loss_fn, [(x, y)]) for model in models]
    arguments = loss_fn, batches(x, y, 5), [(x[:4], y[:4])]
    options = {"refine": refine, "damping": 30.0}
    each = [
        sw.influence(model, *arguments, curvature=curvature, **options)
        for model, curvature in zip(models, curvatures, strict=True)
    ]
    assert not torch.allclose(each[0], each[1])
    for several in (models, nn.ModuleList(models), iter(models)):
        found = sw.influence(several, *arguments, curvature=curvatures, **options)
        torch.testing.assert_close(found, sum(each) / 3)
    by_layer = sw.influence(models, *arguments, curvature=curvatures, by="layer", **options)
    torch.testing.assert_close(sum(by_layer.values()), sum(each) / 3)
    checkpoints = [
        (copy.deepcopy(model.state_dict()), rate) for model, rate in zip(models, (0.1, 0.2, 0.3), strict=True)
    ]
    found = sw.influence(models[0], *arguments, checkpoints, curvature=curvatures, **options)
    torch.testing.assert_close(found, 0.1 * each[0] + 0.2 * each[1] + 0.3 * each[2])


def test_several_models_without_curvature():
    _, x, y = make(n=12)
    models = [make(seed=seed)[0] for seed in range(3)]
    wanted = sum(rows(model, x[:4], y[:4]) @ rows(model, x, y).T for model in models) / 3
    torch.testing.assert_close(sw.influence(models, loss_fn, [(x, y)], [(x[:4], y[:4])]), wanted)


def test_refused_numbers_of_models_and_curvatures():
    model, x, y = make(n=12)
    curvature = sw.ekfac(model, loss_fn, [(x, y)])
    other = make(seed=1)[0]
    arguments = loss_fn, [(x, y)], [(x, y)]
    state = [(copy.deepcopy(model.state_dict()), 1.0)] * 2
    with pytest.raises(ValueError, match="a list with one for each model; found one for several models"):
        sw.influence([model, other], *arguments, curvature=curvature)
    for models, curvatures, text in (
        ([model, other], [curvature], "found 1 for 2 models"),
        (iter([model, other]), [curvature], "found 1 for 2 models"),
        (iter([model]), [curvature] * 2, "found 2 for 1 model"),
        (model, [curvature] * 2, "found 2 for 1 model"),
        ([], None, "found none for 0 models"),
    ):
        with pytest.raises(ValueError, match=f"one for each of at least one model, or checkpoint; {text}"):
            sw.influence(models, *arguments, curvature=curvatures)
    with pytest.raises(ValueError, match="found 1 for 2 models"):
        sw.influence(model, *arguments, state, curvature=[curvature])
    with pytest.raises(ValueError, match="checkpoints need a single model"):
        sw.influence([model, other], *arguments, state)
    for models, text in (([model, "other"], "found str"), (7, "found int")):
        with pytest.raises(TypeError, match=text):
            sw.influence(models, *arguments)


def test_default_is_the_current_parameters():
    model, x, y = make()
    full = rows(model, x, y)
    torch.testing.assert_close(sw.influence(model, loss_fn, [(x, y)], [(x[:4], y[:4])]), full[:4] @ full.T)


def test_influence_predicts_the_effect_of_a_small_step():
    """A step on a training sample lowers the query's loss by lr times its influence, to first order."""
    model, x, y = make()
    query, rate = (x[:3] + 0.1, y[:3]), 1e-6
    found = sw.influence(model, loss_fn, [(x, y)], [query])
    for i in (0, 5, 11):
        moved = copy.deepcopy(model)
        sw.Step(moved, sw.sgd(rate), loss_fn)((x[i : i + 1], y[i : i + 1]))
        taken = (loss_fn(model, query) - loss_fn(moved, query)).detach() / rate
        torch.testing.assert_close(taken, found[:, i], rtol=1e-4, atol=1e-6)


def test_the_diagonal_is_self_influence():
    model, x, y = make()
    found = sw.influence(model, loss_fn, [(x, y)], [(x, y)])
    wanted = sw.suspects(model, loss_fn, [(x, y)], score="self_influence").score
    torch.testing.assert_close(found.diagonal(), wanted)


def test_runs_in_evaluation_mode_and_restores_the_mode():
    model, x, y = make()
    dropping = nn.Sequential(*model, nn.Dropout(0.9))
    found = sw.influence(dropping, loss_fn, [(x, y)], [(x, y)])
    assert dropping.training and dropping[3].training
    torch.testing.assert_close(found, sw.influence(model, loss_fn, [(x, y)], [(x, y)]))


def test_parameters_are_restored_after_an_error():
    model, x, y = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(IndexError):
        sw.influence(model, loss_fn, [(x, y + 100)], [(x, y)], checkpoints=[(make(seed=1)[0].state_dict(), 1.0)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_bad_arguments():
    model, x, y = make()
    with pytest.raises(ValueError, match=r"train must be a loader or a list, .* found an iterator"):
        sw.influence(model, loss_fn, iter([(x, y)]), [(x, y)])
    with pytest.raises(ValueError, match="queries must yield at least one batch; found none"):
        sw.influence(model, loss_fn, [(x, y)], [])
    with pytest.raises(ValueError, match="train must yield at least one batch; found none"):
        sw.influence(model, loss_fn, [], [(x, y)])
    with pytest.raises(ValueError, match=r"found one that shuffles. Use shuffle=False"):
        sw.influence(model, loss_fn, DataLoader(TensorDataset(x, y), shuffle=True), [(x, y)])
    with pytest.raises(
        TypeError, match=r"a run directory, or a list of \(state_dict, lr\); found OrderedDict as entry 0"
    ):
        sw.influence(model, loss_fn, [(x, y)], [(x, y)], checkpoints=[model.state_dict()])


def train(run, losses, model, x, y):
    more = list(losses.parameters()) if isinstance(losses, nn.Module) else []
    optimizer = torch.optim.SGD([*model.parameters(), *more], 0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = sw.Step(model, optimizer, losses, scheduler=schedule)
    save = sw.callbacks.ModelCheckpoint(every="1up")
    sw.Trainer(step, run, [save], progress=False).fit(batches(x, y, 4), updates=2)


def test_checkpoints_of_a_run(tmp_path):
    model, x, y = make()
    train(tmp_path / "run", loss_fn, model, x, y)
    total = 0
    for update, lr in ((1, 0.1), (2, 0.05)):
        model.load_state_dict(sw.load_checkpoint(tmp_path / f"run/checkpoints/update-00000000{update}.ckpt")["model"])
        jacobian = rows(model, x, y)
        total = total + lr * jacobian[:3] @ jacobian.T
    found = sw.influence(model, loss_fn, batches(x, y, 5), [(x[:3], y[:3])], checkpoints=str(tmp_path / "run"))
    torch.testing.assert_close(found, total)
    # One checkpoint has the weight 1, as in `attribute`.
    newest = sw.influence(
        model, loss_fn, [(x, y)], [(x[:3], y[:3])], checkpoints=tmp_path / "run/checkpoints/update-000000002.ckpt"
    )
    torch.testing.assert_close(newest, jacobian[:3] @ jacobian.T)


def test_runs_that_cannot_be_used(tmp_path):
    model, x, y = make()
    data = [(x, y)]
    with pytest.raises(sw.CheckpointError, match=r"a readable checkpoint of a trained model; found none in .*none"):
        sw.influence(model, loss_fn, data, data, checkpoints=tmp_path / "none")

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, model, batch):
            return self.scale * loss_fn(model, batch)

    losses = Loss()
    train(tmp_path / "run", losses, model, x, y)
    with pytest.raises(sw.CheckpointError, match=r"a loss without weights; found weights of the loss in .*ckpt"):
        sw.influence(model, losses, data, data, checkpoints=tmp_path / "run")
    other = make(classes=4)[0]
    train(tmp_path / "other", loss_fn, other, x, y)
    with pytest.raises(sw.CheckpointError, match=r"the model must be the one that was trained; found '2\.weight'"):
        sw.influence(model, loss_fn, data, data, checkpoints=tmp_path / "other")


# ------------------------------------------------------------- cosine, layers, curvature


def blocks_of(model, x, y):
    """Rows of the Jacobian by layer."""
    sizes = {name: sum(p.numel() for p in layer.parameters()) for name, layer in model.named_children()}
    parts = rows(model, x, y).split(list(sizes.values()), 1)
    return {name: part for name, part in zip(sizes, parts, strict=True) if part.shape[1]}


def test_cosine():
    model, x, y = make()
    query = (x[:4] + 0.3, y[:4])
    states = [make(seed=seed)[0] for seed in (1, 2)]
    wanted = sum(
        rate * nn.functional.cosine_similarity(rows(m, *query)[:, None], rows(m, x, y)[None], dim=2)
        for m, rate in zip(states, (0.1, 0.3), strict=True)
    )
    checkpoints = [(m.state_dict(), rate) for m, rate in zip(states, (0.1, 0.3), strict=True)]
    found = sw.influence(model, loss_fn, batches(x, y, 5), [query], checkpoints, cosine=True)
    torch.testing.assert_close(found, wanted)


def test_cosine_with_a_zero_gradient_is_zero():
    model, x, y = make()

    def weighted(model, batch):
        return loss_fn(model, batch) * batch[2]

    weights = torch.ones(len(x)).double()
    weights[3] = 0
    found = sw.influence(model, weighted, [(x, y, weights)], [(x, y, weights)], cosine=True)
    assert not found[3].any() and not found[:, 3].any()
    torch.testing.assert_close(found.diagonal(), weights)


def test_by_layer():
    model, x, y = make()
    query = (x[:4] + 0.3, y[:4])
    mine, theirs = blocks_of(model, *query), blocks_of(model, x, y)
    found = sw.influence(model, loss_fn, batches(x, y, 5), batches(*query, 3), by="layer")
    assert list(found) == ["0", "2"]
    for name, part in found.items():
        torch.testing.assert_close(part, mine[name] @ theirs[name].T)
    torch.testing.assert_close(sum(found.values()), sw.influence(model, loss_fn, [(x, y)], [query]))
    for name, part in sw.influence(model, loss_fn, [(x, y)], [query], by="layer", cosine=True).items():
        wanted = nn.functional.cosine_similarity(mine[name][:, None], theirs[name][None], dim=2)
        torch.testing.assert_close(part, wanted)


class Diagonal:
    """Curvature of a user: the identity times the number of the parameter, plus damping."""

    def solve(self, rows, damping=None):
        return {name: each / (k + 1 + (damping or 0)) for k, (name, each) in enumerate(rows.items())}


def test_a_curvature_of_another_class():
    model, x, y = make()
    divisor = torch.cat([torch.full((p.numel(),), k + 1.5) for k, p in enumerate(model.parameters())])
    full = rows(model, x, y)
    wanted = full[:4] / divisor @ full.T
    found = sw.influence(model, loss_fn, [(x, y)], [(x[:4], y[:4])], curvature=Diagonal(), damping=0.5)
    torch.testing.assert_close(found, wanted)
    by_layer = sw.influence(model, loss_fn, [(x, y)], [(x[:4], y[:4])], curvature=Diagonal(), damping=0.5, by="layer")
    torch.testing.assert_close(sum(by_layer.values()), wanted)
    cosines = sw.influence(
        model, loss_fn, [(x, y)], [(x[:4], y[:4])], curvature=Diagonal(), damping=0.5, cosine=True, microbatch=5
    )
    scaled = full / divisor.sqrt()
    torch.testing.assert_close(cosines, nn.functional.cosine_similarity(scaled[:4, None], scaled[None], dim=2))


def test_bad_options():
    model, x, y = make()
    data = [(x, y)]
    with pytest.raises(ValueError, match="by must be None or 'layer'; found 'parameter'"):
        sw.influence(model, loss_fn, data, data, by="parameter")
    with pytest.raises(
        TypeError, match=r"curvature must be the result of sw.ekfac or sw.attribution.hessian, .* found dict"
    ):
        sw.influence(model, loss_fn, data, data, curvature={"solve": 1})
    with pytest.raises(ValueError, match=r"damping needs a curvature; found damping=0.1 without"):
        sw.influence(model, loss_fn, data, data, damping=0.1)
    with pytest.raises(ValueError, match=r"damping must be a multiple of the mean eigenvalue, 0 or more; found -1"):
        sw.influence(model, loss_fn, data, data, curvature=Diagonal(), damping=-1)
    with pytest.raises(ValueError, match="cosine=True with a curvature needs by=None"):
        sw.influence(model, loss_fn, data, data, curvature=Diagonal(), cosine=True, by="layer")


def test_progress_of_slow_passes(monkeypatch, capsys):
    model, x, y = make()
    sw.influence(model, loss_fn, batches(x, y, 6), [(x, y)])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "QUIET", 0.0)
    sw.influence(model, loss_fn, batches(x, y, 6), [(x, y)])
    sw.ekfac(model, loss_fn, batches(x, y, 6))
    found = capsys.readouterr().err.splitlines()
    assert found[0] == "sw.influence, batches: 1 of 2" and "sw.ekfac, pass 2 of 2, batches: 1 of 2" in found
