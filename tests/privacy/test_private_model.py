"""What a private model must not do in a forward pass, and parameters of all shapes and dtypes."""

import pytest
import torch
from private_runs import ACCURACY, by_hand, data, gradient, loss_fn, make, net, of_samples, plan, train
from torch import nn
from torch.utils.data import TensorDataset

import samplewise as sw
from samplewise.errors import PrivacyError

pytest.importorskip("dp_accounting")

PARAMETERS = "the parameters of a private model must change in updates only.* changed, added(, frozen)? or removed "
BUFFERS = "the buffers of a private model must not change in training.* changed, added(, frozen)? or removed "
EXTRA = "the extra state of a private model must not change in training.*get_extra_state in "
LARGE = 2**20 + 1  # elements: not copied if frozen


class Wrapped(nn.Module):
    """`net`, with a method that sees the inputs."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.shift = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        self.prepare()

    def prepare(self): ...

    def see(self, x): ...

    def forward(self, x):
        self.see(x.detach())
        return self.inner(x + self.shift)


class DataDependentInit(Wrapped):
    """Initialized from the first batch, in place."""

    done = False

    def see(self, x):
        if not self.done and self.training:
            self.done = True
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))


class ThroughData(DataDependentInit):
    def see(self, x):
        if self.training:
            self.shift.data.sub_(x.mean(0))


class ThroughSetattr(Wrapped):
    def see(self, x):
        if self.training:
            self.shift = nn.Parameter(-x.mean(0))


class FrozenSmall(Wrapped):
    def prepare(self):
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)

    def see(self, x):
        self.scale.data.mul_(1 + x.std(0))


class FrozenLarge(Wrapped):
    def prepare(self):
        self.scale = nn.Parameter(torch.ones(LARGE), requires_grad=False)

    def see(self, x):
        with torch.no_grad():
            self.scale[0] = x.mean()


class FrozenLargeThroughData(FrozenLarge):
    def see(self, x):
        self.scale.data[0] = 1 + x.abs().mean()


class LateParameter(Wrapped):
    def see(self, x):
        if not hasattr(self, "seen"):
            self.seen = nn.Parameter(x.mean(0), requires_grad=False)


class OfAModule(Wrapped):
    """Writes into a parameter of another module."""

    def see(self, x):
        with torch.no_grad():
            self.inner[0].bias += x.mean() * self.training


class LateBuffer(Wrapped):
    def see(self, x):
        if not hasattr(self, "seen"):
            self.register_buffer("seen", x.mean(0))


class NotPersistent(Wrapped):
    def see(self, x):
        if not hasattr(self, "seen"):
            self.register_buffer("seen", x.mean(0), persistent=False)


class LateModule(Wrapped):
    def see(self, x):
        if not hasattr(self, "statistics"):
            self.statistics = nn.BatchNorm1d(6).double()
            self.statistics.running_mean.copy_(x.mean(0))


class FromNone(Wrapped):
    def prepare(self):
        self.register_buffer("seen", None)

    def see(self, x):
        self.seen = x.mean(0)


class ReplacedBuffer(Wrapped):
    def prepare(self):
        self.register_buffer("seen", torch.zeros(6, dtype=torch.float64))

    def see(self, x):
        self.seen = x.mean(0)


class LargeBuffer(Wrapped):
    def prepare(self):
        self.register_buffer("seen", torch.zeros(LARGE))

    def see(self, x):
        self.seen.data[5] = x.mean()


class ExtraState(Wrapped):
    def prepare(self):
        self.means = []

    def see(self, x):
        self.means.append(x.mean().item())

    def get_extra_state(self):
        return {"means": self.means}

    def set_extra_state(self, state):
        self.means = state["means"]


class OtherShape(ReplacedBuffer):
    def see(self, x):
        self.seen.data = x.flatten()[:7].clone()


class OtherDtype(ReplacedBuffer):
    def see(self, x):
        self.seen.data = self.seen.data.float()


class RemovedBuffer(ReplacedBuffer):
    def see(self, x):
        self._buffers.pop("seen", None)


class RemovedParameter(FrozenSmall):
    def see(self, x):
        self._parameters.pop("scale", None)


class Freezing(Wrapped):
    def see(self, x):
        self.shift.requires_grad_(False)


class Unfreezing(FrozenSmall):
    def see(self, x):
        self.scale.requires_grad_(True)


class InBackward(Wrapped):
    """A hook writes gradients of samples into a buffer."""

    def prepare(self):
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        hidden = self.inner[0](x + self.shift)
        hidden.register_hook(lambda gradient: self.seen.add_(gradient.norm()) and None)
        return self.inner[2](self.inner[1](hidden))


class TensorState(ExtraState):
    def get_extra_state(self):
        return {"means": torch.tensor(self.means)}


MODELS = {
    OtherShape: f"{BUFFERS}seen",
    OtherDtype: f"{BUFFERS}seen",
    RemovedBuffer: f"{BUFFERS}seen",
    RemovedParameter: f"{PARAMETERS}scale",
    Freezing: f"{PARAMETERS}shift",
    Unfreezing: f"{PARAMETERS}scale",
    InBackward: f"{BUFFERS}seen",
    TensorState: f"{EXTRA}TensorState",
    DataDependentInit: f"{PARAMETERS}shift",
    ThroughData: f"{PARAMETERS}shift",
    ThroughSetattr: f"{PARAMETERS}shift",
    FrozenSmall: f"{PARAMETERS}scale",
    FrozenLarge: f"{PARAMETERS}scale",
    FrozenLargeThroughData: f"{PARAMETERS}scale",
    LateParameter: f"{PARAMETERS}seen",
    OfAModule: f"{PARAMETERS}inner.0.bias",
    LateBuffer: f"{BUFFERS}seen",
    NotPersistent: f"{BUFFERS}seen",
    LateModule: f"{BUFFERS}statistics.running_mean",
    FromNone: f"{BUFFERS}seen",
    ReplacedBuffer: f"{BUFFERS}seen",
    LargeBuffer: f"{BUFFERS}seen",
    ExtraState: f"{EXTRA}ExtraState",
}
NOT_COPIED = (FrozenLarge, FrozenLargeThroughData, LargeBuffer)


@pytest.mark.parametrize(("kind", "message"), MODELS.items(), ids=lambda part: getattr(part, "__name__", ""))
@pytest.mark.parametrize("microbatch", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_models_that_store_samples(kind, message, microbatch):
    model = kind()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    _, loader, step = make(plan(sample_rate=0.4), model=model, microbatch=microbatch)
    with pytest.raises(PrivacyError, match=message):
        train(step, loader)
    assert step.privacy.spent().updates == 0
    after = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    if kind not in NOT_COPIED:
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


class Centers(nn.Module):
    """Loss function with a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centers", torch.zeros(3, 3, dtype=torch.float64))

    def forward(self, model, batch):
        outputs = model(batch[0])
        self.centers[batch[1]] = outputs.detach()
        return nn.functional.cross_entropy(outputs, batch[1], reduction="none")


def test_a_loss_function_that_stores_samples():
    losses = Centers()
    _, loader, step = make(plan(sample_rate=0.4), losses=losses)
    with pytest.raises(PrivacyError, match=f"{BUFFERS}centers"):
        train(step, loader)
    assert not losses.centers.any()


def learning_rate(optimizer, losses):
    optimizer.param_groups[0]["lr"] = losses.mean().item()


def momentum(optimizer, losses):
    for state in optimizer.state.values():
        state["momentum_buffer"].add_(losses.mean())


def new_state(optimizer, losses):
    for state in optimizer.state.values():
        state["mean"] = losses.mean()


@pytest.mark.parametrize(("write", "name"), [(learning_rate, "lr"), (momentum, "momentum_buffer"), (new_state, "mean")])
def test_an_optimizer_that_stores_samples(write, name):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def losses(model, batch):
        found = loss_fn(model, batch)
        write(optimizer, found.detach())
        return found

    privacy = plan(sample_rate=0.4)
    step = sw.Step(model, optimizer, losses, privacy=privacy)
    with pytest.raises(PrivacyError, match=f"the optimizer of a private step must not change.*values of {name}"):
        train(step, privacy.loader(TensorDataset(*data())))


class SameState(ExtraState):
    """Extra state that is computed in each call, with equal values."""

    def get_extra_state(self):
        return {"tensor": torch.ones(3), "names": ["a"] * 2}


class NotPicklable(ExtraState):
    def get_extra_state(self):
        return lambda: None


def test_extra_states():
    _, loader, step = make(model=SameState())
    assert train(step, loader, 2) == 2
    _, loader, step = make(model=NotPicklable())
    with pytest.raises(PrivacyError, match=r"the extra state of a private model must be picklable.*NotPicklable"):
        train(step, loader)


class Unseen(Wrapped):
    """Writes what does not depend on samples, and writes it back."""

    def see(self, x):
        self.shift.data.mul_(4.0)
        self.shift.data.mul_(0.25)


def test_a_model_that_restores_itself_is_allowed():
    _, loader, step = make(model=Unseen())
    assert train(step, loader, 2) == 2


def test_changes_between_updates_are_allowed():
    model, loader, step = make()
    for _ in step.over(loader):
        with torch.no_grad():
            model[0].weight.clamp_(-1, 1)
            model[0].bias.data.zero_()


def test_a_nan_in_a_frozen_parameter_is_no_change():
    model = net()
    model.register_buffer("unknown", torch.tensor([float("nan"), 1.0]))
    model.register_buffer("complex", torch.tensor([complex("nan+1j"), 1.0]))
    _, loader, step = make(model=model)
    assert train(step, loader, 2) == 2


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 3)).double()
    _, loader, step = make(model=model)
    with pytest.raises(PrivacyError, match=r"must have values before the first update.*lazy ones: 0.weight, 0.bias"):
        train(step, loader)


# -------------------------------------------------------------------------------------------------- hooks and dtypes


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters(kind):
    """A hook could multiply the sum before the noise is added."""
    model, loader, step = make()
    getattr(model[2].weight, kind)(lambda tensor: None)
    with pytest.raises(PrivacyError, match=r"must have no hooks, because a hook gets the sum.*found hooks on 2.weight"):
        train(step, loader)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_in_half_precision(dtype):
    _, loader, step = make(model=net().to(dtype), losses=lambda m, b: loss_fn(m, (b[0].to(dtype), b[1])).float())
    with pytest.raises(PrivacyError, match=rf"must be float32 or float64.*found {dtype} for '0.weight'"):
        train(step, loader)
    assert step.privacy.spent().updates == 0


# ------------------------------------------------------------------------------------------------------------ shapes


class Extra(nn.Module):
    """A parameter of any shape; without elements, or not used, its gradient is zero."""

    def __init__(self, shape, used, dtype=torch.float64):
        super().__init__()
        self.inner = net()
        self.extra = nn.Parameter(torch.full(shape, 0.7, dtype=dtype))
        self.used = used

    def forward(self, x):
        factor = 1 + self.extra.sum() if self.used else 1
        return self.inner(x) * (factor.real if torch.is_tensor(factor) and factor.is_complex() else factor)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1, 1), (2, 0, 2)], ids=str)
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("options", [{}, {"by": "parameter"}, {"secure": True}], ids=str)
def test_parameters_of_any_shape(shape, used, options):
    privacy = plan(**options, updates=3)
    model, loader, step = make(privacy, model=Extra(shape, used))
    train(step, loader)
    expected = by_hand(privacy, of_samples(), model=Extra(shape, used))
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert p.shape == q.shape
        assert p.numel() == 0 or (p - q).abs().max() <= ACCURACY


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("microbatch", [None, 3])
@pytest.mark.parametrize(
    "options",
    [{"users": [i // 4 for i in range(40)]}, {"adaptive": 0.5}, {"augmentations": 2}],
    ids=lambda options: next(iter(options)),
)
def test_parameters_of_any_shape_with_options(shape, microbatch, options):
    privacy = plan(**options, updates=3)
    model, loader, step = make(privacy, model=Extra(shape, True), microbatch=microbatch)
    assert train(step, loader) == 3
    assert model.extra.shape == shape and model.extra.isfinite().all()


@pytest.mark.parametrize("shape", [(), (2,), (0, 2)], ids=str)
def test_complex_parameters(shape):
    model, loader, step = make(plan(updates=3), model=Extra(shape, True, torch.complex128))
    before = model.extra.detach().clone()
    assert train(step, loader) == 3
    assert model.extra.numel() == 0 or not torch.equal(before, model.extra)


@pytest.mark.parametrize("kind", ["empty", "scalar"])
def test_a_model_of_one_parameter(kind):
    class Only(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.zeros((0, 3) if kind == "empty" else (), dtype=torch.float64))

        def forward(self, x):
            return x[:, :3] + self.p.sum() * x[:, 3:]

    model, loader, step = make(plan(updates=2), model=Only())
    assert train(step, loader) == 2
    assert gradient(Only(), Only()(data()[0]).sum())[0].shape == model.p.shape


def test_a_frozen_layer():
    model = net()
    model[0].requires_grad_(False)
    _, loader, step = make(model=model)
    assert train(step, loader, 1) == 1


def test_noise_of_complex_parameters():
    """Real and imaginary part have noise of the same standard deviation."""
    model, loader, step = make(
        plan(updates=1, sample_rate=1e-9, divide_by=1.0), lr=1.0, model=Extra((4000,), False, torch.complex64)
    )
    before = model.extra.detach().clone()
    train(step, loader)
    noise = torch.view_as_real(before - model.extra.detach())
    assert noise.std(0).tolist() == pytest.approx([step.config.policy._noise_std()] * 2, rel=0.05)
