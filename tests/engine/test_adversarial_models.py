"""Each trap that a tagging engine can fall into, by name; most of them need several steps or a hostile mixture."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import CASES

import samplewise as sw
from samplewise.engine.ownership import probe
from samplewise.testing.case import Net, confident_loss, default_dtype, noise, squared_loss, tokens, weight
from samplewise.testing.compare import CORE, SINGLE, Tolerance, assert_agrees, assert_same, probe_for
from samplewise.testing.oracle import rows_of, wanted


@pytest.fixture(autouse=True)
def _double():
    with default_dtype(torch.float64):
        yield


def compare(losses, model, names=CORE, **options):
    """`losses` is called twice: the oracle has a graph of its own."""
    rows = rows_of(losses(), wanted(model))
    g = sw.gradients(losses(), model)
    assert_agrees(g, rows, probe_for(wanted(model), len(rows)), names, **options)


def two_layers():
    return Net(None, a=nn.Linear(6, 8), b=nn.Linear(8, 3))


# ------------------------------------------------------------- the same signature, another order


@pytest.mark.parametrize("strategy", [None, "twice"])
def test_rows_sorted_differently_each_step(strategy):
    """Node names and shapes are those of the step before; the order is not."""
    model = two_layers()
    for _ in range(5):
        x = noise(9, 6)

        def losses(x=x):
            order = x[:, 0].argsort()
            return squared_loss(model.b(torch.tanh(model.a(x)[order])))[order.argsort()]

        rows = rows_of(losses(), wanted(model))
        assert_same(sw.gradients(losses(), model, strategy=strategy).norms(), rows.norms(), what="norms")
        compare(losses, model)


def test_losses_left_in_sorted_order():
    model = two_layers()
    for _ in range(5):
        x = noise(9, 6)
        compare(lambda x=x: squared_loss(model.b(torch.tanh(model.a(x)))).sort().values, model)


def test_hardest_losses_change_each_step():
    model = two_layers()
    for _ in range(5):
        x = noise(12, 6)
        compare(lambda x=x: (each := squared_loss(model.b(model.a(x))))[each.topk(5).indices], model)


def test_rows_rolled_by_another_shift_each_step():
    """A saved scalar is all that differs."""
    model, x = two_layers(), noise(7, 6)
    for shift in (0, 1, 3, -2):
        compare(lambda s=shift: squared_loss(model.b(model.a(x).roll(s, 0).tanh())), model)


def test_slice_bounds_that_move():
    model, x = two_layers(), noise(12, 6)
    for start in (0, 3, 1):
        compare(lambda s=start: squared_loss(model.b(model.a(x)[s : s + 5])), model)
        compare(lambda s=start: squared_loss(model.b(model.a(x).narrow(0, s, 5))), model)


def test_rows_routed_differently_each_step():
    case = CASES["experts_chosen_per_token"]
    model, _ = case.build()
    for _ in range(4):
        x = noise(5, 7, 6)
        compare(lambda x=x: case.losses(model, (x,)), model)


def test_rows_permuted_by_a_matrix_that_changes():
    """The same product each step; first the identity, then a permutation."""
    model, x = two_layers(), noise(6, 6)
    for order in (range(6), (3, 1, 0, 5, 4, 2), (1, 2, 3, 4, 5, 0)):
        matrix = torch.eye(6)[list(order)]
        compare(lambda m=matrix: squared_loss(model.b((m @ model.a(x)).tanh())), model)


def test_rows_permuted_inside_a_custom_function():
    class Shuffle(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, order):
            ctx.order = order
            return x[order]

        @staticmethod
        def backward(ctx, g):
            return torch.empty_like(g).index_copy(0, ctx.order, g), None

    model, x = two_layers(), noise(6, 6)
    for _ in range(4):
        order = torch.randperm(6)
        compare(lambda o=order: squared_loss(model.b(Shuffle.apply(model.a(x), o).tanh())), model)


def test_another_layout_under_the_same_names():
    """Batch first, then batch second, with B = T."""
    model = Net(None, a=nn.Linear(6, 4))
    x = noise(6, 6, 6)
    for dim in (1, 0, 1):
        compare(lambda d=dim: model.a(x).tanh().square().sum((d, 2)), model)


def test_frozen_between_steps():
    model, x = two_layers(), noise(5, 6)
    for frozen in ((), ("a.weight",), ("b.weight", "a.bias"), ()):
        for name, p in model.named_parameters():
            p.requires_grad_(name not in frozen)
        compare(lambda: squared_loss(model.b(model.a(x).tanh())), model)


def test_parameter_replaced_between_steps():
    model, x = two_layers(), noise(5, 6)
    for _ in range(3):
        model.a.weight = nn.Parameter(torch.randn(8, 6))
        compare(lambda: squared_loss(model.b(model.a(x).tanh())), model)


def test_weights_that_move_between_steps():
    model, x = two_layers(), noise(5, 6)
    for _ in range(3):
        compare(lambda: squared_loss(model.b(model.a(x).tanh())), model)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))


# ------------------------------------------------------------- samples that mix only later


def refused_or_right(losses, model):
    try:
        compare(losses, model)
    except sw.SamplesInteractError:
        return "refused"
    return "right"


def refused(losses, model):
    with pytest.raises(sw.SamplesInteractError):
        sw.gradients(losses(), model).norms()


def test_gate_that_opens_after_the_first_step():
    """While the gate is 0 nothing mixes; a layout remembered from then must not answer later."""
    model, x = two_layers(), noise(5, 6)
    model.gate = nn.Parameter(torch.zeros(()))

    def losses():
        h = model.a(x)
        return squared_loss(model.b(h + model.gate * h.mean(0)))

    refused_or_right(losses, model)
    refused_or_right(losses, model)
    model.gate.data.fill_(0.5)
    refused(losses, model)


def test_plain_number_that_opens_a_gate():
    model, x = two_layers(), noise(5, 6)
    number = 0.0

    def losses():
        h = model.a(x)
        return squared_loss(model.b(h + number * h.mean(0)))

    refused_or_right(losses, model)
    number = 0.5
    refused(losses, model)


def test_mixing_matrix_that_is_the_identity_first():
    model, x = two_layers(), noise(5, 6)
    matrix = torch.eye(5)

    def losses():
        return squared_loss(model.b(matrix @ model.a(x)))

    assert refused_or_right(losses, model) == "right"
    matrix = torch.eye(5) + 0.1
    refused(losses, model)


def test_relu_that_lets_the_mixture_through_later():
    model, x = two_layers(), noise(5, 6)
    shift = -100.0

    def losses():
        h = model.a(x)
        return squared_loss(model.b(h + (h.sum(0) + shift).relu()))

    refused_or_right(losses, model)
    shift = 100.0
    refused(losses, model)


def test_batch_norm_switched_to_training_mode():
    model, x = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), noise(5, 6)
    model.eval()
    compare(lambda: squared_loss(model(x)), model)
    model.train()
    refused(lambda: squared_loss(model(x)), model)
    model.eval()
    compare(lambda: squared_loss(model(x)), model)


# ------------------------------------------------------------- mixtures that pose as one sample


def mixed_losses(model, x, matrix):
    """Row r of the activations feeds loss i with weight matrix[i, r]."""
    return matrix @ squared_loss(model.b(model.a(x).tanh()))


def test_equal_contributions_posing_as_another_sample():
    """Three samples with the codes c+1, c-1, c-1 average to c: {0, 2, 34} once posed as 18."""
    B = 64
    model, x = two_layers(), noise(B, 6)
    trios = [
        (0, 2, 34),
        (0, 1, 2),
        (18, 34, 2),
        (17, 19, 49),
        *itertools.islice(itertools.combinations(range(0, B, 9), 3), 6),
    ]
    for trio in trios:
        matrix = torch.eye(B)
        matrix[:, 18] = 0
        matrix[list(trio), 18] = 1.0
        refused(lambda m=matrix: mixed_losses(model, x, m), model)


@pytest.mark.parametrize("B", [8, 70])
def test_weighted_contributions_posing_as_another_sample(B):
    """With codes c(i) = i, a·2^i + b·2^j over a + b is 2^m for the right a and b."""
    model, x = two_layers(), noise(B, 6)
    for i, m, j in ((0, 1, 2), (1, 2, 4), (0, 3, 5), (2, 3, 7), (0, 6, 7)):
        matrix = torch.eye(B)
        matrix[:, m] = 0
        matrix[i, m], matrix[j, m] = float(2**j - 2**m), float(2**m - 2**i)
        refused(lambda t=matrix: mixed_losses(model, x, t), model)


@pytest.mark.parametrize("B", [8, 70])
def test_a_mixture_is_refused_every_time(B):
    """Row 1 feeds losses 0 and 2 with weights 2 and 1. With codes c(i) = i, it looks like a row of sample 1."""
    model, x = two_layers(), noise(B, 6)
    matrix = torch.eye(B)
    matrix[:, 1] = 0
    matrix[0, 1] = 2.0
    matrix[2, 1] = 1.0
    for seed in range(60):
        probe._generator.manual_seed(seed)
        refused(lambda: mixed_losses(model, x, matrix), model)


@pytest.mark.parametrize("B", [2, 5, 64])
def test_every_row_a_mixture_of_two(B):
    model, x = two_layers(), noise(B, 6)
    for share in (0.5, 1 / 3, 2.0, -1.0):
        matrix = torch.eye(B) + share * torch.eye(B).roll(1, 0)
        refused(lambda m=matrix: mixed_losses(model, x, m), model)


def test_faint_mixture():
    """A millionth of another sample is still another sample."""
    model, x = two_layers(), noise(5, 6)
    refused(lambda: mixed_losses(model, x, torch.eye(5) + 1e-6 * torch.eye(5).roll(1, 0)), model)


def test_mixture_that_cancels_in_the_sum():
    """h − mean(h): with equal slopes the plain pass sees exact zeros, the coded one does not."""
    model, x = two_layers(), noise(4, 6)

    def losses():
        h = model.a(x)
        return (h - h.mean(0)).sum(1) + model.b(h.detach()).sum(1)

    refused(losses, model)


@pytest.mark.parametrize("B", [5, 64])
def test_mixtures_have_exact_rows_when_allowed(B):
    model, x = two_layers(), noise(B, 6)
    matrix = torch.eye(B)
    matrix[:3, -1] = 1.0
    rows = rows_of(mixed_losses(model, x, matrix), wanted(model))
    g = sw.gradients(mixed_losses(model, x, matrix), model, interacting="allow")
    assert_agrees(g, rows, probe_for(wanted(model), B))


# ------------------------------------------------------------- numbers at the edge


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_confident_cross_entropy_makes_denormals_and_is_not_refused(dtype):
    model = Net(None, f=nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 11))).to(dtype)
    x = noise(64, 6).to(dtype)
    for scale in (20, 60, 100, 300):
        compare(lambda s=scale: confident_loss(s / 100 * model.f(x)), model, tolerance=SINGLE)


def test_denormal_gradients():
    tiny = Tolerance(1e-2, 1e-2)  # a denormal has few digits
    model, x = two_layers().to(torch.float32), noise(5, 6).to(torch.float32)
    for scale in (1e-37, 1e-40):
        compare(lambda s=scale: s * squared_loss(model.b(model.a(x))), model, ["weighted sum", "full"], tolerance=tiny)


def test_denormals_beside_large_numbers():
    """One sample's gradients are denormal, its neighbors' are not."""
    model, x = two_layers().to(torch.float32), noise(5, 6).to(torch.float32)
    scale = torch.tensor([1.0, 1e-42, 1e3, 1e-38, 1e-20], dtype=torch.float32)
    compare(lambda: scale * squared_loss(model.b(model.a(x))), model, tolerance=SINGLE)


def test_huge_gradients():
    """Finite, though their squares are not."""
    model, x = two_layers().to(torch.float32), noise(5, 6).to(torch.float32)
    compare(lambda: 1e32 * squared_loss(model.b(model.a(x))), model, ["weighted sum", "full"], tolerance=SINGLE)


def test_samples_of_very_different_size():
    model, x = two_layers(), noise(9, 6)
    scale = 10.0 ** torch.arange(-100, 101, 25)
    rows = rows_of(scale * squared_loss(model.b(model.a(x))), wanted(model))
    norms = sw.gradients(scale * squared_loss(model.b(model.a(x))), model).norms()
    torch.testing.assert_close(norms, rows.norms(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("offset", [10.0, 100.0, 1000.0])
def test_key_projections_with_an_offset_in_the_activations(offset):
    """A softmax ignores what all keys share: the key weight's gradient is a small rest of large terms."""
    model = Net(attend, q=nn.Linear(16, 16), k=nn.Linear(16, 16), v=nn.Linear(16, 16))
    x = noise(6, 24, 16) + offset * noise(16)
    for layer in (model.q, model.k):
        layer.weight.data *= 0.1 / offset
    model, x = model.to(torch.float32), x.to(torch.float32)
    single = rows_of(squared_loss(model(x)), wanted(model)).norms(by="parameter")
    found = sw.gradients(squared_loss(model(x)), model).norms(by="parameter")
    model, x = model.double(), x.double()
    exact = rows_of(squared_loss(model(x)), wanted(model)).norms(by="parameter")
    for name in ("q.weight", "k.weight", "v.weight"):
        loop_error = ((single[name] - exact[name]) / exact[name]).abs().max()
        error = ((found[name] - exact[name]) / exact[name]).abs().max()
        assert error <= max(1e-4, 3 * loop_error), f"{name}: {error:.1e}, the loop {loop_error:.1e}"


def attend(m, x):
    return (m.q(x) @ m.k(x).mT).softmax(-1) @ m.v(x)


def test_equal_tokens_that_cancel():
    """Gradients of the tokens sum to zero while all activations are alike."""
    model = Net(None, f=nn.Linear(6, 4))
    x = (noise(5, 1, 6) + 1e-4 * noise(5, 40, 6)).to(torch.float32)
    model = model.to(torch.float32)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float32).repeat(20)

    def losses(m, x):
        return (m.f(x).sum(-1) * sign.to(x.dtype)).sum(1)

    single = rows_of(losses(model, x), wanted(model)).norms(by="parameter")["f.weight"]
    found = sw.gradients(losses(model, x), model).norms(by="parameter")["f.weight"]
    exact = rows_of(losses(model.double(), x.double()), wanted(model)).norms(by="parameter")["f.weight"]
    loop_error = ((single - exact) / exact).abs().max()
    assert ((found - exact) / exact).abs().max() <= max(1e-4, 3 * loop_error)


# ------------------------------------------------------------- sizes that lie


@pytest.mark.filterwarnings("ignore::samplewise.SamplesMayInteractWarning")
@pytest.mark.parametrize("size", [2, 4, 6])
def test_tokens_equal_samples_equal_features(size):
    x = noise(size, size, size)
    model = Net(None, a=nn.Linear(size, size), b=nn.Linear(size, size), w=weight(size, size), v=weight(size))
    compare(lambda: squared_loss(model.b(model.a(x).mT.tanh()) + model.w), model)
    compare(lambda: squared_loss((model.w @ model.a(x)) * model.v), model)
    compare(lambda: squared_loss(model.a(x.transpose(0, 1)).transpose(0, 1) * model.v[:, None]), model)


def test_weight_with_as_many_rows_as_samples():
    """A penalty on all rows of a weight (B, d) is no meeting of samples."""
    x = noise(6, 4)
    model = Net(None, f=nn.Linear(4, 6))
    w = model.f.weight
    penalties = [
        lambda: (w @ w.t() - torch.eye(6)).square().sum(),
        lambda: (w - w.mean(0)).square().sum(),
        lambda: torch.linalg.svdvals(w).sum(),
        lambda: w.softmax(0).amax(),
        lambda: torch.cdist(w.cos(), w.sin()).square().mean(),
    ]
    for penalty in penalties:
        compare(lambda p=penalty: squared_loss(model.f(x)) + p(), model)


def test_merged_lora_with_as_many_rows_as_samples():
    x = noise(6, 4)
    model = Net(None, w=weight(6, 4).requires_grad_(False), up=weight(6, 6), down=weight(6, 4), rank=weight(6))
    compare(lambda: squared_loss(F.linear(x, model.w + 0.5 * (model.up * model.rank) @ model.down)), model)


@pytest.mark.filterwarnings("ignore::samplewise.SamplesMayInteractWarning")
def test_ids_for_all_samples_with_as_many_rows_as_samples():
    """T5's relative positions are (T, T), and T may equal B: computed, and warned of at most."""
    case = CASES["relative_position_table"]
    model, inputs = case.build(7)
    compare(lambda: case.losses(model, inputs), model)


# ------------------------------------------------------------- parts of a loss


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("strategy", [None, "twice", "full"])
def test_checkpointed_blocks(blocks, strategy):
    from torch.utils.checkpoint import checkpoint

    model = Net(
        None, blocks=nn.ModuleList([nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(blocks)])
    )
    x = noise(5, 7, 6)

    def losses():
        h = x
        for block in model.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return squared_loss(h)

    rows = rows_of(losses(), wanted(model))
    for _ in range(2):
        g = sw.gradients(losses(), model, strategy=strategy)
        assert_agrees(g, rows, probe_for(wanted(model), 5))


def test_hinge_with_many_exact_zeros():
    model, x = two_layers(), 3 * noise(40, 6)
    labels = tokens(40, vocabulary=3)
    for margin in (0.01, 1.0):
        compare(
            lambda m=margin: F.multi_margin_loss(model.b(model.a(x).relu()), labels, margin=m, reduction="none"), model
        )
    for shift in (-2.0, -0.5, 0.0):
        compare(lambda s=shift: (model.b(model.a(x).relu()).sum(1) + s).relu(), model)


def test_no_sample_has_a_gradient():
    """All zeros are an answer: the parameters are reached, by nothing."""
    model, x = two_layers(), noise(5, 6)
    compare(lambda: (model.b(model.a(x)).sum(1) - 1e6).relu(), model)


def test_parameters_used_inside_the_loss():
    model, x = two_layers(), noise(5, 6)
    model.temperature, model.centres, model.log_variance = weight(1), weight(11, 3), weight()
    labels = tokens(5)

    def losses():
        h = model.b(model.a(x).tanh())
        distance = (h - model.centres[labels]).square().sum(1)
        return distance / (2 * model.log_variance.exp()) + model.log_variance + F.softplus(h.sum(1) * model.temperature)

    compare(losses, model)


@pytest.mark.parametrize("power", [1, 2])
def test_regularizer_added_to_every_samples_loss(power):
    model, x = two_layers(), noise(5, 6)
    compare(
        lambda: squared_loss(model.b(model.a(x))) + 0.01 * sum(p.norm(power) ** power for p in model.parameters()),
        model,
    )


def test_regularizer_alone():
    """The losses are all the same function of the parameters."""
    model = two_layers()
    compare(lambda: sum(p.square().sum() for p in model.parameters()).expand(5), model)
    compare(lambda: torch.arange(1.0, 6) * sum(p.square().sum() for p in model.parameters()), model)


def test_a_parameter_that_is_the_losses():
    """No operation lies between: losses are rows of a parameter, or the parameter itself."""
    model = Net(None, w=weight(5))
    compare(lambda: model.w * 1.0, model)
    compare(lambda: model.w.square()[[3, 1, 1]], model)


def test_one_loss_twice():
    """Two elements of losses that are one sample: the rows are equal, and the samples share their data."""
    model, x = two_layers(), noise(5, 6)
    refused_or_right(lambda: squared_loss(model.b(model.a(x)))[[0, 1, 1, 2]], model)


def test_a_sample_left_out():
    model, x = two_layers(), noise(5, 6)
    compare(lambda: squared_loss(model.b(model.a(x)))[[0, 3]], model)


def test_gradients_asked_twice_of_the_same_losses():
    model, x = two_layers(), noise(5, 6)
    losses = squared_loss(model.b(model.a(x).tanh()))
    rows = rows_of(losses, wanted(model))
    for strategy in (None, "twice", "full", "reference", None):
        assert_agrees(sw.gradients(losses, model, strategy=strategy), rows, probe_for(wanted(model), 5))


def test_ids_with_a_row_per_sample_in_a_mixed_region_are_warned_of_once():
    """Ids (B, …) looked up, then averaged over everything: data or constants? Computed, and warned of."""
    model = Net(None, table=nn.Embedding(11, 6), f=nn.Linear(6, 3))
    x, ids = noise(5, 6), tokens(5, 4)

    def losses():
        return squared_loss(model.f(x + model.table(ids).mean((0, 1))))

    rows = rows_of(losses(), wanted(model))
    g = sw.gradients(losses(), model)
    with pytest.warns(sw.SamplesMayInteractWarning):
        g.norms()
    assert_agrees(g, rows, probe_for(wanted(model), 5))  # warned once: the second time would be an error
