"""Cases: autograd features (checkpointing, custom functions, in-place writes, complex numbers, vmap)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from samplewise.testing.case import Net, as_losses, noise, squared_loss, tokens, weight
from samplewise.testing.cases import mlp, recompute
from zoo.register import case


@case
def checkpointed_blocks_in_a_row(B):
    def forward(m, x):
        for block in m.blocks:
            x = x + recompute(block, x)
        return m.head(x)

    return Net(forward, blocks=nn.ModuleList([mlp(6, 8, 6) for _ in range(3)]), head=nn.Linear(6, 3)), noise(B, 7, 6)


@case
def checkpoint_within_a_checkpoint(B):
    def forward(m, x):
        return m.head(recompute(lambda h: recompute(m.inner, torch.tanh(m.outer(h))), x))

    return Net(forward, outer=nn.Linear(6, 6), inner=mlp(6, 8, 6), head=nn.Linear(6, 3)), noise(B, 6)


@case(rows=False)
def checkpointed_dropout(B):
    block = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 6))
    return Net(lambda m, x: m.head(recompute(m.block, x)), block=block, head=nn.Linear(6, 3)), noise(B, 7, 6)


@case
def checkpointed_block_used_twice(B):
    return Net(lambda m, x: recompute(m.block, torch.tanh(recompute(m.block, x))), block=mlp(6, 8, 6)), noise(B, 6)


@case
def checkpointed_transformer_layer(B):
    block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return Net(lambda m, x: m.head(recompute(m.block, x)), block=block, head=nn.Linear(6, 3)), noise(B, 5, 6)


@case
def checkpointed_norms_and_convolutions(B):
    block = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
    return Net(
        lambda m, x: m.out(recompute(m.block, m.enter(x))),
        enter=nn.Conv1d(3, 4, 1),
        block=block,
        out=nn.Conv1d(4, 3, 1),
    ), noise(B, 3, 9)


@case(loss=as_losses)
def whole_loss_checkpointed(B):
    return Net(lambda m, x: recompute(lambda h: squared_loss(m.f(h)), x), f=mlp()), noise(B, 6)


class Cube(torch.autograd.Function):
    """Custom function that saves its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x.square() * gradient


class ReverseGradient(torch.autograd.Function):
    """Custom function that saves nothing."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -0.7 * gradient


class Polar(torch.autograd.Function):
    """Custom function with two outputs; the caller may use only one."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y.sin()

    @staticmethod
    def backward(ctx, first, second):
        x, y = ctx.saved_tensors
        return first * y + second, first * x + second * y.cos()


class Lookup(torch.autograd.Function):
    """Table lookup with integer ids; returns no gradient if its output receives none."""

    @staticmethod
    def forward(ctx, table, ids):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return table[ids], ids.clone()

    @staticmethod
    def backward(ctx, gradient, _):
        (ids,) = ctx.saved_tensors
        if gradient is None:
            return None, None
        flat = gradient.flatten(0, -2)
        return flat.new_zeros(ctx.rows, flat.shape[-1]).index_add(0, ids.flatten(), flat), None


@case
def custom_function_that_saves(B):
    return Net(
        lambda m, x: m.b(Cube.apply(m.a(x))) + Cube.apply(m.w), a=nn.Linear(6, 8), b=nn.Linear(8, 3), w=weight(3)
    ), noise(B, 7, 6)


@case
def custom_function_without_saved_tensors(B):
    return Net(lambda m, x: m.b(ReverseGradient.apply(m.a(x))), a=nn.Linear(6, 8), b=nn.Linear(8, 3)), noise(B, 7, 6)


@case
def custom_function_with_two_outputs(B):
    def forward(m, x):
        first, second = Polar.apply(m.a(x), m.w.expand(7, 4))
        return torch.cat([first, Polar.apply(second, m.a(x))[1]], -1)

    return Net(forward, a=nn.Linear(6, 4), w=weight(4)), noise(B, 7, 6)


@case
def custom_function_with_ids_and_an_integer_output(B):
    return Net(lambda m, ids: m.f(Lookup.apply(m.table, ids)[0]), table=weight(11, 6), f=nn.Linear(6, 3)), tokens(B, 7)


@case
def straight_through_sign(B):
    def forward(m, x):
        h = m.a(x)
        return m.b(h.tanh() + (h.sign() - h.tanh()).detach())

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3)), noise(B, 6)


@case
def detached_branch(B):
    return Net(lambda m, x: m.b(m.a(x).detach()) + m.a(x), a=nn.Linear(6, 3), b=nn.Linear(3, 3)), noise(B, 6)


@case
def parameters_copied_into_a_buffer_in_place(B):
    """The weight is assembled in place in a new matrix."""

    def forward(m, x):
        w = m.a.new_zeros(3, 6)
        w[:2] = m.a
        w[2, ::2] = m.b
        return x @ w.to(x.dtype).t()

    return Net(forward, a=weight(2, 6), b=weight(3)), noise(B, 7, 6)


@case
def inputs_that_require_gradients(B):
    return Net(lambda m, x: m.f(x.detach().requires_grad_()), f=mlp()), noise(B, 6)


@case
def expanded_and_strided_activations(B):
    def forward(m, x):
        h = m.a(x)
        return torch.as_strided(h.contiguous(), (len(h), 3, 4), (8, 2, 1)) + h[:, ::2].unsqueeze(1).expand(-1, 3, -1)

    return Net(forward, a=nn.Linear(6, 8)), noise(B, 6)


@case
def sum_over_a_broadcast_batch(B):
    """A row that depends on parameters only is expanded to B rows before use."""
    return Net(lambda m, x: m.f(m.seed.expand(len(x), 6)) * x, seed=weight(6), f=nn.Linear(6, 6)), noise(B, 6)


@case
def weight_cast_there_and_back(B):
    """Manual mixed precision: the parameter is cast to another dtype and back."""
    return Net(
        lambda m, x: F.linear(x, m.f.weight.to(torch.float64).to(x.dtype), m.f.bias.double().to(x.dtype)).tanh(),
        f=nn.Linear(6, 3),
    ), noise(B, 7, 6)


@case
def complex_weight_in_a_spectral_convolution(B):
    def forward(m, x):
        modes = torch.fft.rfft(m.enter(x), dim=1)
        return torch.fft.irfft(torch.einsum("btd,dot->bto", modes[:, :4], m.w), n=7, dim=1)

    return Net(
        forward, enter=nn.Linear(6, 3), w=nn.Parameter(0.5 * torch.randn(3, 4, 4, dtype=torch.complex128))
    ), noise(B, 7, 6)


@case
def complex_weight_seen_through_real_numbers(B):
    def forward(m, x):
        h = torch.view_as_complex(m.f(x).unflatten(-1, (4, 2)))
        return torch.view_as_real(h @ torch.view_as_complex(m.w)).abs()

    return Net(forward, f=nn.Linear(6, 8), w=weight(4, 3, 2)), noise(B, 7, 6)


@case
def complex_phases_and_moduli(B):
    return Net(
        lambda m, x: (torch.polar(x.abs() + 1, m.f(x)) * m.w).real + torch.angle(m.w * (2 + x)),
        f=nn.Linear(6, 6),
        w=nn.Parameter(torch.randn(6, dtype=torch.complex128)),
    ), noise(B, 6)


@case
def module_under_vmap_over_samples(B):
    return Net(lambda m, x: vmap(m.f)(x), f=mlp()), noise(B, 7, 6)


@case
def ensemble_of_stacked_modules(B):
    """Dim 0 of every activation is the ensemble member, dim 1 the sample."""
    base = mlp()
    stacked, _ = stack_module_state([mlp() for _ in range(4)])

    def forward(m, x):
        state = {name.replace("_", "."): p for name, p in m.members.items()}
        return vmap(lambda s: functional_call(base, s, (x,)))(state).transpose(0, 1)

    members = nn.ParameterDict(
        {name.replace(".", "_"): nn.Parameter(p.detach().clone()) for name, p in stacked.items()}
    )
    return Net(forward, members=members), noise(B, 6)


@case
def functional_call_with_altered_weights(B):
    def forward(m, x):
        return functional_call(m.f, {name: p * m.scale for name, p in m.f.named_parameters()}, (x,))

    return Net(forward, f=mlp(), scale=weight()), noise(B, 6)


@case(loss=as_losses)
def inner_gradient_step_per_sample(B):
    """MAML: the weight is adapted to each sample before its loss is computed."""

    def adapted(w, x, y):
        slope = torch.func.grad(lambda v: (x @ v - y).square().sum())(w)
        return ((x @ (w - 0.1 * slope)) - y).square().sum()

    return (
        Net(lambda m, x, y: vmap(adapted, in_dims=(None, 0, 0))(m.w, x, y), w=weight(6, 3)),
        noise(B, 4, 6),
        noise(B, 4, 3),
    )


@case
def identity_chain_of_views(B):
    def forward(m, x):
        h = m.a(x).transpose(0, 1).contiguous().transpose(0, 1).unsqueeze(0).squeeze(0)
        return h.reshape(len(x), 7, 2, 4).movedim(2, 0).movedim(0, 2).flatten(2).contiguous()

    return Net(forward, a=nn.Linear(6, 8)), noise(B, 7, 6)


@case
def matrix_square_root_by_eigenvectors(B):
    """Linear algebra per sample, batched over dim 0."""

    def forward(m, x):
        h = m.a(x)
        values, vectors = torch.linalg.eigh(h.mT @ h + torch.diag(1 + torch.arange(4, dtype=h.dtype, device=h.device)))
        return (vectors * values.sqrt()[:, None]) @ vectors.mT

    return Net(forward, a=nn.Linear(6, 4)), noise(B, 7, 6)
