"""Data change the owner of rows, or mix samples, after many equal steps: rows as those of the loop, or refused.

Graph structure and shapes stay the same. A program takes an activation (B, T, d) with B = T. In the first steps each
row belongs to its own sample; then `changed` is true, and rows belong to others, or to several.
"""

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from by_loop import assert_as_loop, rows_by_loop
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import samplewise as sw
from samplewise.engine.ownership import local_probe, ownership
from samplewise.testing.case import default_dtype

# B = T, so that positions and indices of tokens have as many rows as there are samples.
pytestmark = pytest.mark.filterwarnings("ignore::samplewise.SamplesMayInteractWarning")

B = T = 6
D = 4
REFUSED = (sw.GraphError, sw.SamplesInteractError)


@pytest.fixture(autouse=True)
def _double():
    with default_dtype(torch.float64):
        yield


# ---------------------------------------------------------------------------------------------- steps


class Steps:
    """Losses of a net with a program between its layers, a function of the number of the step and of `changed`."""

    def __init__(self, program, scale=None):
        torch.manual_seed(1)
        self.program = program
        self.net = nn.ModuleDict({"below": nn.Linear(D, D), "above": nn.Linear(D, 3)})
        self.scale = torch.linspace(0.4, 1.6, B) if scale is None else scale

    def losses(self, step, changed):
        torch.manual_seed(100 + step)
        h = torch.tanh(self.net["below"](torch.randn(B, T, D)))
        out = self.net["above"](self.program(h, step, changed))
        return out.sin().square().reshape(B, -1).sum(1) * self.scale

    def calm(self, steps, **options):
        """Equal steps as in training; the last one is compared with the loop."""
        for step in range(steps):
            g = sw.gradients(self.losses(step, False), self.net, **options)
            g.backward(0.5 / g.norms().clamp(min=0.5), retain_graph=True)
        assert_as_loop(self.losses(steps, False), self.net, **options)
        return steps + 1

    def assert_effect(self, step):
        """Gradients of the summed losses or of a sample change; otherwise no wrong answer could be noticed."""
        rows, others = (self.reference(step, changed) for changed in (True, False))
        assert max((a - b).abs().max() for a, b in zip(rows, others, strict=True)) > 1e-6

    def reference(self, step, changed):
        losses = self.losses(step, changed)
        total = torch.autograd.grad(losses.sum(), list(self.net.parameters()), retain_graph=True)
        return [*rows_by_loop(losses, self.net).values(), *total]

    def assert_right(self, step, **options):
        """Norms, rows and sum of one graph; `backward` with weights of another."""
        assert_as_loop(self.losses(step, True), self.net, **options)
        self.assert_backward(self.losses(step, True), self.net, **options)

    def assert_right_or_refused(self, step, **options):
        for attempt in (assert_as_loop, self.assert_backward):
            with contextlib.suppress(*REFUSED):
                attempt(self.losses(step, True), self.net, **options)

    def assert_backward(self, losses, net, **options):
        """The clipped sum of a graph whose rows nobody asked for."""
        rows = rows_by_loop(losses, net)
        g = sw.gradients(losses, net, **options)
        weights = 0.5 / g.norms().clamp(min=0.5)
        net.zero_grad()
        g.backward(weights, retain_graph=True)
        for name, row in rows.items():
            expected = torch.tensordot(weights, row, 1)
            torch.testing.assert_close(net.get_parameter(name).grad, expected, rtol=1e-9, atol=1e-12)


# Number of equal steps, and strategy.
PASTS = [(6, None), (6, "twice"), (6, "full"), (1, None), (2, None), (3, None), (17, None), (40, None)]
pasts = pytest.mark.parametrize("past", PASTS, ids=str)


# ------------------------------------------------------------------------------ rows of other samples


def order_of(step, changed):
    """Sample of each row."""
    return torch.randperm(B, generator=torch.Generator().manual_seed(step)).roll(1) if changed else torch.arange(B)


def rows_of(step, changed):
    """(B, T, D), sample of each row."""
    return order_of(step, changed)[:, None, None].expand(B, T, D)


def tokens_of_each():
    """(B, T), another order of the tokens in each sample; the same in all steps, so that owners are, too."""
    return torch.rand(B, T, generator=torch.Generator().manual_seed(0)).argsort(1)


class Moved(torch.autograd.Function):
    """Rows in another order, forward and backward."""

    @staticmethod
    def forward(ctx, x, order):
        ctx.order = order
        return x[order]

    @staticmethod
    def backward(ctx, g):
        return torch.empty_like(g).index_copy(0, ctx.order, g), None


class MovedByData(torch.autograd.Function):
    """Rows in the order of what is saved."""

    @staticmethod
    def forward(ctx, x, keys):
        ctx.save_for_backward(keys)
        return x[keys.argsort()]

    @staticmethod
    def backward(ctx, g):
        (keys,) = ctx.saved_tensors
        return g[keys.argsort().argsort()], None


class Changed(torch.autograd.Function):
    """Identity whose backward changes the gradient."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.change(g), None


class TwoWays(torch.autograd.Function):
    """Two inputs and outputs; the backward may exchange rows between them."""

    @staticmethod
    def forward(ctx, x, y, order):
        ctx.order = order
        return 2 * x, 3 * y

    @staticmethod
    def backward(ctx, f, g):
        return 2 * g[ctx.order], 3 * f[ctx.order], None


def same_name(backward):
    """A new class of the same name in each step."""
    forward = staticmethod(lambda ctx, x: x.clone())
    members = {"forward": forward, "backward": staticmethod(lambda ctx, g: backward(g))}
    return type("Same", (torch.autograd.Function,), members)


class Replaced(torch.autograd.Function):
    """The backward of the class is replaced between steps."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g


def with_replaced_backward(h, step, changed):
    Replaced.backward = staticmethod((lambda ctx, g: g[order_of(step, True)]) if changed else (lambda ctx, g: g))
    return Replaced.apply(h)


def put(h, step, changed, accumulate):
    return torch.zeros_like(h).index_put((order_of(step, changed),), h, accumulate=accumulate)


def put_elements(h, step, changed):
    rows, tokens = order_of(step, changed)[:, None], tokens_of_each()
    return torch.zeros_like(h).index_put((rows, tokens), h)


def sorted_by_data(h, step, changed):
    """Offsets dominate the values: they decide the order."""
    return torch.sort(h + 100 * rows_of(step, changed), 0).values


def assigned_in_place(h, step, changed):
    out, half = torch.zeros_like(h), B // 2
    first, second = (half, 0) if changed else (0, half)
    out[first : first + half] = h[:half]
    out[second : second + half] = h[half:]
    return out


def assigned_by_index(h, step, changed):
    out = torch.zeros_like(h)
    out[order_of(step, changed)] = h
    return out


def halves(h, step, changed):
    first, second = h.chunk(2)
    return torch.cat([second, first] if changed else [first, second])


def slices(h, step, changed):
    start = 2 if changed else 3
    return torch.cat([h[start : start + 3], h[:start], h[start + 3 :]])


def windows(h, step, changed):
    pairs = h.unfold(0, 2, 2).movedim(-1, 0)  # (2, B / 2, T, D)
    return (pairs if changed else pairs.transpose(0, 1)).reshape(B, T, D)


def strides(h, step, changed):
    steps = (D, T * D, 1) if changed else (T * D, D, 1)
    return torch.as_strided(h.contiguous(), (B, T, D), steps)


def routed(h, step, changed):
    """Rows are sent to two experts and put back in another order."""
    order = order_of(step, changed)
    parts = [2 * h[order[: B // 2]], 3 * h[order[B // 2 :]]]
    return torch.zeros_like(h).index_add(0, torch.arange(B), torch.cat(parts))


def by_mask(h, step, changed):
    """masked_scatter takes the source in order: the mask decides which row a value reaches."""
    mask = ((torch.arange(B) >= B // 2) if changed else (torch.arange(B) < B // 2))[:, None, None]
    return torch.zeros_like(h).masked_scatter(mask, h[: B // 2]).masked_scatter(~mask, h[B // 2 :])


def selected(h, step, changed):
    """The same number of rows is selected, at other places."""
    mask = (torch.arange(B) % 2 == 1) if changed else (torch.arange(B) < B // 2)
    return torch.cat([h[mask], 2 * h[~mask]])


def selected_elements(h, step, changed):
    """One token of each sample; later as many elements of a transposed activation, which belong to other samples."""
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[torch.arange(B), order_of(0, True)] = True
    rows = h.permute((1, 0, 2) if changed else (0, 1, 2))
    return rows[mask][:, None].expand(h.shape)


def looked_up(h, step, changed):
    """Activations as the table of an embedding."""
    ids = order_of(step, changed)[:, None] * T + tokens_of_each()
    return F.embedding(ids, h.flatten(0, 1))


MOVES = {
    "Function, forward and backward": lambda h, step, c: Moved.apply(h, order_of(step, c)),
    "Function, by saved data": lambda h, step, c: MovedByData.apply(h, order_of(step, c).double()),
    "Function, backward only": lambda h, step, c: Changed.apply(h, lambda g: g[order_of(step, c)]),
    "Function, tokens instead of samples": lambda h, step, c: Changed.apply(h, lambda g: g.transpose(0, 1) if c else g),
    "Function with two inputs": lambda h, step, c: sum(TwoWays.apply(h, h * h, order_of(step, c))),
    "Function of the same name": lambda h, step, c: same_name(lambda g: g[order_of(step, c)]).apply(h),
    "Function with a replaced backward": with_replaced_backward,
    "Function on flat rows": lambda h, step, c: Moved.apply(
        h.flatten(0, 1), (rows_of(step, c)[..., 0] * T + tokens_of_each()).flatten()
    ).view(h.shape),
    "h[i]": lambda h, step, c: h[order_of(step, c)],
    "h[i] with negative indices": lambda h, step, c: h[order_of(step, c) - B],
    "h[i, j]": lambda h, step, c: h[order_of(step, c), tokens_of_each()[0]][:, None].expand(h.shape),
    "h[i, j] of all tokens": lambda h, step, c: h[order_of(step, c)[:, None], tokens_of_each()],
    "h[i, :, j]": lambda h, step, c: h[order_of(step, c), :, torch.arange(B) % D][..., None].expand(h.shape),
    "h[:, i] of a transposed activation": lambda h, step, c: h.transpose(0, 1)[:, order_of(step, c)].transpose(0, 1),
    "h[i, i] with B = T": lambda h, step, c: h[order_of(step, c), order_of(0, True)][:, None].expand(h.shape),
    "h[j, i] with B = T": lambda h, step, c: h[
        (order_of(0, True), torch.arange(B)) if c else (torch.arange(B), order_of(0, True))
    ][:, None].expand(h.shape),
    "h[mask]": selected,
    "h[mask] of elements": selected_elements,
    "index_select": lambda h, step, c: h.index_select(0, order_of(step, c)),
    "index_select, B = T": lambda h, step, c: h.index_select(0 if c else 1, order_of(step, True)),
    "gather": lambda h, step, c: h.gather(0, rows_of(step, c)),
    "gather, another row for each element": lambda h, step, c: h.gather(
        0, torch.rand(B, T, D).argsort(0) if c else rows_of(step, False)
    ),
    "take": lambda h, step, c: h.take(torch.arange(B * T * D).view(B, T * D)[order_of(step, c)]).view(h.shape),
    "take_along_dim": lambda h, step, c: h.take_along_dim(rows_of(step, c), 0),
    "scatter": lambda h, step, c: torch.zeros_like(h).scatter(0, rows_of(step, c), h),
    "scatter_add": lambda h, step, c: torch.zeros_like(h).scatter_add(0, rows_of(step, c), h),
    "index_put": functools.partial(put, accumulate=False),
    "index_put, accumulate": functools.partial(put, accumulate=True),
    "index_put of elements": put_elements,
    "index_copy": lambda h, step, c: torch.zeros_like(h).index_copy(0, order_of(step, c), h),
    "index_add": lambda h, step, c: torch.zeros_like(h).index_add(0, order_of(step, c), h),
    "assignment by index": assigned_by_index,
    "assignment of slices": assigned_in_place,
    "masked_scatter": by_mask,
    "embedding": looked_up,
    "sort over samples": sorted_by_data,
    "topk over samples": lambda h, step, c: torch.topk(h - 100 * rows_of(step, c), B, dim=0).values,
    "roll by a number": lambda h, step, c: h.roll((step % (B - 1)) + 1 if c else 0, 0),
    "roll, B = T": lambda h, step, c: h.roll(2, 0 if c else 1),
    "flip, B = T": lambda h, step, c: h.flip(0 if c else 1),
    "slices and cat": slices,
    "chunk and cat": halves,
    "unfold over samples": windows,
    "permute, B = T": lambda h, step, c: h.permute((1, 0, 2) if c else (0, 1, 2)),
    "as_strided": strides,
    "product with a permutation": lambda h, step, c: torch.einsum("ij,jtd->itd", torch.eye(B)[order_of(step, c)], h),
    "experts": routed,
}


@pytest.mark.sweep(1 / 16)
@pasts
@pytest.mark.parametrize("move", MOVES)
def test_rows_begin_to_belong_to_other_samples(move, past):
    """Samples stay apart: each step must be right."""
    calm, strategy = past
    steps = Steps(MOVES[move])
    first = steps.calm(calm, strategy=strategy)
    steps.assert_effect(first)
    for step in range(first, first + 2):
        steps.assert_right(step, strategy=strategy)
    steps.calm(1, strategy=strategy)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("move", MOVES)
def test_another_owner_in_every_step(move):
    steps = Steps(MOVES[move])
    for step in range(4):
        steps.assert_right(step)


# ------------------------------------------------------------------------------------- samples that mix


def share_of(share):
    """A small multiple of the next row is added."""
    return lambda g: g + share * g.roll(1, 0)


def of_two(g):
    """Two of the samples mix."""
    g = g.clone()
    g[3] += 0.1 * g[1]
    return g


def if_large(g):
    return g + 0.1 * g.roll(1, 0) * (g.abs() > 0.05)


CHANGES = {
    "a thousandth": share_of(1e-3),
    "1e-8": share_of(1e-8),
    "1e-20": share_of(1e-20),
    "two samples": of_two,
    "large gradients": if_large,
    "minus the mean": lambda g: g - g.mean(0),
    "summed up": lambda g: g.cumsum(0),
    "averages of neighbors": lambda g: (g + g.roll(1, 0)) / 2,
    "normalized over the batch": lambda g: g / g.norm(),
    "clipped": lambda g: g.clamp(-0.05, 0.05),
    "rounded": lambda g: (g / 1e-3).round() * 1e-3,
    "shifted": lambda g: g + 1e-3,
    "largest row for all": lambda g: g[g.flatten(1).norm(dim=1).argmax()].expand_as(g),
}


def unchanged(g):
    return g


def doubled_rows(step, changed):
    """The last sample reads the row of the first one, too."""
    order = torch.arange(B)
    order[-1] = 0 if changed else B - 1
    return order


def across(h, step, changed):
    """Attention over samples under a mask that lets each one see itself, later also its neighbor."""
    mask = torch.eye(B, dtype=torch.bool)
    if changed:
        mask[2, 3] = True
    x = h.transpose(0, 1)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask.expand(T, B, B)).transpose(0, 1)


def convolved(h, step, changed):
    kernel = torch.tensor([1e-3 if changed else 0.0, 1.0, 0.0]).expand(T * D, 1, 3)
    return F.conv1d(h.flatten(1).t(), kernel, padding=1, groups=T * D).t().view(h.shape)


def cumulative_maximum(h, step, changed):
    """Rows in ascending order are their own maxima."""
    return torch.cummax(h + 100 * rows_of(step, changed), 0).values


def overlapping(h, step, changed):
    """One step of the strides is smaller: the windows overlap."""
    return torch.as_strided(torch.cat([h, h.detach()]).contiguous(), (B, T, D), (T * D - changed, D, 1))


def chosen_rows(h, step, changed):
    mine = torch.ones(B, 1, 1, dtype=torch.bool)
    mine[2] = not changed
    return torch.where(mine, h, h.roll(1, 0))


def accumulated(h, step, changed):
    index = doubled_rows(step, changed)
    return h + torch.zeros_like(h).index_put((index,), 0.3 * h, accumulate=True)


def assigned_twice(h, step, changed):
    out = h * 1.0
    first = 0 if changed else 3
    out[first : first + 2] = out[first : first + 2] + 0.1 * h[3:5]
    return out


def packed(h, step, changed):
    """Segments of packed tokens; one bound moves into another sample."""
    samples = torch.arange(B).repeat_interleave(T)
    if changed:
        samples[2 * T] = 1
    sums = torch.zeros(B, D).index_add(0, samples, h.flatten(0, 1))
    return h + sums[:, None]


MIXTURES = {
    **{
        f"Function, {name}": (lambda h, step, c, f=f: Changed.apply(h, f if c else unchanged))
        for name, f in CHANGES.items()
    },
    **{
        f"Function of the same name, {name}": (lambda h, step, c, f=f: same_name(f if c else unchanged).apply(h))
        for name, f in CHANGES.items()
    },
    "h[i] with a row twice": lambda h, step, c: h[doubled_rows(step, c)],
    "h[i, j] with a row twice": lambda h, step, c: h[doubled_rows(step, c)[:, None], tokens_of_each()],
    "index_select with a row twice": lambda h, step, c: h.index_select(0, doubled_rows(step, c)),
    "gather with an element twice": lambda h, step, c: h.gather(
        0, doubled_rows(step, c)[:, None, None].expand(h.shape)
    ),
    "embedding with a row twice": lambda h, step, c: F.embedding(
        doubled_rows(step, c)[:, None] * T + torch.arange(T), h.flatten(0, 1)
    ),
    "scatter_add into one row": lambda h, step, c: (
        h + torch.zeros_like(h).scatter_add(0, doubled_rows(step, c)[:, None, None].expand(h.shape), h)
    ),
    "index_add into one row": lambda h, step, c: h + torch.zeros_like(h).index_add(0, doubled_rows(step, c), h),
    "index_put into one row": accumulated,
    "assignment of slices": assigned_twice,
    "sort of one column": lambda h, step, c: (
        h + torch.sort(h[:, :1] + 100 * (order_of(step, c)[:, None, None]), 0).values
    ),
    "cummax over samples": cumulative_maximum,
    "attention over samples": across,
    "convolution over samples": convolved,
    "FFT, B = T": lambda h, step, c: torch.fft.fft(h, dim=0 if c else 1).real,
    "cumsum, B = T": lambda h, step, c: h.cumsum(0 if c else 1),
    "softmax, B = T": lambda h, step, c: h.softmax(0 if c else 1),
    "as_strided that overlaps": overlapping,
    "unfold, B = T": lambda h, step, c: (F.pad(h, (0, 0, 0, 0, 1, 0)).unfold(0, 2, 1) if c else h[..., None]).mean(-1),
    "where": chosen_rows,
    "packed segments": packed,
    "product with a matrix": lambda h, step, c: torch.einsum(
        "ij,jtd->itd", torch.eye(B) + 1e-3 * c * torch.eye(B).roll(1, 0), h
    ),
    "gate": lambda h, step, c: h + torch.tensor(1e-3 * c) * h.mean(0),
    "relu that opens": lambda h, step, c: h + 0.01 * (h.sum(0) + (100.0 if c else -100.0)).relu(),
}
FAINT = [name for name in MIXTURES if "1e-20" in name]  # below the rounding error: right without being noticed


@pytest.mark.sweep(1 / 20)
@pasts
@pytest.mark.parametrize("mixture", MIXTURES)
def test_samples_begin_to_mix(mixture, past):
    calm, strategy = past
    steps = Steps(MIXTURES[mixture])
    first = steps.calm(calm, strategy=strategy)
    if mixture not in FAINT and "1e-8" not in mixture:
        steps.assert_effect(first)
    for step in range(first, first + 2):
        steps.assert_right_or_refused(step, strategy=strategy)
    steps.calm(1, strategy=strategy)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("share", [1e-3, 1e-8, 1e-20])
@pytest.mark.parametrize("calm", [5, 12, 33])
def test_samples_of_very_different_size_begin_to_mix(share, calm):
    """A share of a large sample is not small beside a small one."""
    steps = Steps(
        lambda h, step, c: Changed.apply(h, share_of(share) if c else unchanged), 10.0 ** -torch.arange(0, 24, 4.0)
    )
    first = steps.calm(calm)
    for step in range(first, first + 2):
        steps.assert_right_or_refused(step)


@pytest.mark.parametrize("period", [2, 5, 7])
def test_samples_mix_in_some_steps(period):
    """No interval of verification fits."""
    steps = Steps(lambda h, step, c: Changed.apply(h, of_two if step % period == 0 else unchanged))
    for step in range(15):
        steps.assert_right_or_refused(step)


# ------------------------------------------------------------------------------ gradients that arrive later


def switched(change):
    """A branch whose gradient is zero at first. Its backward does the same in all steps."""
    return lambda h, step, c: h + torch.tensor(float(c)) * Changed.apply(h.sin(), change)


LATE = {
    "permutation": lambda g: g.roll(1, 0),
    "tokens instead of samples": lambda g: g.transpose(0, 1),
    "two samples": of_two,
    "minus the mean": CHANGES["minus the mean"],
    "rounded": CHANGES["rounded"],
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("change", LATE)
@pytest.mark.parametrize("calm", [6, 1, 18])
def test_a_branch_that_opens(change, calm):
    steps = Steps(switched(LATE[change]))
    first = steps.calm(calm)
    steps.assert_effect(first)
    for step in range(first, first + 2):
        steps.assert_right_or_refused(step)
    if change in ("permutation", "tokens instead of samples"):
        with contextlib.suppress(*REFUSED):  # h and its permuted branch meet in the same rows
            steps.assert_right(first)


class Late:
    """A loss, a column or a layer whose gradient is zero in the first steps."""

    def __init__(self, place):
        self.place = place

    def __call__(self, h, step, changed):
        h = Changed.apply(h, of_two)
        on = torch.ones(B, 1, D)
        if self.place == "sample":
            on[1] = float(changed)
        elif self.place == "column":
            on[..., :-1] = float(changed)
        else:
            on *= float(changed)
        return h * on


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("place", ["sample", "column", "all"])
@pytest.mark.parametrize("calm", [6, 1, 18])
def test_a_mixture_of_gradients_that_were_zero(place, calm):
    """The Function mixes two samples in all steps, but one of them had no gradient."""
    steps = Steps(Late(place))
    for step in range(calm):
        with contextlib.suppress(*REFUSED):
            assert_as_loop(steps.losses(step, False), steps.net)
    for step in range(calm, calm + 3):
        steps.assert_right_or_refused(step)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("calm", [6, 1, 18])
def test_a_permutation_of_gradients_that_were_zero(calm):
    def program(h, step, changed):
        return Changed.apply(h, lambda g: g.roll(1, 0)) * float(changed)

    steps = Steps(program)
    first = steps.calm(calm)
    for step in range(first, first + 2):
        steps.assert_right(step)


def test_a_function_that_returns_no_gradient_at_first():
    def program(h, step, changed):
        return h + Changed.apply(h.sin(), (lambda g: g.roll(1, 0)) if changed else (lambda g: None))

    steps = Steps(program)
    first = steps.calm(6)
    steps.assert_effect(first)
    for step in range(first, first + 2):
        steps.assert_right_or_refused(step)


# ---------------------------------------------------------------------------------------------- hooks


def on_tensor(h, hook):
    h = h * 1.0
    h.register_hook(hook)
    return h


def on_node(h, hook):
    h = h * 1.0
    h.grad_fn.register_prehook(lambda gradients: (hook(gradients[0]),))
    return h


def after_node(h, hook):
    h = h * 1.0
    h.grad_fn.register_hook(lambda inputs, outputs: (hook(inputs[0]), *inputs[1:]))
    return h


class Hooked(nn.Module):
    """Module with one full backward hook for all steps."""

    def __init__(self):
        super().__init__()
        self.hook = unchanged
        self.register_full_backward_hook(lambda module, inputs, outputs: (self.hook(inputs[0]),))

    def forward(self, h):
        return 1.5 * h


def by_module(module):
    def place(h, hook):
        module.hook = hook
        return module(h)

    return place


PLACES = {
    "tensor": lambda: on_tensor,
    "node": lambda: on_node,
    "after a node": lambda: after_node,
    "module": lambda: by_module(Hooked()),
}
HOOKS = {**CHANGES, "rolled": lambda g: g.roll(1, 0), "transposed": lambda g: g.transpose(0, 1)}


class Counted:
    """One hook for all steps, which begins to change gradients."""

    def __init__(self, change):
        self.change = change
        self.active = False

    def __call__(self, g):
        return self.change(g) if self.active else 2 * g


@pytest.mark.sweep(1 / 24)
@pytest.mark.parametrize("calm", [6, 1, 17, 40])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", HOOKS)
def test_hooks_that_begin_to_change_gradients(change, place, calm):
    hook = Counted(HOOKS[change])
    register = PLACES[place]()

    def program(h, step, changed):
        hook.active = changed
        return register(h, hook)

    steps = Steps(program)
    first = steps.calm(calm)
    for step in range(first, first + 2):
        steps.assert_right_or_refused(step)
    steps.calm(1)


@pytest.mark.sweep(1 / 10)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", HOOKS)
def test_hooks_that_begin_to_change_gradients_above_probed_rows(change, place):
    register = PLACES[place]()

    def program(h, step, changed):
        return register(h[order_of(step, changed)], HOOKS[change] if changed else unchanged)

    steps = Steps(program)
    first = steps.calm(5)
    steps.assert_effect(first)
    for step in range(first, first + 2):
        steps.assert_right_or_refused(step)


@pytest.mark.sweep(1 / 5)
@pytest.mark.parametrize("change", HOOKS)
def test_a_hook_on_another_tensor_than_before(change):
    """The same function harms nothing on an activation that is constant over samples, and mixes elsewhere."""

    def program(h, step, changed):
        other = h.detach().requires_grad_() * 1.0
        (h if changed else other).register_hook(HOOKS[change])
        return h + 0.1 * other

    steps = Steps(lambda h, step, c: program(h * 1.0, step, c))
    first = steps.calm(6)
    for step in range(first, first + 2):
        steps.assert_right_or_refused(step)


@pytest.mark.sweep(1 / 5)
@pytest.mark.parametrize("change", HOOKS)
def test_hooks_that_are_removed_and_replaced(change):
    """Each step removes the module's hook and registers another, made of the same code."""
    module = nn.Tanh()
    handles = []

    def program(h, step, changed):
        function = HOOKS[change] if changed else unchanged
        for handle in handles:
            handle.remove()
        handles[:] = [module.register_full_backward_hook(lambda m, inputs, outputs: (function(inputs[0]),))]
        return module(h)

    steps = Steps(program)
    first = steps.calm(6)
    for step in range(first, first + 2):
        steps.assert_right_or_refused(step)
    steps.calm(1)


def test_a_hook_that_changes_only_when_others_are_registered():
    """Hooks elsewhere, of kinds that change no gradient, do not hide one that does."""
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)

    def program(h, step, changed):
        other.register_forward_hook(lambda *_: None).remove()
        optimizer.register_step_post_hook(lambda *_: None).remove()
        h = h * 1.0
        h.register_hook((lambda g: g.roll(1, 0)) if changed else unchanged)
        other.register_state_dict_post_hook(lambda *_: None).remove()
        return h

    steps = Steps(program)
    first = steps.calm(8)
    steps.assert_effect(first)
    for step in range(first, first + 2):
        steps.assert_right(step)


@pytest.mark.sweep(1 / 5)
@pytest.mark.parametrize("change", HOOKS)
@pytest.mark.parametrize("late", [False, True])
def test_a_hook_on_an_activation_that_graphs_of_all_steps_share(change, late):
    """Registered before the first step or between two steps, on a tensor that is older than both."""
    hook = Counted(HOOKS[change])
    trunk = nn.Linear(D, D)
    shared = torch.tanh(trunk(torch.randn(B, T, D)))
    if not late:
        shared.register_hook(hook)

    def program(h, step, changed):
        hook.active = changed
        return h + shared

    steps = Steps(program)
    steps.net["trunk"] = trunk
    first = steps.calm(6)
    if late:
        shared.register_hook(hook)
    for step in range(first, first + 2):
        steps.assert_right_or_refused(step)


def test_a_forward_hook_that_begins_to_register_tensor_hooks():
    module = nn.Tanh()
    state = {"changed": False}

    def forward_hook(module, inputs, output):
        if state["changed"]:
            output.register_hook(lambda g: g.roll(1, 0))

    module.register_forward_hook(forward_hook)

    def program(h, step, changed):
        state["changed"] = changed
        return module(h)

    steps = Steps(program)
    first = steps.calm(8)
    steps.assert_effect(first)
    for step in range(first, first + 2):
        steps.assert_right(step)
    steps.calm(1)


# ---------------------------------------------------------------------------------------------- modes


class Observing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


class Rolling(TorchDispatchMode):
    """Rows of one operation's gradient are rolled."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        return out.roll(1, 0) if func is torch.ops.aten.sigmoid_backward.default else out


MODES = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "another mode": Observing,
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
}


@pytest.mark.sweep(1 / 4)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("move", ["h[i]", "Function, backward only", "index_put", "experts"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_that_come_and_go(mode, move):
    """Observers change no result."""
    steps = Steps(MOVES[move])
    for step in range(10):
        with MODES[mode]() if step % 3 == 1 else contextlib.nullcontext():
            if step < 6:
                assert_as_loop(steps.losses(step, False), steps.net)
            else:
                steps.assert_right(step)


def test_a_mode_that_begins_to_move_rows():
    steps = Steps(lambda h, step, changed: h.sigmoid())
    first = steps.calm(8)
    for step in range(first, first + 2):
        with Rolling():
            steps.assert_right_or_refused(step)
        assert_as_loop(steps.losses(step, False), steps.net)


# -------------------------------------------------------------------------------------------- numbers

NUMBERS = {
    "clamp": lambda h, step: h.clamp(max=0.5 + 0.01 * step),
    "clamp of both sides": lambda h, step: h.clamp(-0.2 - 0.01 * step, 0.3),
    "leaky_relu": lambda h, step: F.leaky_relu(h, 0.1 + 0.01 * step),
    "elu": lambda h, step: F.elu(h, 1 + 0.01 * step),
    "threshold": lambda h, step: F.threshold(h, 0.01 * step, 0.5),
    "power": lambda h, step: (h + 2) ** (1 + 0.1 * step),
    "factor": lambda h, step: h * (1 + 0.1 * step),
    "roll over tokens": lambda h, step: h.roll(step, 1),
    "dropout": lambda h, step: F.dropout(h, 0.1 + 0.02 * step),
    "slice of tokens": lambda h, step: F.pad(h[:, step % 3 : step % 3 + 3], (0, 0, 3, 0)),
    "column": lambda h, step: h + h[..., step % D, None],
    "layer norm": lambda h, step: F.layer_norm(h, (D,), eps=0.01 * (step + 1)),
    "scale of attention": lambda h, step: F.scaled_dot_product_attention(h, h, h, scale=0.1 * (step + 1)),
    "alpha": lambda h, step: torch.add(h, h.sin(), alpha=0.1 * step),
    "tril": lambda h, step: (h @ h.mT).tril(step % 3 - 1) @ h,
    "length": lambda h, step: torch.cat([h, h[:, : step % 4]], 1).mean(1, keepdim=True) + 0 * h,
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change_in_each_step(name):
    steps = Steps(lambda h, step, changed: NUMBERS[name](h, step))
    for step in range(7):
        assert_as_loop(steps.losses(step, False), steps.net)


@pytest.mark.sweep(1 / 16)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", ["clamp", "leaky_relu", "roll over tokens"])
def test_owners_that_change_next_to_numbers(name, move):
    steps = Steps(lambda h, step, changed: MOVES[move](NUMBERS[name](h, step), step, changed))
    first = steps.calm(5)
    for step in range(first, first + 2):
        steps.assert_right(step)


# -------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    "move", ["h[i]", "Function, backward only", "index_put", "sort over samples", "roll by a number"]
)
def test_owners_of_another_number_of_samples(move, monkeypatch):
    """A claim about 6 samples is none about 5 or 9."""
    steps = Steps(MOVES[move])
    for step, size in enumerate([6, 6, 6, 6, 5, 9, 6, 2, 9]):
        for name in "BT":
            monkeypatch.setitem(globals(), name, size)
        steps.scale = torch.linspace(0.4, 1.6, size)
        assert_as_loop(steps.losses(step, changed=step > 3), steps.net)


# ------------------------------------------------------------------------------------- random programs


class RandomProgram:
    """Some moves, layers and hooks in a row, drawn with a seed; data, orders and indices are new in each step."""

    def __init__(self, seed, kinds):
        generator = torch.Generator().manual_seed(seed)
        names = [list(kinds)[i] for i in torch.randint(len(kinds), (3,), generator=generator)]
        self.parts = [kinds[name] for name in names]
        self.residual = bool(torch.randint(2, (), generator=generator))
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in names)
        self.late = int(torch.randint(len(names), (), generator=generator))  # the part that changes

    def __call__(self, h, step, changed):
        for number, (part, layer) in enumerate(zip(self.parts, self.layers, strict=True)):
            moved = part(torch.tanh(layer(h)), step + number, changed and number >= self.late)
            h = moved + (0.1 * layer(moved).sin() if self.residual else 0)
        return h


def random_steps(seed, kinds):
    torch.manual_seed(seed)
    steps = Steps(RandomProgram(seed, kinds))
    steps.net["layers"] = steps.program.layers
    return steps


# Elements of one row belong to several samples: layers and reductions behind them mix samples.
APART = [
    "Function, tokens instead of samples",
    "permute, B = T",
    "as_strided",
    "gather, another row for each element",
]


@pytest.mark.sweep(1 / 25)
@pytest.mark.parametrize("seed", range(200))
def test_random_programs_whose_rows_begin_to_move(seed):
    steps = random_steps(seed, {name: move for name, move in MOVES.items() if name not in APART})
    first = steps.calm(4 + seed % 9)
    for step in range(first, first + 2):
        steps.assert_right(step)
    steps.calm(2)


@pytest.mark.sweep(1 / 50)
@pytest.mark.parametrize("seed", range(200))
def test_random_programs_whose_samples_begin_to_mix(seed):
    steps = random_steps(seed, MOVES | MIXTURES)
    first = steps.calm(4 + seed % 9)
    for step in range(first, first + 2):
        steps.assert_right_or_refused(step)
    steps.calm(2)


def test_claims_that_still_hold_are_not_probed_again():
    """Rows in another order in each step: what was found about the other operations of the graph is verified only."""
    torch.manual_seed(0)
    model = nn.Linear(6, 6).double()
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    probed = []

    def probe_node(graph, node, *arguments):
        probed[-1].append(graph.operations[node])
        return local_probe.probe_node(graph, node, *arguments)

    with mock.patch.object(ownership, "probe_node", probe_node):
        for _ in range(4):
            probed.append([])
            order = torch.randperm(20)  # of the tokens of all samples, as experts see them
            hidden = model(x.flatten(0, 1)[order])[order.argsort()].view(4, 5, 6)
            h = hidden.clone()
            h[:, 1:3] = hidden[:, :2].sin()  # in place: CopySlices
            losses = h.square().sum((1, 2))
            rows = rows_by_loop(losses, dict(model.named_parameters()))
            full = sw.gradients(losses, model).full()
            for name, row in rows.items():
                torch.testing.assert_close(full[name], row)
    assert any("CopySlices" in name for name in probed[0])
    assert not any("CopySlices" in name for name in probed[3])  # indices are read, not probed
