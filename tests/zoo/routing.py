"""Cases: layouts of samples (sorted, packed, scattered, routed, transposed)."""

import torch
import torch.nn.functional as F
from torch import nn

from samplewise.testing.case import Net, as_losses, noise, squared_loss, tokens, weight
from samplewise.testing.cases import mlp
from zoo.register import case


@case
def another_order_in_every_layer(B):
    def forward(m, x):
        h = torch.tanh(m.a(x)).flip(0)
        h = torch.tanh(m.b(h.roll(1, 0))).roll(-1, 0).flip(0)
        order = torch.arange(len(x), device=x.device).roll(2)
        return m.c(h[order])[order.argsort()]

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 3)), noise(B, 6)


@case(loss=as_losses, rows=False)
def losses_in_another_order_than_the_inputs(B):
    return Net(lambda m, x: squared_loss(m.f(x))[torch.arange(B, device=x.device).roll(2).flip(0)], f=mlp()), noise(
        B, 6
    )


@case(loss=as_losses, rows=False)
def hardest_losses_only(B):
    """losses[topk] of 2·B rows."""
    return Net(lambda m, x: squared_loss(m.f(x)).topk(B).values, f=mlp()), noise(2 * B, 6)


@case(loss=as_losses, rows=False)
def losses_of_two_halves_joined_the_other_way_round(B):
    def forward(m, x):
        first, second = m.f(x).split([B // 2, B - B // 2])
        return torch.cat([squared_loss(second), squared_loss(first)])

    return Net(forward, f=mlp()), noise(B, 6)


@case
def time_first_throughout(B):
    """Activations (T, B, d); losses are summed over dim 0."""

    def forward(m, x):
        h = torch.tanh(m.a(x.transpose(0, 1).contiguous()))
        return m.b(h).square().sum(0)

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3)), noise(B, 7, 6)


@case
def features_first_throughout(B):
    """Activations (d, B): samples are columns."""
    return Net(
        lambda m, x: (m.b @ torch.tanh(m.a @ x.t() + m.c)).t(), a=weight(8, 6), b=weight(3, 8), c=weight(8, 1)
    ), noise(B, 6)


@case
def batch_in_the_middle(B):
    def forward(m, x):
        h = m.a(x.permute(1, 0, 2)).unflatten(0, (7, 1)).transpose(1, 2)
        return h.permute(1, 0, 2, 3).flatten(1)

    return Net(forward, a=nn.Linear(6, 4)), noise(B, 7, 6)


@case
def batch_interleaved_with_tokens(B):
    """Activations flattened as (T·B, d), then as (B·T, d)."""

    def forward(m, x):
        h = m.a(x.transpose(0, 1).reshape(-1, 6)).tanh().reshape(7, -1, 8)
        return m.b(h.transpose(0, 1).reshape(-1, 8)).reshape(len(x), -1)

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3)), noise(B, 7, 6)


@case
def views_doubled_by_augmentation(B):
    """2·B rows, two per sample: first interleaved, then concatenated."""

    def forward(m, x):
        side, behind = m.f(x.repeat_interleave(2, 0)), m.f(torch.cat([x, -x]))
        return side.view(len(x), -1) + behind.view(2, len(x), -1).transpose(0, 1).flatten(1)

    return Net(forward, f=mlp()), noise(B, 6)


@case(loss=as_losses, rows=False)
def triplets_in_one_batch(B):
    """3·B rows; loss i uses rows i, B+i and 2B+i."""

    def forward(m, x):
        anchor, near, far = m.f(x).chunk(3)
        return F.triplet_margin_loss(anchor, near, far, margin=5.0, reduction="none")

    return Net(forward, f=mlp()), noise(3 * B, 6)


@case(loss=as_losses, rows=False)
def packed_documents_in_mixed_order(B):
    """Tokens of all documents are shuffled, so rows belong to samples in arbitrary order."""
    owner = torch.arange(B).repeat(4)[torch.randperm(4 * B)]

    def forward(m, x):
        per_token = m.f(x).square().mean(-1)
        return per_token.new_zeros(B).scatter_add(0, owner.to(x.device), per_token)

    return Net(forward, f=mlp()), noise(4 * B, 6)


@case(loss=as_losses, rows=False)
def graphs_with_messages_along_edges(B):
    """A batch of small graphs as one large graph; one loss per graph."""
    sizes = torch.arange(B) % 3 + 2
    owner = torch.repeat_interleave(torch.arange(B), sizes)
    starts = sizes.cumsum(0) - sizes
    ring = torch.arange(len(owner)) - starts[owner]
    source, target = torch.arange(len(owner)), starts[owner] + (ring + 1) % sizes[owner]

    def forward(m, x):
        start, end, graph = (index.to(x.device) for index in (source, target, owner))
        for layer in (m.a, m.b):
            messages = layer(torch.cat([x[start], x[end]], -1)).tanh()
            x = m.own(x) + messages.new_zeros(x.shape).index_add(0, end, messages)
        pooled = x.new_zeros(B, 6).index_add(0, graph, x)
        return squared_loss(m.head(pooled))

    parts = {name: nn.Linear(12, 6) for name in "ab"}
    return Net(forward, **parts, own=nn.Linear(6, 6), head=nn.Linear(6, 3)), noise(len(owner), 6)


@case(loss=as_losses, rows=False)
def graphs_with_attention_and_scatter_reduce(B):
    owner = torch.arange(3 * B) % B

    def forward(m, x):
        h, score = m.h(x), m.score(x).exp()
        graph = owner.to(x.device)
        total = score.new_zeros(B, 1).index_add(0, graph, score)
        top = h.new_zeros(B, 4).scatter_reduce(0, graph[:, None].expand(-1, 4), h, "amax", include_self=False)
        return squared_loss(torch.cat([top, h.new_zeros(B, 4).index_add(0, graph, h * score / total[graph])], 1))

    return Net(forward, h=nn.Linear(6, 4), score=nn.Linear(6, 1)), noise(3 * B, 6)


@case(loss=as_losses, rows=False)
def dense_adjacency_of_a_batch_of_graphs(B):
    """Left multiplication by a block-diagonal adjacency matrix, which contracts over rows of all samples."""
    adjacency = torch.block_diag(*[torch.rand(3, 3) for _ in range(B)])

    def forward(m, x):
        h = torch.tanh(m.adjacency @ m.a(x))
        return squared_loss((m.adjacency @ m.b(h)).view(B, -1))

    return Net(forward, adjacency=adjacency, a=nn.Linear(6, 8), b=nn.Linear(8, 3)), noise(3 * B, 6)


@case
def experts_chosen_two_per_token_by_sorting(B):
    """Top-2 routing: tokens are sorted by expert, split, and scattered back."""

    def forward(m, x):
        flat = x.flatten(0, 1)
        odds, chosen = m.gate(flat).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        parts = flat[order // 2].split(chosen.flatten().bincount(minlength=4).tolist())
        out = (
            torch.cat([expert(part) for expert, part in zip(m.experts, parts, strict=True)])
            * odds.flatten()[order, None]
        )
        return flat.new_zeros(len(flat), 3).index_add(0, order // 2, out.to(flat.dtype)).view(len(x), -1)

    return Net(forward, gate=nn.Linear(6, 4), experts=nn.ModuleList([nn.Linear(6, 3) for _ in range(4)])), noise(
        B, 7, 6
    )


@case
def experts_without_tokens(B):
    """Two of three experts receive zero rows."""

    def forward(m, x, route):
        return torch.cat([expert(x[route == k]) for k, expert in enumerate(m.experts)])

    return Net(forward, experts=nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])), noise(B, 6), torch.ones(B).long()


@case
def experts_as_one_batched_weight(B):
    """Each sample selects its matrix from a 3-D parameter."""
    return (
        Net(lambda m, x, k: torch.bmm(x, m.w[k]) + m.b[k][:, None], w=weight(4, 6, 3), b=weight(4, 3)),
        noise(B, 7, 6),
        tokens(B, vocabulary=4),
    )


@case
def experts_in_stacks_of_matrices(B):
    """The weights of all experts are one parameter; the last expert receives no token, the first one is used twice."""

    def forward(m, x):
        flat = x.flatten(0, 1)
        chosen = m.gate(flat).argmax(1)
        out = flat.new_zeros(len(flat), 3)
        for k in range(len(m.up)):
            routed = (chosen == k).nonzero()[:, 0]
            if len(routed):
                hidden = F.linear(flat[routed], m.up[k]).tanh()
                out = out.index_add(
                    0, routed, (hidden @ m.side.unbind()[k] + F.linear(hidden, m.down[k])).to(out.dtype)
                )
        return out.view(*x.shape[:2], -1)

    stacks = {"up": weight(4, 8, 6), "side": weight(4, 8, 3), "down": weight(4, 3, 8)}
    return Net(forward, gate=nn.Linear(6, 3), **stacks), noise(B, 7, 6)


@case
def experts_in_stacks_selected_for_each_token(B):
    """Weights and biases of the experts of each token, as a batch of matrices."""

    def forward(m, x):
        flat = x.flatten(0, 1)
        chosen = m.gate(flat).argmax(1) - 3  # counted from the end
        hidden = torch.bmm(m.weights[chosen], flat[:, :, None])[:, :, 0] + m.biases[chosen]
        return hidden.tanh().view(*x.shape[:2], -1)

    return Net(forward, gate=nn.Linear(6, 3), weights=weight(3, 4, 6), biases=weight(3, 4)), noise(B, 7, 6)


@case
def soft_mixture_of_experts(B):
    def forward(m, x):
        odds = m.gate(x).softmax(-1)
        return torch.einsum("btk,kdo,btd->bto", odds, m.w, x) + odds @ m.b

    return Net(forward, gate=nn.Linear(6, 4), w=weight(4, 6, 3), b=weight(4, 3)), noise(B, 7, 6)


@case
def features_sorted_and_top_k_kept(B):
    def forward(m, x):
        return m.b(m.a(x).sort(-1).values) + m.c(m.a(x).topk(4, -1).values)

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3), c=nn.Linear(4, 3)), noise(B, 6)


@case
def samples_one_by_one(B):
    return Net(lambda m, x: torch.stack([m.f(row) for row in x]), f=mlp()), noise(B, 6)


@case(loss=as_losses)
def losses_stacked_from_scalars(B):
    return Net(
        lambda m, x: torch.stack([squared_loss(m.f(row[None])).squeeze() for row in x.flip(0)]).flip(0), f=mlp()
    ), noise(B, 6)


@case
def early_exit_for_some_samples(B):
    """Some samples exit after the first block; the rows of the others are overwritten."""

    def forward(m, x):
        first = m.exit(m.a(x).tanh())
        go_on = x[:, 0] > 0
        out = first.clone()
        out[go_on] = m.exit(m.b(m.a(x).tanh()[go_on]).tanh())
        return out

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 8), exit=nn.Linear(8, 3)), noise(B, 6)


@case
def ragged_lengths_removed_and_put_back(B):
    """Unpadding as in flash attention: only valid tokens are passed through the layer."""
    lengths = torch.arange(B) % 6 + 1
    valid = torch.arange(7) < lengths[:, None]

    def forward(m, x, keep):
        h = m.f(x[keep])
        return x.new_zeros(*keep.shape, 3).masked_scatter(keep[..., None], h.to(x.dtype))

    return Net(forward, f=mlp()), noise(B, 7, 6), valid


@case
def tokens_dropped_by_score(B):
    def forward(m, x):
        score = m.score(x).squeeze(-1)
        best = score.topk(3, 1)
        kept = x.gather(1, best.indices[..., None].expand(-1, -1, 6))
        return m.f(kept) * best.values.sigmoid()[..., None]

    return Net(forward, score=nn.Linear(6, 1), f=mlp()), noise(B, 7, 6)


@case(rows=False)
def batch_split_over_two_branches(B):
    """Even rows use one branch, odd rows the other."""

    def forward(m, x):
        place = torch.arange(len(x), device=x.device)
        order = torch.cat([place[0::2], place[1::2]])
        return torch.cat([m.a(x[0::2]), m.b(x[1::2])])[order.argsort()]

    return Net(forward, a=mlp(), b=mlp()), noise(B, 6)


@case(rows=False)
def batch_split_by_position_in_the_batch(B):
    def forward(m, x):
        return torch.cat([m.a(x[: len(x) // 3]), m.b(x[len(x) // 3 :])])

    return Net(forward, a=mlp(), b=mlp()), noise(B, 6)


@case
def microbatches_inside_the_model(B):
    return Net(lambda m, x: torch.cat([m.f(part) for part in x.split(2)]), f=mlp()), noise(B, 6)
