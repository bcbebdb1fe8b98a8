"""Cases: samples interact. Refused by default; with interacting="allow" the Jacobian rows are exact."""

import torch
import torch.nn.functional as F
from torch import nn

from samplewise.testing.case import Net, as_losses, noise, squared_loss, tokens
from samplewise.testing.cases import MORE_THAN_ONE, mlp, recompute
from zoo.register import case


def interacting(**flags):
    return case(interacts=True, sizes=MORE_THAN_ONE, **flags)


@interacting()
def batch_norm_on_images_in_training_mode(B):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1)), noise(B, 3, 6, 5)


@interacting()
def batch_norm_on_the_raw_inputs(B):
    """No parameters below the batch norm: no activation gradient is mixed, but samples interact."""
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)), noise(B, 6)


@interacting()
def batch_normalized_by_hand(B):
    return Net(lambda m, x: m.b(((h := m.a(x)) - h.mean(0)) / h.std(0)), a=nn.Linear(6, 8), b=nn.Linear(8, 3)), noise(
        B, 6
    )


@interacting()
def softmax_over_the_batch(B):
    return Net(lambda m, x: m.b(m.a(x).softmax(0)), a=nn.Linear(6, 8), b=nn.Linear(8, 3)), noise(B, 6)


@interacting()
def manifold_mixup(B):
    return Net(lambda m, x: m.b(0.7 * (h := m.a(x)) + 0.3 * h.roll(1, 0)), a=nn.Linear(6, 8), b=nn.Linear(8, 3)), noise(
        B, 6
    )


@interacting()
def running_sum_over_the_batch(B):
    return Net(lambda m, x: m.b(m.a(x).cumsum(0).tanh()), a=nn.Linear(6, 8), b=nn.Linear(8, 3)), noise(B, 6)


@interacting(loss=as_losses)
def loss_of_neighboring_pairs(B):
    return Net(lambda m, x: ((h := m.f(x)) - h.roll(1, 0)).square().sum(1), f=mlp()), noise(B, 6)


@interacting(loss=as_losses)
def losses_divided_by_their_sum(B):
    return Net(lambda m, x: (each := squared_loss(m.f(x))) / each.sum(), f=mlp()), noise(B, 6)


@interacting()
def standard_deviation_of_the_batch_as_a_feature(B):
    def forward(m, x):
        h = m.a(x)
        return m.b(torch.cat([h, h.std(0).mean().expand(len(h), 1)], 1))

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(9, 3)), noise(B, 6)


@interacting()
def nodes_of_one_graph(B):
    """One loss per node, with messages between nodes."""

    def forward(m, x):
        h = m.a(x)
        return m.b(h + torch.zeros_like(h).index_add(0, torch.arange(len(h), device=h.device).roll(1), h).tanh())

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3)), noise(B, 6)


@interacting()
def experts_normalized_over_the_batch(B):
    """Expert choice: each expert applies a softmax over all rows."""

    def forward(m, x):
        weights = m.gate(x).softmax(0)
        return weights @ torch.tanh(weights.t() @ m.f(x))

    return Net(forward, gate=nn.Linear(6, 4), f=nn.Linear(6, 3)), noise(B, 6)


@interacting(loss=as_losses)
def balance_penalty_of_a_router(B):
    def forward(m, x, y):
        odds = m.gate(x).softmax(1)
        return F.cross_entropy(m.f(x) + odds @ m.mix.weight, y, reduction="none") + odds.mean(0).square().sum()

    return Net(forward, gate=nn.Linear(6, 4), f=mlp(6, 8, 11), mix=nn.Linear(11, 4, bias=False)), noise(B, 6), tokens(B)


@interacting()
def recurrent_net_run_along_the_batch(B):
    """An input (B, T, d) is passed to an LSTM that expects (T, B, d)."""
    return Net(lambda m, x: m.f(x)[0], f=nn.LSTM(6, 4)), noise(B, 7, 6)


@interacting()
def checkpointed_batch_mean(B):
    def centered(h):
        return h - h.mean(0)

    return Net(lambda m, x: m.b(recompute(centered, m.a(x))), a=nn.Linear(6, 8), b=nn.Linear(8, 3)), noise(B, 6)


@interacting(loss=as_losses)
def anchors_shared_by_several_triplets(B):
    """Mined triplets: one row of activations is used by two losses."""

    def forward(m, x):
        h = m.f(x)
        return F.triplet_margin_loss(h[torch.arange(len(h), device=h.device) // 2], h, -h, margin=5.0, reduction="none")

    return Net(forward, f=mlp()), noise(B, 6)
