"""Cases: uses of a parameter (tied, transposed, sliced, broadcast, reparametrized, generated)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from samplewise.testing.case import Net, noise, tokens, weight
from samplewise.testing.cases import mlp
from zoo.register import case


@case
def tied_autoencoder(B):
    """One matrix, used untransposed and transposed."""
    return Net(lambda m, x: F.linear(F.linear(x, m.w, m.b).tanh(), m.w.t()), w=weight(4, 6), b=weight(4)), noise(B, 6)


@case
def module_used_on_vectors_and_on_sequences(B):
    return Net(lambda m, x: m.f(torch.tanh(m.f(x)).mean(1)), f=nn.Linear(6, 6)), noise(B, 7, 6)


@case
def siamese_towers(B):
    def forward(m, a, b):
        return m.f(a) * m.f(b)

    return Net(forward, f=mlp()), noise(B, 6), noise(B, 6)


@case
def unused_layer(B):
    return Net(lambda m, x: m.f(x), f=nn.Linear(6, 3), idle=nn.Linear(6, 3), lonely=weight(4)), noise(B, 6)


@case
def merged_lora_with_as_many_rows_as_samples(B):
    def forward(m, x):
        return F.linear(x, m.w + 0.5 * m.up @ m.down)

    return Net(forward, w=weight(B, 6).requires_grad_(False), up=weight(B, 2), down=weight(2, 6)), noise(B, 6)


@case
def frozen_layer_in_the_middle(B):
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 3)
    ), noise(B, 6)


@case
def only_the_biases_train(B):
    model = mlp()
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name)
    return model, noise(B, 7, 6)


@case
def functional_use_of_a_childs_weight(B):
    return Net(
        lambda m, x: F.linear(x, m.f.weight, m.f.bias) + F.linear(x.cos(), 2 * m.f.weight), f=nn.Linear(6, 3)
    ), noise(B, 7, 6)


@case
def scalar_gate(B):
    return Net(lambda m, x: x * m.gate + m.f(x), gate=weight(), f=nn.Linear(6, 6)), noise(B, 6)


@case
def gates_that_are_zero(B):
    """ReZero at initialization: gates are zero, so no gradient flows into the blocks."""

    def forward(m, x):
        return m.head(x + m.gate * m.block(x))

    return Net(forward, gate=nn.Parameter(torch.zeros(1)), block=mlp(6, 8, 6), head=nn.Linear(6, 3)), noise(B, 6)


@case
def cls_token_expanded(B):
    return Net(
        lambda m, x: m.f(torch.cat([m.cls.expand(len(x), -1, -1), x], 1)).cumsum(1),
        cls=weight(1, 1, 6),
        f=nn.Linear(6, 3),
    ), noise(B, 7, 6)


@case
def cls_token_repeated_and_stacked(B):
    def forward(m, x):
        twice = torch.stack([m.cls] * len(x))
        return m.f(torch.cat([twice, x, m.cls.repeat(len(x), 1, 1)], 1)).tanh()

    return Net(forward, cls=weight(1, 6), f=nn.Linear(6, 3)), noise(B, 7, 6)


@case
def layer_scale_and_scale_per_head(B):
    def forward(m, x):
        h = m.f(x).unflatten(-1, (2, 4)) * m.heads[:, None]
        return h.flatten(2) * m.scale

    return Net(forward, f=nn.Linear(6, 8), heads=weight(2), scale=weight(8)), noise(B, 7, 6)


@case
def added_to_batch_equal_to_tokens(B):
    """A bias (T, d) is added to a batch (B, T, d) with B = T = d."""
    return Net(
        lambda m, x: torch.tanh(x + m.shift) * m.scale[:, None] / (2 + m.divide.cos()),
        shift=weight(B, B),
        scale=weight(B),
        divide=weight(B),
    ), noise(B, B, B)


@case
def elementwise_arithmetic(B):
    def forward(m, x):
        y = (x - m.a) / (1 + m.b.square()) + torch.atan2(x, m.c) - m.a * m.b
        return torch.maximum(y, m.c) + torch.lerp(x, m.a, m.b.sigmoid()) + torch.addcmul(x, m.a, m.b, value=0.5)

    return Net(forward, a=weight(6), b=weight(1, 6), c=weight(7, 1)), noise(B, 7, 6)


@case
def powers_and_logarithms(B):
    return Net(
        lambda m, x: (x.square() + 1) ** m.p + torch.logaddexp(x, m.q) + m.q.exp() ** x.tanh(), p=weight(6), q=weight(6)
    ), noise(B, 7, 6)


@case
def matmul_with_the_parameter_on_the_left(B):
    return Net(lambda m, x: m.w @ x + m.w2 @ x.cos(), w=weight(3, 7), w2=weight(1, 3, 7)), noise(B, 7, 6)


@case
def matrix_vector_products(B):
    """Samples are processed one at a time with mv, dot and outer."""

    def forward(m, x):
        return torch.stack([torch.outer(m.w.mv(row), m.v).flatten() * torch.dot(m.v, row[:4]) for row in x])

    return Net(forward, w=weight(3, 6), v=weight(4)), noise(B, 6)


@case
def batched_weights_per_head(B):
    """A 3-D parameter (heads, d, e) in bmm, heads first: (h, B·T, d)."""

    def forward(m, x):
        heads = x.flatten(0, 1).unflatten(-1, (3, 2)).transpose(0, 1)
        return torch.baddbmm(m.b, heads, m.w).transpose(0, 1).reshape(*x.shape[:2], -1)

    return Net(forward, w=weight(3, 2, 4), b=weight(3, 1, 4)), noise(B, 7, 6)


@case
def batched_weights_as_many_as_samples(B):
    """Heads = B, so sizes do not distinguish the dims of the parameter from those of the samples."""
    return Net(lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1), w=weight(B, B, B)), noise(B, B, B)


@case
def a_weight_per_token(B):
    return Net(
        lambda m, x: torch.einsum("btd,tdo->bto", x, m.w) + torch.tensordot(x, m.v, ([1, 2], [0, 1]))[:, None],
        w=weight(7, 6, 3),
        v=weight(7, 6, 3),
    ), noise(B, 7, 6)


@case
def tensor_train(B):
    def forward(m, x):
        return torch.einsum("bij,ar,aim,rjn->bmn", x.unflatten(-1, (2, 3)), m.core, m.left, m.right)

    return Net(forward, core=weight(3, 4), left=weight(3, 2, 3), right=weight(4, 3, 2)), noise(B, 6)


@case
def kronecker_weight(B):
    return Net(lambda m, x: x @ torch.kron(m.a, m.b).t(), a=weight(2, 3), b=weight(4, 2)), noise(B, 6)


@case
def product_of_weights_before_the_data(B):
    return Net(lambda m, x: x @ (m.a @ m.b @ m.c), a=weight(6, 4), b=weight(4, 5), c=weight(5, 3)), noise(B, 7, 6)


@case
def parameter_indexed_by_ids(B):
    return Net(lambda m, ids: m.f(m.table[ids].tanh()), table=weight(11, 6), f=nn.Linear(6, 3)), tokens(B, 7)


@case
def parameter_index_select(B):
    return Net(
        lambda m, ids: m.table.index_select(0, ids.flatten()).unflatten(0, ids.shape).sin(), table=weight(11, 6)
    ), tokens(B, 7)


@case
def parameter_gathered(B):
    def forward(m, ids):
        return torch.gather(m.table.tanh().expand(len(ids), -1), 1, ids) * m.table.take(ids)

    return Net(forward, table=weight(11)), tokens(B, 7)


@case
def column_of_a_parameter_by_class(B):
    return Net(lambda m, x, y: m.f(x) * m.w[:, y].t(), f=nn.Linear(6, 8), w=weight(8, 11)), noise(B, 6), tokens(B)


@case
def all_weights_from_one_flat_vector(B):
    def forward(m, x):
        first, bias, second = m.flat.split([48, 8, 24])
        return torch.tanh(x @ first.view(6, 8) + bias) @ second.view(3, 8).t()

    return Net(forward, flat=weight(80)), noise(B, 7, 6)


@case
def chunked_qkv_weight(B):
    def forward(m, x):
        q, k, v = (F.linear(x, w, b) for w, b in zip(m.w.chunk(3), m.b.chunk(3), strict=True))
        return (q @ k.mT).softmax(-1) @ v

    return Net(forward, w=weight(18, 6), b=weight(18)), noise(B, 7, 6)


@case
def weights_concatenated_before_use(B):
    return Net(
        lambda m, x: F.linear(x, torch.cat([m.a, m.b]), torch.cat([m.c, m.c])),
        a=weight(4, 6),
        b=weight(2, 6),
        c=weight(3),
    ), noise(B, 7, 6)


@case
def weight_norm_on_a_convolution(B):
    return parametrizations.weight_norm(nn.Conv1d(3, 4, 3)), noise(B, 3, 9)


@case(shared=(6, 8))
def spectral_norm_in_eval_mode(B):
    """The vectors (6,) and (8,) of spectral norm are copies of buffers."""
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3)).eval(), noise(
        B, 7, 6
    )


@case
def orthogonal_weight(B):
    return parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="cayley"), noise(B, 6)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).mT


@case
def symmetric_by_a_custom_parametrization(B):
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return Net(lambda m, x: m.f(torch.tanh(m.f(x))), f=layer), noise(B, 7, 6)


@case
def standardized_weight(B):
    def forward(m, x):
        w = m.f.weight
        return F.conv2d(x, (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5), m.f.bias)

    return Net(forward, f=nn.Conv2d(3, 4, 3)), noise(B, 3, 6, 5)


@case(needs_module=True)
def masked_weight(B):
    """Pruned weight: the mask is a buffer with as many rows as samples."""
    return Net(lambda m, x: F.linear(x, m.w * m.keep), w=weight(B, 6), keep=(noise(B, 6) > 0).double()), noise(B, 7, 6)


@case(rows=False, shared=(6, 13))
def dropout_on_a_weight(B):
    """The dropout mask belongs to no module; with one row per sample it could be data."""
    return Net(lambda m, x: F.linear(x, F.dropout(m.w, 0.3)), w=weight(13, 6)), noise(B, 7, 6)


@case
def quantized_weight_straight_through(B):
    def forward(m, x):
        step = m.step.exp()
        w = m.w / step
        return F.linear(x, (w + (w.round() - w).detach()) * step)

    return Net(forward, w=weight(3, 6), step=nn.Parameter(torch.tensor(-2.0))), noise(B, 7, 6)


@case
def hypernetwork_with_weights_per_sample(B):
    def forward(m, x, z):
        return torch.bmm(x, m.make(z).view(-1, 6, 3)) + m.shift(z)[:, None]

    return Net(forward, make=nn.Linear(4, 18), shift=nn.Linear(4, 3)), noise(B, 7, 6), noise(B, 4)


@case
def hypernetwork_fed_by_a_parameter(B):
    """The code is a parameter, so the whole generating network depends on parameters only."""
    return Net(lambda m, x: F.linear(x, m.make(m.code).view(3, 6)), code=weight(4), make=mlp(4, 8, 18)), noise(B, 7, 6)


@case(shared=(13,), second_order=False)
def prototypes_from_a_fixed_support_set(B):
    def forward(m, x):
        return torch.cdist(m.f(x), m.f(m.support))

    return Net(forward, f=mlp(6, 8, 4), support=noise(13, 6)), noise(B, 6)


@case
def cosine_to_learned_prototypes(B):
    return Net(
        lambda m, x: F.normalize(m.f(x), dim=-1) @ F.normalize(m.prototypes, dim=-1).t(),
        f=nn.Linear(6, 4),
        prototypes=weight(9, 4),
    ), noise(B, 6)


@case(second_order=False)
def distance_to_learned_centroids(B):
    return Net(lambda m, x: torch.cdist(m.f(x), m.centroids), f=nn.Linear(6, 4), centroids=weight(9, 4)), noise(B, 6)


@case
def radial_basis_layer(B):
    def forward(m, x):
        return m.out((-(x[:, None] - m.centres).square().sum(-1) * m.width.exp()).exp())

    return Net(forward, centres=weight(9, 6), width=weight(9), out=nn.Linear(9, 3)), noise(B, 6)


@case
def spline_edges_as_in_kan(B):
    """Every input-output pair has its own hat functions."""

    def forward(m, x):
        knots = torch.linspace(-2, 2, 8, dtype=x.dtype, device=x.device)
        return torch.einsum("bik,oik->bo", (1 - (x[..., None] - knots).abs()).relu(), m.coefficients)

    return Net(forward, coefficients=weight(3, 6, 8)), noise(B, 6)


@case
def polynomial_features(B):
    return Net(lambda m, x: sum(c * x**k for k, c in enumerate(m.c)), c=weight(4, 6)), noise(B, 6)


@case
def triangular_covariance(B):
    """A Gaussian head: solve with the Cholesky factor of a parameter."""

    def forward(m, x):
        L = torch.tril(m.raw, -1) + torch.diag(m.raw.diagonal().exp())
        return torch.linalg.solve_triangular(L, m.f(x)[..., None], upper=False).squeeze(-1)

    return Net(forward, raw=weight(3, 3), f=nn.Linear(6, 3)), noise(B, 6)


@case
def matrix_exponential_flow(B):
    return Net(lambda m, x: x @ torch.linalg.matrix_exp(m.w - m.w.t()), w=weight(6, 6)), noise(B, 6)


@case
def batch_of_parameters_summed_to_one(B):
    """The parameter is (B, 6) and is used by all samples, not row by row."""
    return Net(lambda m, x: x * m.w.softmax(0).sum(1).mean() + m.w.logsumexp(0), w=weight(B, 6)), noise(B, 6)


@case(rows=False)
def one_parameter_row_per_sample(B):
    """Latent codes: sample i uses row i of the parameter."""
    return Net(lambda m, x: m.f(x + m.codes), codes=weight(B, 6), f=mlp()), noise(B, 6)
