"""Cases: losses with parameters, penalties, zeros and gradients."""

import torch
import torch.nn.functional as F
from torch import nn

from samplewise.testing.case import Net, as_losses, noise, squared_loss, tokens, weight
from samplewise.testing.cases import mlp
from zoo.register import case


@case(loss=as_losses)
def learned_temperature(B):
    return (
        Net(lambda m, x, y: F.cross_entropy(m.f(x) * m.t.exp(), y, reduction="none"), f=mlp(6, 8, 11), t=weight()),
        noise(B, 6),
        tokens(B),
    )


@case(loss=as_losses)
def learned_class_weights(B):
    def forward(m, x, y):
        return F.cross_entropy(m.f(x), y, reduction="none") * F.softplus(m.w)[y]

    return Net(forward, f=mlp(6, 8, 11), w=weight(11)), noise(B, 6), tokens(B)


@case(loss=as_losses)
def center_loss(B):
    return (
        Net(lambda m, x, y: (m.f(x) - m.centres[y]).square().sum(1), f=mlp(), centres=weight(11, 3)),
        noise(B, 6),
        tokens(B),
    )


@case(loss=as_losses)
def learned_task_uncertainties(B):
    """Two heads; the loss of a sample is the sum of both."""

    def forward(m, x):
        h = m.f(x)
        parts = torch.stack([squared_loss(m.a(h)), squared_loss(m.b(h).sin())], 1)
        return (parts * (-m.s).exp() + m.s).sum(1)

    return Net(forward, f=mlp(), a=nn.Linear(3, 2), b=nn.Linear(3, 4), s=weight(2)), noise(B, 6)


@case(loss=as_losses)
def regularizer_added_to_every_sample(B):
    def forward(m, x):
        return squared_loss(m.f(x)) + 0.1 * sum(p.square().sum() for p in m.f.parameters())

    return Net(forward, f=mlp()), noise(B, 6)


@case(loss=as_losses)
def orthogonality_penalty_on_a_weight_with_as_many_rows_as_samples(B):
    def forward(m, x):
        w = m.f.weight
        return squared_loss(m.f(x)) + (w @ w.t() - torch.eye(B, dtype=w.dtype, device=w.device)).square().sum()

    return Net(forward, f=nn.Linear(6, B)), noise(B, 6)


@case(loss=as_losses)
def regularizer_scaled_by_the_sample(B):
    return Net(lambda m, x: squared_loss(m.f(x)) + x[:, 0].square() * m.f[0].weight.norm(), f=mlp()), noise(B, 6)


@case(loss=as_losses)
def hinge_with_many_exact_zeros(B):
    def forward(m, x, y):
        scores = m.f(x)
        right = scores.gather(1, y[:, None])
        return (scores - right + 0.05).relu().sum(1) - 0.05

    return Net(forward, f=nn.Linear(6, 3)), 3 * noise(B, 6), tokens(B, vocabulary=3)


@case(loss=as_losses)
def hinge_that_is_zero_for_whole_samples(B):
    """Every second sample has zero gradient."""
    sign = 1 - 2.0 * (torch.arange(B) % 2)
    return Net(lambda m, x, y: (y * (5 + m.f(x).squeeze(1).tanh())).relu(), f=mlp(6, 8, 1)), noise(B, 6), sign


@case(loss=as_losses)
def samples_that_reach_no_parameter(B):
    def forward(m, x, reached):
        return torch.where(reached, squared_loss(m.f(x)), x.square().sum(1))

    return Net(forward, f=mlp()), noise(B, 6), torch.arange(B) % 3 != 1


@case(loss=as_losses, rows=False)
def losses_joined_with_constants(B):
    """The last losses are constants that are not in the graph."""
    keep = B - B // 3

    def forward(m, x):
        return torch.cat([squared_loss(m.f(x[:keep])), x[keep:, 0].square()])

    return Net(forward, f=mlp()), noise(B, 6)


@case(loss=as_losses, rows=False)
def losses_of_mixed_signs_by_position(B):
    return Net(lambda m, x: -0.5 * m.f(x).sum(1) * (torch.arange(len(x), device=x.device) - 1.5), f=mlp()), noise(B, 6)


@case(loss=as_losses)
def gradient_penalty_on_the_inputs(B):
    """The losses contain gradients, so the graph is that of a double backward."""

    def forward(m, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(m.f(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square() + squared_loss(m.f(x))

    return Net(forward, f=mlp()), noise(B, 6)


@case(loss=as_losses)
def differential_equation_residual(B):
    """Physics-informed network: second derivatives in the loss."""

    def forward(m, t):
        t = t.detach().requires_grad_()
        u = m.f(t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), t, create_graph=True)
        return (ddu + m.stiffness * u).square().mean((1, 2))

    return Net(
        forward,
        f=nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)),
        stiffness=weight(),
    ), noise(B, 7, 1)


@case(loss=as_losses, second_order=False)
def ctc_over_time_first_scores(B):
    def forward(m, x, y):
        scores = m.f(x).log_softmax(-1).transpose(0, 1)
        frames, letters = (torch.full((len(x),), n, device=x.device) for n in (7, 3))
        return F.ctc_loss(scores, y, frames, letters, reduction="none")

    return Net(forward, f=mlp(6, 8, 11)), noise(B, 7, 6), 1 + tokens(B, 3, vocabulary=10)


@case(loss=as_losses)
def mixture_density(B):
    def forward(m, x, y):
        odds, mean, spread = m.f(x).chunk(3, 1)
        return -torch.logsumexp(odds.log_softmax(1) - spread - 0.5 * ((y - mean) / spread.exp()).square(), 1)

    return Net(forward, f=mlp(6, 8, 12)), noise(B, 6), noise(B, 1)


@case(loss=as_losses, rows=False)
def variational_autoencoder(B):
    def forward(m, x):
        mean, spread = m.encode(x).chunk(2, 1)
        z = mean + spread.exp() * torch.randn(mean.shape, dtype=torch.float64, device="cpu").to(mean)
        return (m.decode(z) - x).square().sum(1) + 0.5 * (mean.square() + (2 * spread).exp() - 2 * spread).sum(1)

    return Net(forward, encode=mlp(6, 8, 8), decode=mlp(4, 8, 6)), noise(B, 6)


@case(loss=as_losses)
def vector_quantization_with_codebook_loss(B):
    def forward(m, x):
        z = m.encode(x)
        code = m.book[torch.cdist(z, m.book).argmin(1)]
        passed = z + (code - z).detach()
        return (
            squared_loss(m.decode(passed))
            + (code - z.detach()).square().sum(1)
            + 0.25 * (z - code.detach()).square().sum(1)
        )

    return Net(forward, encode=mlp(6, 8, 4), book=weight(9, 4), decode=mlp(4, 8, 3)), noise(B, 6)


@case(loss=as_losses)
def policy_gradient_with_value_baseline(B):
    def forward(m, x, action, reward):
        value = m.value(x).squeeze(1)
        chosen = m.policy(x).log_softmax(1).gather(1, action[:, None]).squeeze(1)
        return -chosen * (reward - value.detach()) + (reward - value).square()

    return Net(forward, policy=mlp(), value=mlp(6, 8, 1)), noise(B, 6), tokens(B, vocabulary=3), noise(B)


@case(loss=as_losses)
def distillation_from_a_frozen_teacher(B):
    def forward(m, x):
        return F.kl_div(m.student(x).log_softmax(1), m.teacher(x).softmax(1), reduction="none").sum(1)

    return Net(forward, student=mlp(), teacher=mlp().requires_grad_(False)), noise(B, 6)


@case(loss=as_losses)
def clamped_and_masked_outputs(B):
    def forward(m, x):
        h = m.f(x).clamp(-0.3, 0.3)
        h = torch.where(x[:, :3] > 0, h, h.detach())
        return h.masked_fill(x[:, 3:] > 1, 0.0).square().sum(1)

    return Net(forward, f=mlp()), noise(B, 6)


@case(loss=as_losses)
def huber_and_quantile(B):
    def forward(m, x, y):
        error = m.f(x) - y
        return F.huber_loss(m.f(x), y, reduction="none", delta=0.5).mean(1) + torch.maximum(
            0.8 * error, -0.2 * error
        ).sum(1)

    return Net(forward, f=mlp()), noise(B, 6), noise(B, 3)


@case(loss=as_losses)
def deepest_of_several_exits(B):
    """Each sample's loss is the minimum over three heads."""

    def forward(m, x):
        each, h = [], x
        for block, head in zip(m.blocks, m.heads, strict=True):
            h = h + block(h)
            each.append(squared_loss(head(h)))
        return torch.stack(each).min(0).values + torch.stack(each, 1).logsumexp(1)

    parts = dict(
        blocks=nn.ModuleList([mlp(6, 8, 6) for _ in range(3)]), heads=nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])
    )
    return Net(forward, **parts), noise(B, 6)
