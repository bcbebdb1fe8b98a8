"""Cases: attention with torch modules and written by hand."""

import torch
import torch.nn.functional as F
from torch import nn

from samplewise.testing.case import Net, noise, weight
from zoo.register import case


@case
def multihead_attention_sequence_first(B):
    def forward(m, x):
        x = x.transpose(0, 1)
        return m.f(x, x, x, need_weights=False)[0].transpose(0, 1)

    return Net(forward, f=nn.MultiheadAttention(6, 3)), noise(B, 7, 6)


@case
def multihead_attention_that_returns_its_weights(B):
    return Net(lambda m, x: torch.cat(m.f(x, x, x), -1), f=nn.MultiheadAttention(6, 2, batch_first=True)), noise(
        B, 7, 6
    )


@case
def multihead_attention_with_bias_kv(B):
    return Net(
        lambda m, x: m.f(x, x, x)[0],
        f=nn.MultiheadAttention(6, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True),
    ), noise(B, 5, 6)


@case
def cross_attention_with_other_widths(B):
    f = nn.MultiheadAttention(6, 2, kdim=4, vdim=3, batch_first=True)
    return (
        Net(lambda m, q, k, v: m.f(q, k, v, need_weights=False)[0], f=f),
        noise(B, 7, 6),
        noise(B, 5, 4),
        noise(B, 5, 3),
    )


@case
def attention_with_padding_mask(B):
    padding = torch.arange(7) >= (torch.arange(B)[:, None] % 5) + 2
    model = Net(
        lambda m, x, hide: m.f(x, x, x, key_padding_mask=hide)[0], f=nn.MultiheadAttention(6, 2, batch_first=True)
    )
    return model, noise(B, 7, 6), padding


@case
def transformer_encoder_of_pre_norm_layers_sequence_first(B):
    layer = nn.TransformerEncoderLayer(6, 3, 8, dropout=0.0, norm_first=True, activation="gelu")
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Net(lambda m, x: m.f(x.transpose(0, 1)).transpose(0, 1), f=stack), noise(B, 5, 6)


@case
def transformer_decoder_layer(B):
    return nn.TransformerDecoderLayer(6, 2, 8, dropout=0.0, batch_first=True), noise(B, 5, 6), noise(B, 7, 6)


@case
def attention_by_einsum(B):
    def forward(m, x):
        q, k, v = (torch.einsum("btd,hde->bhte", x, w) for w in (m.q, m.k, m.v))
        weights = (torch.einsum("bhte,bhse->bhts", q, k) / 2).softmax(-1)
        return torch.einsum("bhts,bhse,hed->btd", weights, v, m.o)

    return Net(forward, q=weight(2, 6, 4), k=weight(2, 6, 4), v=weight(2, 6, 4), o=weight(2, 4, 6)), noise(B, 7, 6)


@case
def relative_position_table(B):
    """The ids (T, T) are the same for all samples; T may equal B."""

    def forward(m, x):
        T = x.shape[1]
        place = torch.arange(T, device=x.device)
        distance = (place[None] - place[:, None]).clamp(-3, 3) + 3
        scores = x @ x.mT + m.table(distance).squeeze(-1)
        return scores.softmax(-1) @ m.v(x)

    return Net(forward, table=nn.Embedding(7, 1), v=nn.Linear(6, 3)), noise(B, 7, 6)


@case(shared=(13,))
def position_bias_from_a_net_on_coordinates(B):
    """A small network maps a constant grid to a bias that is added to every sample's scores."""

    def forward(m, x):
        bias = m.bias(m.grid).squeeze(-1)[m.index]
        return (x @ x.mT + bias).softmax(-1) @ m.v(x)

    index = torch.arange(7)[None] - torch.arange(7)[:, None] + 6
    bias = nn.Sequential(nn.Linear(9, 10), nn.ReLU(), nn.Linear(10, 1))
    return Net(forward, grid=noise(13, 9), index=index, bias=bias, v=nn.Linear(6, 3)), noise(B, 7, 6)


@case(shared=(7,))
def learned_slopes_per_head(B):
    """Distances (T, T) computed in the forward pass: shared by all samples, not stored in a module."""

    def forward(m, x):
        place = torch.arange(7, dtype=x.dtype, device=x.device)
        far = -(place[None] - place[:, None]).abs()
        h = m.f(x).unflatten(-1, (3, 2)).transpose(1, 2)
        return (h @ h.mT * m.temperature.exp() + m.slope * far).softmax(-1) @ h

    return Net(forward, f=nn.Linear(6, 6), slope=weight(3, 1, 1), temperature=weight(1)), noise(B, 7, 6)


@case
def slots_that_are_parameters(B):
    """Queries without a batch dimension attend to each sample."""

    def forward(m, x):
        weights = (m.slots @ m.k(x).mT).softmax(1)
        return m.out(weights @ m.v(x))

    return Net(forward, slots=weight(4, 6), k=nn.Linear(6, 6), v=nn.Linear(6, 6), out=nn.Linear(6, 3)), noise(B, 7, 6)


@case
def memory_of_learned_keys_and_values(B):
    def forward(m, x):
        keys, values = (t.expand(len(x), -1, -1) for t in (m.keys, m.values))
        return F.scaled_dot_product_attention(m.q(x), keys, values)

    return Net(forward, q=nn.Linear(6, 4), keys=weight(9, 4), values=weight(9, 4)), noise(B, 7, 6)


@case
def linear_attention(B):
    def forward(m, x):
        q, k, v = m.q(x).exp(), m.k(x).exp(), m.v(x)
        return (
            torch.einsum("btd,bde->bte", q, torch.einsum("btd,bte->bde", k, v))
            / torch.einsum("btd,bd->bt", q, k.sum(1))[..., None]
        )

    return Net(forward, q=nn.Linear(6, 4), k=nn.Linear(6, 4), v=nn.Linear(6, 3)), noise(B, 7, 6)


@case
def attention_over_axes_in_turn(B):
    """Rows, then columns: the kernels' batch is B·H, then B·W."""

    def forward(m, x):
        x = x + m.rows(x.flatten(0, 1), x.flatten(0, 1), x.flatten(0, 1))[0].unflatten(0, x.shape[:2])
        y = x.transpose(1, 2)
        flat = y.flatten(0, 1)
        return (y + m.columns(flat, flat, flat)[0].unflatten(0, y.shape[:2])).transpose(1, 2)

    return Net(
        forward,
        rows=nn.MultiheadAttention(6, 2, batch_first=True),
        columns=nn.MultiheadAttention(6, 2, batch_first=True),
    ), noise(B, 3, 4, 6)
