"""Cases: layers of torch.nn other than convolutions, recurrent layers and attention."""

import torch
import torch.nn.functional as F
from torch import nn

from samplewise.testing.case import Net, as_losses, noise, tokens, weight
from samplewise.testing.cases import mlp
from zoo.register import case


@case
def linear_on_4d(B):
    return mlp(), noise(B, 2, 4, 6)


@case
def linear_without_bias(B):
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.GELU(), nn.Linear(8, 3, bias=False)), noise(B, 7, 6)


@case
def linear_with_one_feature(B):
    return nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)), noise(B, 1)


@case
def linear_with_kwargs(B):
    return Net(
        lambda m, x: m.head(input=torch.tanh(m.body(input=x))), body=nn.Linear(6, 8), head=nn.Linear(8, 3)
    ), noise(B, 7, 6)


@case
def linear_on_transposed_input(B):
    return Net(lambda m, x: m.mix(x.transpose(1, 2)), mix=nn.Linear(7, 3)), noise(B, 7, 6)


@case
def mlp_mixer(B):
    def forward(m, x):
        x = x + m.time(m.norm(x).mT).mT
        return x + m.channel(m.norm(x))

    return Net(forward, norm=nn.LayerNorm(6), time=mlp(7, 8, 7), channel=mlp(6, 8, 6)), noise(B, 7, 6)


@case
def tokens_flattened_to_rows(B):
    return Net(lambda m, x: m.f(x.reshape(-1, 6)).reshape(len(x), -1), f=mlp()), noise(B, 7, 6)


@case
def in_place_relu(B):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), noise(B, 6)


@case
def prelu_slope_per_channel(B):
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.PReLU(8), nn.Conv1d(8, 3, 3)), noise(B, 3, 9)


@case
def bilinear(B):
    return Net(lambda m, x, y: m.f(x, y), f=nn.Bilinear(6, 4, 3)), noise(B, 6), noise(B, 4)


@case
def bilinear_on_sequences(B):
    return Net(lambda m, x: m.f(x, x.flip(1)), f=nn.Bilinear(6, 6, 3, bias=False)), noise(B, 7, 6)


@case
def layer_norm_without_bias(B):
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, bias=False)), noise(B, 7, 6)


@case
def layer_norm_over_two_dims(B):
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm((7, 8))), noise(B, 7, 6)


@case
def layer_norm_over_everything_but_batch_equal_to_tokens(B):
    return nn.Sequential(nn.Linear(B, B), nn.LayerNorm((B, B))), noise(B, B, B)


@case
def layer_norm_by_hand(B):
    def forward(m, x):
        h = m.inner(x)
        h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True) + 1e-5).sqrt()
        return m.scale * h + m.shift

    return Net(forward, inner=nn.Linear(6, 8), scale=weight(8), shift=weight(8)), noise(B, 7, 6)


@case(autocast=False)
def rms_norm(B):
    return nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 3)), noise(B, 7, 6)


@case
def instance_norm(B):
    """Computed as batch norm in training mode on (1, B·C, …), but samples do not interact."""
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4, affine=True), nn.Conv1d(4, 3, 1)), noise(B, 3, 9)


@case
def instance_norm_2d_without_affine(B):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.Tanh()), noise(B, 3, 6, 5)


@case
def batch_norm_1d_in_eval_mode(B):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[1].running_var.uniform_(0.5, 2)
    return model.eval(), noise(B, 6)


@case
def local_response_norm(B):
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.LocalResponseNorm(3), nn.Conv2d(6, 3, 1)), noise(B, 3, 6, 5)


@case(rows=False)
def dropout_with_one_mask(B):
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 3)), noise(B, 7, 6)


@case(rows=False)
def dropout_of_channels(B):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout2d(0.3), nn.Conv2d(8, 3, 1)), noise(B, 3, 6, 5)


@case(rows=False)
def stochastic_depth(B):
    """Randomly chosen samples skip a block in each forward pass."""

    def forward(m, x):
        keep = (torch.rand(len(x), 1, dtype=torch.float64, device="cpu") > 0.5).to(x)
        return m.head(x + 2 * keep * m.block(x))

    return Net(forward, block=mlp(6, 8, 6), head=nn.Linear(6, 3)), noise(B, 6)


@case
def embedding_of_one_token(B):
    return nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 3)), tokens(B)


@case
def embedding_with_padding(B):
    ids = tokens(B, 7)
    ids[:, 4:] = 0
    return nn.Sequential(nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 3)), ids


@case(second_order=False)
def embedding_with_sparse_gradients(B):
    return nn.Sequential(nn.Embedding(11, 6, sparse=True), nn.Linear(6, 3)), tokens(B, 7)


@case
def embedding_scaled_by_frequency(B):
    return nn.Sequential(nn.Embedding(11, 6, scale_grad_by_freq=True), nn.Linear(6, 3)), tokens(B, 7)


@case
def embedding_of_the_same_token_everywhere(B):
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 3)), torch.full((B, 7), 4)


@case(second_order=False)
def embedding_bag_mean_with_padding(B):
    return nn.Sequential(nn.EmbeddingBag(11, 6, mode="mean", padding_idx=3), nn.Linear(6, 3)), tokens(B, 7)


@case(second_order=False)
def embedding_bag_max(B):
    return nn.Sequential(nn.EmbeddingBag(11, 6, mode="max"), nn.Linear(6, 3)), tokens(B, 7)


@case(second_order=False, autocast=False)
def embedding_bag_with_weights_from_the_net(B):
    def forward(m, ids, x):
        return m.bag(ids, per_sample_weights=m.score(x).squeeze(-1).sigmoid())

    return Net(forward, bag=nn.EmbeddingBag(11, 3, mode="sum"), score=nn.Linear(6, 1)), tokens(B, 7), noise(B, 7, 6)


@case(rows=False, second_order=False)
def embedding_bag_with_offsets(B):
    """Bags of 1, 2, 3 … tokens packed into one row of ids."""
    sizes = torch.arange(B) % 4 + 1
    model = Net(lambda m, ids, starts: m.head(m.bag(ids, starts)), bag=nn.EmbeddingBag(11, 6), head=nn.Linear(6, 3))
    return model, tokens(int(sizes.sum())), sizes.cumsum(0) - sizes


@case(rows=False, second_order=False)
def embedding_bag_of_weighted_tokens_with_empty_bags(B):
    """Two bags per sample, of 0, 1, 2 or 3 tokens, and the end of the last one."""
    sizes = torch.arange(2 * B) % 4
    ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])

    def forward(m, ids, ends, factors):
        return m.head(m.bag(ids, ends, factors).view(B, -1))

    bag = nn.EmbeddingBag(11, 6, mode="sum", padding_idx=2, include_last_offset=True)
    count = int(sizes.sum())
    return Net(forward, bag=bag, head=nn.Linear(12, 3)), tokens(count), ends, noise(count)


@case(rows=False, second_order=False)
def embedding_bag_max_with_offsets_and_padding(B):
    """Two bags per sample, of 0, 1, 2 or 3 tokens; some have padding only."""
    sizes = torch.arange(2 * B) % 4
    bag = nn.EmbeddingBag(11, 6, mode="max", padding_idx=2)
    model = Net(lambda m, ids, starts: m.head(m.bag(ids, starts).view(B, -1)), bag=bag, head=nn.Linear(12, 3))
    return model, tokens(int(sizes.sum())), sizes.cumsum(0) - sizes


@case(second_order=False)
def embedding_bag_with_sparse_gradients(B):
    return nn.Sequential(nn.EmbeddingBag(11, 6, mode="sum", sparse=True), nn.Linear(6, 3)), tokens(B, 7)


@case(second_order=False)
def embedding_bag_scaled_by_frequency(B):
    return nn.Sequential(nn.EmbeddingBag(11, 6, mode="mean", scale_grad_by_freq=True), nn.Linear(6, 3)), tokens(B, 7)


@case
def position_ids_of_one_row(B):
    def forward(m, ids):
        return m.head(torch.tanh(m.words(ids) + m.places(torch.arange(ids.shape[1], device=ids.device)[None])))

    return Net(forward, words=nn.Embedding(11, 6), places=nn.Embedding(9, 6), head=nn.Linear(6, 3)), tokens(B, 7)


@case
def max_pool_and_unpool(B):
    def forward(m, x):
        h, where = F.max_pool1d(m.enter(x), 2, return_indices=True)
        return F.max_unpool1d(m.middle(h), where, 2)

    return Net(forward, enter=nn.Conv1d(3, 4, 2), middle=nn.Conv1d(4, 4, 1)), noise(B, 3, 9)


@case
def max_over_time(B):
    return Net(lambda m, x: m.head(m.body(x).max(1).values), body=nn.Linear(6, 8), head=nn.Linear(8, 3)), noise(B, 7, 6)


@case
def row_of_the_largest_feature(B):
    def forward(m, x):
        h = m.body(x)
        return m.head(h[torch.arange(len(h), device=h.device), h.sum(-1).argmax(1)])

    return Net(forward, body=nn.Linear(6, 8), head=nn.Linear(8, 3)), noise(B, 7, 6)


@case
def adaptive_pool_and_log_softmax(B):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3), nn.LogSoftmax(-1)
    )
    return model, noise(B, 3, 6, 5)


@case(loss=as_losses)
def adaptive_softmax_with_clusters(B):
    """Rows are assigned to clusters by their target."""
    model = Net(
        lambda m, x, y: -m.f(m.body(x), y).output,
        body=nn.Linear(6, 8),
        f=nn.AdaptiveLogSoftmaxWithLoss(8, 11, cutoffs=[3, 6], div_value=2.0),
    )
    return model, noise(B, 6), tokens(B)


@case
def gated_linear_unit(B):
    return nn.Sequential(nn.Linear(6, 8), nn.GLU(), nn.Linear(4, 3)), noise(B, 7, 6)


@case
def squeeze_and_excite(B):
    def forward(m, x):
        h = m.body(x)
        return h * m.gate(h.mean((2, 3)))[:, :, None, None]

    gate = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4), nn.Sigmoid())
    return Net(forward, body=nn.Conv2d(3, 4, 3), gate=gate), noise(B, 3, 6, 5)


@case
def film_conditioning(B):
    def forward(m, x, condition):
        scale, shift = m.film(condition)[:, :, None].chunk(2, 1)
        return m.out(torch.tanh(m.body(x) * (1 + scale) + shift))

    return (
        Net(forward, body=nn.Conv1d(3, 4, 3), film=nn.Linear(6, 8), out=nn.Conv1d(4, 3, 1)),
        noise(B, 3, 9),
        noise(B, 6),
    )


@case
def residual_dense_block(B):
    def forward(m, x):
        for layer in m.layers:
            x = torch.cat([x, torch.relu(layer(x))], -1)
        return x

    return Net(forward, layers=nn.ModuleList([nn.Linear(6 + 4 * k, 4) for k in range(3)])), noise(B, 6)
