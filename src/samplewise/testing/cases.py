"""Cases of `samplewise doctor --zoo`: small models, each named after what makes its gradients hard to compute."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from samplewise.testing.case import Cases, Net, as_losses, noise, squared_loss, tokens, weight

CASES = Cases()
case = CASES.add


# -------------------------------------------------------------------------------------------------------------- layers


def mlp(i=6, h=8, o=3):
    return nn.Sequential(nn.Linear(i, h), nn.Tanh(), nn.Linear(h, o))


@case
def linear_on_vectors(B):
    return mlp(), noise(B, 6)


@case
def linear_on_sequences(B):
    return mlp(), noise(B, 7, 6)


@case
def batch_equals_tokens_equals_features(B):
    return Net(lambda m, x: m.b(torch.tanh(m.a(x)).mT), a=nn.Linear(B, B), b=nn.Linear(B, B)), noise(B, B, B)


@case
def prelu_shared_slope(B):
    return nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 3)), noise(B, 6)


@case
def layer_norm(B):
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), noise(B, 7, 6)


@case
def group_norm(B):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Tanh(), nn.Conv2d(8, 3, 1)), noise(B, 3, 6, 5)


@case
def batch_norm_in_eval_mode(B):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    return model.eval(), noise(B, 3, 6, 5)


@case
def embedding(B):
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 3)), tokens(B, 7)


@case(second_order=False)
def embedding_bag_sum(B):
    return nn.Sequential(nn.EmbeddingBag(11, 6, mode="sum"), nn.Linear(6, 3)), tokens(B, 7)


@case
def activations_of_every_kind(B):
    kinds = [
        nn.SiLU(),
        nn.ELU(),
        nn.Hardtanh(),
        nn.Softplus(),
        nn.Mish(),
        nn.LeakyReLU(),
        nn.Softmax(-1),
        nn.LogSigmoid(),
    ]
    return nn.Sequential(*[part for kind in kinds for part in (nn.Linear(6, 6), kind)]), noise(B, 6)


# -------------------------------------------------------------------------------------------------------- convolutions


@case
def conv2d(B):
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 3, 3, stride=2)), noise(B, 3, 7, 6)


@case
def conv2d_with_groups(B):
    return nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Conv2d(6, 9, 1, groups=3)), noise(B, 4, 6, 5)


@case
def depthwise_separable(B):
    return nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 3, 1)), noise(B, 4, 6, 5)


@case
def conv_transpose_2d(B):
    return nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1, padding=1), nn.Tanh()), noise(
        B, 3, 4, 5
    )


@case
def conv2d_channels_last(B):
    model = Net(
        lambda m, x: m.f(x.to(memory_format=torch.channels_last)),
        f=nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 3)),
    )
    return model.to(memory_format=torch.channels_last), noise(B, 3, 7, 6)


# ----------------------------------------------------------------------------------------------------------- attention


@case
def multihead_attention(B):
    return Net(
        lambda m, x: m.f(x, x, x, need_weights=False)[0], f=nn.MultiheadAttention(6, 2, batch_first=True)
    ), noise(B, 7, 6)


@case
def transformer_encoder_layer(B):
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), noise(B, 7, 6)


@case
def causal_language_model_with_tied_head(B):
    def forward(m, ids):
        h = m.words(ids) + m.places[: ids.shape[1]]
        q, k, v = m.qkv(m.norm(h)).reshape(*h.shape[:2], 3, 2, 3).permute(2, 0, 3, 1, 4)
        h = h + m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return h @ m.words.weight.t()

    parts = dict(
        words=nn.Embedding(11, 6), places=weight(9, 6), norm=nn.LayerNorm(6), qkv=nn.Linear(6, 18), out=nn.Linear(6, 6)
    )
    return Net(forward, **parts), tokens(B, 7)


@case
def grouped_query_rotary_attention(B):
    def rotate(x):
        angle = torch.arange(x.shape[2], dtype=x.dtype, device=x.device)[:, None] / x.new_tensor([1.0, 10.0])
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(m, x):
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (m.q, m.k, m.v))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = (rotate(q) @ rotate(k).mT).softmax(-1)
        return m.o((scores @ v).transpose(1, 2).flatten(2))

    parts = dict(
        q=nn.Linear(6, 16, bias=False),
        k=nn.Linear(6, 8, bias=False),
        v=nn.Linear(6, 8, bias=False),
        o=nn.Linear(16, 6, bias=False),
    )
    return Net(forward, **parts), noise(B, 5, 6)


@case
def windows_shifted_as_in_swin(B):
    def forward(m, x):
        windows = x.roll(-2, 1).reshape(-1, 4, 6)
        return m.f(windows, windows, windows)[0].reshape(x.shape).roll(2, 1)

    return Net(forward, f=nn.MultiheadAttention(6, 2, batch_first=True)), noise(B, 8, 6)


# -------------------------------------------------------------------------------------------------- recurrent networks


def sequence_output(m, x):
    return m.f(x)[0]


@case
def lstm_batch_first(B):
    return Net(sequence_output, f=nn.LSTM(6, 4, batch_first=True)), noise(B, 7, 6)


@case
def gru_batch_first(B):
    return Net(sequence_output, f=nn.GRU(6, 4, batch_first=True)), noise(B, 7, 6)


@case
def lstm_cell_in_a_loop(B):
    def forward(m, x):
        h, c = m.start.expand(2, len(x), 4)
        for step in x.unbind(1):
            h, c = m.cell(step, (h, c))
        return h

    return Net(forward, cell=nn.LSTMCell(6, 4), start=weight(1, 4)), noise(B, 5, 6)


# ----------------------------------------------------------------------------------------------------- uses of weights


@case
def tied_embedding_and_head(B):
    def forward(m, ids):
        return m.head(torch.tanh(m.words(ids)))

    model = Net(forward, words=nn.Embedding(11, 6), head=nn.Linear(6, 11, bias=False))
    model.head.weight = model.words.weight
    return model, tokens(B, 7)


@case
def module_used_twice(B):
    return Net(lambda m, x: m.f(torch.tanh(m.f(x))), f=nn.Linear(6, 6)), noise(B, 7, 6)


@case
def frozen_base_with_lora(B):
    base = nn.Linear(6, 3).requires_grad_(False)
    return Net(
        lambda m, x: m.base(x) + m.up(m.down(x)),
        base=base,
        down=nn.Linear(6, 2, bias=False),
        up=nn.Linear(2, 3, bias=False),
    ), noise(B, 7, 6)


@case
def position_table_sliced(B):
    return Net(
        lambda m, x: m.f(x + m.places[:, 1 : x.shape[1] + 1]), places=weight(1, 12, 6), f=nn.Linear(6, 3)
    ), noise(B, 7, 6)


@case
def weight_norm(B):
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)),
        nn.Tanh(),
        parametrizations.weight_norm(nn.Linear(8, 3), dim=None),
    ), noise(B, 7, 6)


# -------------------------------------------------------------------------------------------------------------- losses


@case(loss=as_losses)
def cross_entropy_of_a_classifier(B):
    return Net(lambda m, x, y: F.cross_entropy(m.f(x), y, reduction="none"), f=mlp(6, 8, 11)), noise(B, 6), tokens(B)


@case(loss=as_losses)
def mean_over_valid_tokens(B):
    """Cross-entropy with ignore_index; each sample has its own denominator."""
    targets = tokens(B, 7)
    targets[:, 5:] = -100

    def forward(m, x, y):
        per_token = F.cross_entropy(m.f(x).mT, y, reduction="none", label_smoothing=0.1)
        return per_token.sum(1) / (y != -100).sum(1)

    return Net(forward, f=mlp(6, 8, 11)), noise(B, 7, 6), targets


@case(loss=as_losses)
def one_sample_outweighs_all_others(B):
    scale = 10.0 ** (torch.arange(B) % 9 - 4)
    return Net(lambda m, x, s: s * squared_loss(m.f(x)), f=mlp()), noise(B, 6), scale


# ----------------------------------------------------------------------------------------------- mechanics of autograd


def recompute(block, *inputs):
    return checkpoint(block, *inputs, use_reentrant=False)


@case
def checkpointed_block(B):
    return Net(lambda m, x: m.head(recompute(m.block, x)), block=mlp(6, 8, 6), head=nn.Linear(6, 3)), noise(B, 7, 6)


class OwnLinear(torch.autograd.Function):
    """Linear layer with a custom backward, which is not differentiable again."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x @ w.t() + b

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2), g.flatten(0, -2).sum(0)


@case(second_order=False)
def custom_function_that_is_a_layer(B):
    return Net(
        lambda m, x: OwnLinear.apply(torch.tanh(OwnLinear.apply(x, m.w, m.b)), m.w, m.b), w=weight(6, 6), b=weight(6)
    ), noise(B, 7, 6)


@case
def written_in_place(B):
    def forward(m, x):
        h = m.a(x)
        h[:, 2:4] = m.b(x[:, 2:4])
        h.mul_(m.scale).add_(m.shift)
        h[:, 0].zero_()
        return h.sin_()

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(6, 8), scale=weight(8), shift=weight(8)), noise(B, 7, 6)


# ------------------------------------------------------------------------------------------------------ rows that move


@case
def rows_sorted_by_value_and_put_back(B):
    def forward(m, x):
        order = x[:, 0].argsort()
        return m.b(torch.tanh(m.a(x[order])))[order.argsort()]

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3)), noise(B, 6)


@case(loss=as_losses, rows=False)
def losses_picked_by_a_mask(B):
    return Net(lambda m, x: squared_loss(m.f(x))[torch.arange(len(x), device=x.device) % 2 == 1], f=mlp()), noise(
        2 * B, 6
    )


@case(loss=as_losses, rows=False)
def packed_documents_under_a_block_diagonal_mask(B):
    """All documents are packed into one row of tokens; each loss is a segment sum."""
    owner = torch.repeat_interleave(torch.arange(B), torch.arange(B) % 3 + 1)

    def forward(m, ids):
        h = m.words(ids)
        q, k, v = m.qkv(h).chunk(3, -1)
        segment = owner.to(ids.device)
        mask = segment[:, None] == segment[None]
        h = h + F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask[None])[0]
        per_token = F.cross_entropy(m.head(h), ids, reduction="none")
        return per_token.new_zeros(B).index_add(0, segment, per_token)

    return Net(forward, words=nn.Embedding(11, 6), qkv=nn.Linear(6, 18), head=nn.Linear(6, 11)), tokens(len(owner))


@case
def experts_chosen_per_token(B):
    """Top-1 routing with index_add."""

    def forward(m, x):
        flat = x.flatten(0, 1)
        odds = m.gate(flat).softmax(-1)
        best = odds.argmax(-1)
        out = flat.new_zeros(len(flat), 3)
        for k, expert in enumerate(m.experts):
            routed = (best == k).nonzero().squeeze(-1)
            out = out.index_add(0, routed, (expert(flat[routed]) * odds[routed, k, None]).to(out.dtype))
        return out.view(len(x), -1)

    return Net(forward, gate=nn.Linear(6, 3), experts=nn.ModuleList([mlp() for _ in range(3)])), noise(B, 7, 6)


# --------------------------------------------------------------- samples that depend on each other: refused by default


MORE_THAN_ONE = (2, 3, 5, 6, 7, 64, 1024)


def interacting(**flags):
    return case(interacts=True, sizes=MORE_THAN_ONE, **flags)


@interacting()
def batch_norm_in_training_mode(B):
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), noise(B, 6)


@interacting()
def batch_mean_subtracted(B):
    return Net(lambda m, x: m.b((h := m.a(x)) - h.mean(0)), a=nn.Linear(6, 8), b=nn.Linear(8, 3)), noise(B, 6)


@interacting(loss=as_losses)
def contrast_within_the_batch(B):
    def forward(m, x, y):
        scores = F.normalize(m.f(x), dim=1) @ F.normalize(m.f(y), dim=1).t() / 0.2
        return F.cross_entropy(scores, torch.arange(len(x), device=x.device), reduction="none")

    return Net(forward, f=mlp()), noise(B, 6), noise(B, 6)


@interacting()
def attention_across_the_batch(B):
    return Net(
        lambda m, x: m.f(x[None], x[None], x[None])[0][0], f=nn.MultiheadAttention(6, 2, batch_first=True)
    ), noise(B, 6)
