"""Waits of the host for the device: none in an update that the device may skip, one where the host must decide."""

import copy

import pytest
import sim_device as sim
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import samplewise as sw
from samplewise.engine.deferred_checks import DeferredChecks, all_finite_flag, finite_tensors

DEVICE = "sim"
B = 4


def classified(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def tokens(model, batch):
    """Sums over tokens, and their number."""
    losses = classified(model, batch)
    return 3 * losses, torch.full_like(losses, 3.0)


def batch(seed=0, device=DEVICE, samples=B):
    g = torch.Generator().manual_seed(seed)
    x, y, w = torch.randn(samples, 5, generator=g), torch.randint(0, 3, (samples,), generator=g), torch.ones(samples)
    return {"x": x.to(device), "y": y.to(device), "w": w.to(device), "i": y.to(device), "user": [0, 1] * (samples // 2)}


def net(device=DEVICE):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).to(device)


def make_step(transforms=(), loss_fn=classified, fused=True, device=DEVICE, model=net, **options):
    model = model(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return sw.Step(model, optimizer, loss_fn, transforms=transforms, scheduler=scheduler, **options)


def waits_of(step, updates=2):
    """Waits of some updates after the first ones."""
    data = [batch(k, samples=step.samples or B) for k in range(updates)]
    step.run(data)
    with sim.counted_waits() as found:
        totals = step.run(data)
    assert (totals.updates, totals.skipped) == (updates, 0)
    return dict(found)


def towards(by):
    """Alignment with a gradient that is computed for each window."""
    reference = net()
    first = batch()
    return sw.align(lambda: sw.gradients(classified(reference, first), reference).mean(), kind=by)


TRANSFORMS = {
    "none": list,
    "clip": lambda: [sw.clip(0.5)],
    "clip by parameter": lambda: [sw.clip(0.5, by="parameter")],
    "clip automatic": lambda: [sw.clip(0.5, mode="automatic")],
    "clip per count": lambda: [sw.clip(0.5, per_count=True)],
    "normalize": lambda: [sw.normalize()],
    "normalize to the mean": lambda: [sw.normalize("mean")],
    "weight by losses": lambda: [sw.weight(lambda losses: torch.exp(-losses))],
    "weight by norms": lambda: [sw.weight(lambda norms: 1 / (1 + norms), renormalize=True)],
    "weight of the window": lambda: [sw.weight(lambda losses: (losses <= losses.mean()).float(), window=True)],
    "weight in the batch": lambda: [sw.weight("w")],
    "weight by position": lambda: [sw.weight(torch.rand(8))],
    "weight by index": lambda: [sw.weight(torch.rand(9, device=DEVICE), index="i")],
    "drop": lambda: [sw.drop(largest=1, smallest=1)],
    "drop above a quantile": lambda: [sw.drop(quantile=0.8, score="losses")],
    "align": lambda: [towards("cosine")],
    "align by dot": lambda: [towards("dot")],
    "group": lambda: [sw.group("user"), sw.clip(5.0)],
    "group weighted samples": lambda: [sw.clip(1.0), sw.group("user"), sw.normalize("mean")],
    "noise": lambda: [sw.clip(0.5), sw.noise(0.1)],
}
transforms = pytest.mark.parametrize("name", TRANSFORMS)
ONE = {("item", "step/apply.py finite"): 2}  # one for each of two updates


def places(found):
    """The waits without line numbers."""
    return {(kind, place.partition(":")[0] + " " + place.partition(" ")[2]): n for (kind, place), n in found.items()}


@pytest.mark.sweep(1 / 2)
@transforms
def test_updates_that_the_device_may_skip_wait_for_nothing(name):
    step = make_step(TRANSFORMS[name](), samples=8, microbatch=4, on_nonfinite="skip")
    assert waits_of(step) == {}


@pytest.mark.sweep(1 / 3)
@transforms
def test_other_updates_wait_once(name):
    chain = [sw.weight(torch.rand(4))] if name == "weight by position" else TRANSFORMS[name]()  # windows of 4 samples
    # Which samples a group has is read from indices: a claim about them is verified with one more wait.
    more = {("item", "engine/ownership/local_probe.py hold"): 2} if name.startswith("group") else {}
    assert places(waits_of(make_step(chain, fused=False))) == {**ONE, **more}


OPTIONS = {
    "raise": {},
    "counts": {"loss_fn": tokens, "transforms": [sw.clip(0.5, per_count=True)]},
    "recorded norms": {"record": "norms"},
    "max_grad_norm": {"max_grad_norm": 0.1},
    "predictions": {"loss_fn": nn.CrossEntropyLoss(), "record": "norms"},
    "ignore": {"on_nonfinite": "ignore", "transforms": [sw.clip(0.5)], "fused": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_wait_for_nothing(name):
    step = make_step(**OPTIONS[name])
    if name == "predictions":
        step.require(predictions=["prediction", "margin"])
        data = [(b["x"], b["y"]) for b in (batch(), batch(1))]
        step.run(data)
        with sim.counted_waits() as found:
            step.run(data)
        assert not found
    else:
        assert waits_of(step) == {}


def test_the_loss_scale_waits_once():
    assert places(waits_of(make_step([sw.clip(0.5)], precision="16-mixed"))) == ONE


# ------------------------------------------------------------------------------------------------------- the engine


class Chunked(nn.Module):
    """Three thirds of one weight, used one by one, and an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.weight = nn.Parameter(torch.randn(24, 8) / 3)

    def forward(self, tokens):
        q, k, v = (F.linear(self.embedding(tokens), w) for w in self.weight.chunk(3))
        return (torch.tanh(q) * k + v).mean((1, 2))


def clipped(losses, model):
    model.zero_grad()
    g = sw.gradients(losses, model)
    norms = g.norms()
    g.backward((0.1 / norms).clamp(max=1))
    return norms


ENGINE = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), lambda: torch.randn(B, 5)),
    "cnn": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()), lambda: torch.randn(B, 3, 6, 6)),
    "views and lookups": (Chunked, lambda: torch.randint(0, 50, (B, 6))),
}


def clipped_mean(losses, model):
    model.zero_grad()
    total = losses.mean()
    return sw.backward(total, model, losses, [sw.clip(0.1)], lambda t: t.backward(), denominator=len(losses)).norms


@pytest.mark.parametrize("clipped", [clipped, clipped_mean])
@pytest.mark.parametrize("name", ENGINE)
def test_a_clipped_backward_waits_once(name, clipped, waits):
    torch.manual_seed(0)
    make, data = ENGINE[name]
    model, x = make().double(), data()
    x = x.double() if x.is_floating_point() else x
    expected = clipped(model(x).flatten(1).sum(1) if name != "views and lookups" else model(x), model)
    gradients = [p.grad for p in model.parameters()]
    model.to(DEVICE)
    x = x.to(DEVICE)
    for _ in range(2):
        losses = model(x).flatten(1).sum(1) if name != "views and lookups" else model(x)
        waits()
        norms = clipped(losses, model)
        found = waits()
    assert places(found) == {("item", "engine/deferred_checks.py settle"): 1}
    torch.testing.assert_close(norms.cpu(), expected)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad.cpu(), gradient)


def test_sums_of_pairs_of_tokens_need_a_wait_and_are_exact_where_they_cancel(waits):
    """The gradients of sample 1 cancel: its tokens come in pairs of opposite losses."""
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    x = torch.randn(B, 4, 40)
    x[1, 2:] = x[1, :2] + 1e-4
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0])

    def norms(model, x, signs):
        return sw.gradients((model(x).square().sum(2) * signs).sum(1), model).norms()

    exact = norms(model.double(), x.double(), signs.double())
    model.float().to(DEVICE)
    for _ in range(2):
        waits()
        found = norms(model, x.to(DEVICE, non_blocking=True), signs.to(DEVICE, non_blocking=True))
        waited = waits()
    assert ("nonzero", "engine/quantities.py _scaled_norms_by_name") in places(waited)
    torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("size", [1e-12, 1e-25])
def test_small_norms_are_exact_without_a_wait(size, waits):
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    x = torch.randn(B, 6)
    exact = sw.gradients(model.double()(x.double()).sum(1) * size, model).norms()
    model.float().to(DEVICE)
    losses = model(x.to(DEVICE)).sum(1) * size
    waits()
    found = sw.gradients(losses, model).norms(), sw.gradients(losses, model).norms(by="parameter")
    assert not {place for _, place in waits() if "gradients.py" in place}
    torch.testing.assert_close(found[0].cpu().double(), exact, rtol=1e-5, atol=0)
    together = torch.stack([norms.cpu().double() for norms in found[1].values()]).norm(dim=0)
    torch.testing.assert_close(together, exact, rtol=1e-5, atol=0)


# ------------------------------------------------------------------------------------------------------ wrong values


def bad_batch(device):
    spoiled = batch(device=device)
    spoiled["x"][2, 1] = torch.nan
    return spoiled


def huge_batch(device):
    spoiled = batch(device=device)
    spoiled["x"][2] = 1e30
    return spoiled


def outside(device):
    spoiled = batch(device=device)
    spoiled["i"][3] = 9
    return spoiled


def steep(model, batch):
    """A gradient of 1e30 times the input, whose norm overflows."""
    return model(batch["x"])[:, 0] * 1e20 * batch["w"]


def linear(device):
    torch.manual_seed(0)
    return nn.Linear(5, 3).to(device)


WRONG = {
    "loss": (bad_batch, dict(transforms=[sw.clip(0.5)])),
    "loss of the window": (bad_batch, dict(transforms=[sw.drop(largest=1)], microbatch=2)),
    "loss without transforms": (bad_batch, {}),
    "norm": (huge_batch, dict(transforms=[sw.clip(0.5)], loss_fn=steep, model=linear)),
    "weight": (batch, dict(transforms=[sw.weight(lambda losses: losses / (losses - losses))])),
    "group": (bad_batch, dict(transforms=[sw.group("user"), sw.clip(0.5)])),
}


def error_of(make, device, fused, options):
    """Type and message of the error of the second update, which must not change parameters or counters."""
    step = make_step(device=torch.device(device), fused=fused, **{"recheck": False, **options})
    first = {} if "transforms" not in options else {"transforms": step.transforms}
    step.transforms = ()
    step.run([batch(device=device)])
    for name, value in first.items():
        setattr(step, name, value)
    step._windows.checks.pending.clear()  # as in later updates
    before = [p.detach().cpu().clone() for p in step.model.parameters()]
    counters = vars(step.counters).copy()
    with pytest.raises(sw.SamplewiseError) as found:
        [update.loss for update in step.over([make(device=device)])]
    assert all(torch.equal(p.cpu(), q) for p, q in zip(step.model.parameters(), before, strict=True))
    assert vars(step.counters) == counters
    return type(found.value), str(found.value)


@pytest.mark.parametrize("fused", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_raise_the_errors_of_the_cpu(name, fused):
    make, options = WRONG[name]
    kind, message = error_of(make, "cpu", False, options)
    found = error_of(make, "sim", fused, options)
    assert found[0] is kind
    assert found[1].replace("nan", "inf") == message.replace("nan", "inf")


def test_indices_outside_of_the_weights():
    step = make_step([sw.weight(torch.rand(9, device=DEVICE), index="i")])
    step.run([batch()])
    with pytest.raises(sw.TransformError, match=r"batch\['i'\] must hold sample indices from 0 to 8; found: 9."):
        step.run([outside(DEVICE), batch()])


def test_weights_and_losses_of_a_backward():
    model = net()
    losses = classified(model, batch())
    weights = torch.ones(B, device=DEVICE)
    weights[1] = torch.nan
    with pytest.raises(sw.ParameterError, match="weights must be finite; found nan at sample 1"):
        sw.gradients(losses, model).backward(weights)
    bad = sw.gradients(classified(model, bad_batch(DEVICE)), model)
    with pytest.raises(sw.NonFiniteLossError, match="losses must be finite; found nan at sample 2"):
        bad.backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_refused_call_leaves_the_gradients_usable():
    model = net()
    g = sw.gradients(classified(model, batch()), model)
    with pytest.raises(sw.ParameterError, match="weights must be finite"):
        g.backward(torch.full((B,), torch.nan, device=DEVICE))
    g.backward()
    expected = sw.gradients(classified(model, batch()), model).sum()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.cpu(), expected[name].cpu())


RESULTS = {
    "gram": lambda g: g.gram(),
    "gram of two": lambda g: sw.gradients(classified(g.model, batch()), g.model).gram(g),
    "project": lambda g: g.project(2),
    "row": lambda g: g[0],
    "rows of a parameter": lambda g: g["0.weight"],
    "norms, then rows": lambda g: (g.norms(), g.full()),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_without_a_check_of_their_own_check_the_losses(name):
    model = net()
    g = sw.gradients(classified(model, bad_batch(DEVICE)), model)
    g.model = model
    for _ in range(2):  # also after an error
        with pytest.raises(sw.NonFiniteLossError, match="losses must be finite; found nan at sample 2"):
            RESULTS[name](g)


def test_checks_compare_values_of_different_dtypes():
    small, large = torch.ones(2, dtype=torch.float16, device=DEVICE), torch.full((2,), 1e5, device=DEVICE)
    assert bool(all_finite_flag([small, large]))
    assert not bool(all_finite_flag([small, large / 0]))


def test_checks_do_not_keep_the_tensors():
    checks = DeferredChecks()
    x = torch.ones(3, device=DEVICE)
    storage = StorageWeakRef(sim.raw(x).untyped_storage())
    checks.add_tensors(finite_tensors, {"x": x})
    assert not storage.expired()
    del x
    assert storage.expired() and checks


def test_an_index_outside_of_the_weights_is_not_ignored():
    step = make_step([sw.weight(torch.rand(9, device=DEVICE), index="i")], on_nonfinite="ignore", fused=False)
    step.run([batch(), outside(DEVICE)])
    assert all(p.isnan().all().cpu() for p in step.model.parameters())


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chain", [[], [sw.clip(0.5)], [sw.drop(largest=1)]], ids=str)
def test_skipped_updates_leave_no_trace(fused, chain):
    data = [batch(1), bad_batch(DEVICE), batch(2), batch(3)]
    step, twin = (make_step(chain, fused=fused, on_nonfinite="skip", microbatch=2) for _ in range(2))
    updates = list(step.over(data))
    twin.run([data[0], *data[2:]])
    assert [update.skipped for update in updates] == [False, True, False, False]
    assert [update.index for update in updates] == [0, 1, 1, 2]
    assert step.scheduler.get_last_lr() == twin.scheduler.get_last_lr()
    for p, q in zip(step.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(p.cpu(), q.cpu())


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def test_a_skipped_first_update_creates_no_state():
    """The fused kernel of SGD leaves the momentum that it creates without values."""
    model = net()
    optimizer = momentum(model)
    step = sw.Step(model, optimizer, classified, on_nonfinite="skip", recheck=False)
    step.run([bad_batch(DEVICE)])
    assert optimizer.state
    assert step.counters.skipped == 1
    assert not optimizer.state


def test_settings_changed_by_hand_outlast_a_skipped_update():
    step = make_step(on_nonfinite="skip", recheck=False)
    optimizer, scheduler = step.optimizer, step.scheduler
    step.run([bad_batch(DEVICE)])
    assert optimizer.param_groups[0]["lr"] == 0.01 * 0.9
    optimizer.param_groups[0]["weight_decay"] = 0.5
    assert step.counters.skipped == 1
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (0.01, 0)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    step.run([bad_batch(DEVICE)])
    optimizer.param_groups[0]["lr"] = 0.2
    assert step.counters.skipped == 2
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (0.2, 0)


def test_a_rate_in_a_tensor_is_restored():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = sw.Step(model, optimizer, classified, scheduler=scheduler, on_nonfinite="skip", recheck=False)
    step.run([bad_batch(DEVICE)])
    assert optimizer.param_groups[0]["lr"].item() == 0.25
    assert step.counters.skipped == 1
    assert optimizer.param_groups[0]["lr"].item() == 0.5


class Halving:
    """Scheduler without a state, which cannot be undone."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.param_groups[0]["lr"] /= 2


def test_the_host_decides_if_the_scheduler_cannot_be_undone():
    model = net()
    optimizer = momentum(model)
    step = sw.Step(model, optimizer, classified, scheduler=Halving(optimizer), on_nonfinite="skip", recheck=False)
    step.run([bad_batch(DEVICE), batch()])
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert (step.counters.updates, step.counters.skipped) == (1, 1)


def test_a_norm_that_overflows_is_not_clipped_to_zero():
    model = linear(DEVICE)
    step = sw.Step(model, momentum(model), lambda m, b: m(b["x"])[:, 0] * 1e25, max_grad_norm=1.0, recheck=False)
    with pytest.raises(sw.NonFiniteGradientError, match="in the norm of the update's gradient, whose squares overflow"):
        _ = step(batch())[0].loss


def test_an_error_is_raised_once():
    step = make_step(recheck=False)
    (update,) = step.over([bad_batch(DEVICE)])
    assert "Sequential" in repr(step)
    with pytest.raises(sw.NonFiniteLossError):
        _ = update.loss
    assert (step.counters.updates, step.counters.samples) == (0, 0)
    list(step.over([bad_batch(DEVICE)]))
    with pytest.raises(sw.NonFiniteLossError):
        _ = step.counters
    step.run([batch()])
    assert (step.counters.updates, step.counters.samples) == (1, B)


def test_copies_of_a_step_whose_last_update_is_undecided():
    step = make_step(on_nonfinite="skip", recheck=False)
    step.run([batch(), bad_batch(DEVICE)])
    twin = copy.deepcopy(step)
    for each in (twin, step):
        assert (each.counters.updates, each.counters.skipped, each.scheduler.last_epoch) == (1, 1, 1)
        each.run([batch(1)])
    for p, q in zip(step.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(p.cpu(), q.cpu())


# ------------------------------------------------------------------------------------------------------- the trainer


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        return {"x": torch.randn(5, generator=g), "y": index % 3, "id": index}


class Between:
    """Callback that counts the waits of updates between two log lines."""

    def __init__(self):
        self.found = []

    def on_update(self, update):
        if update.index == 1:
            sim.WAITS.clear()
        if update.index == 7:
            self.found.append(dict(sim.WAITS))


def test_the_trainer_and_the_ledger_wait_for_nothing_between_two_log_lines(tmp_path):
    step = make_step([sw.clip(0.5)], on_nonfinite="skip")
    between = Between()
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
    trainer = sw.Trainer(
        step, callbacks=[between, sw.Ledger(tmp_path / "run")], device="sim", log_every="10up", progress=False
    )
    trainer.fit(loader, updates=16)
    assert [places(found) for found in between.found] == [{}]
    assert sw.read_ledger(tmp_path / "run").num_rows == 64
