"""Situations: data decide shapes, structure, or which row belongs to which sample."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from everyday_zoo.situation import Situation, situation


@situation
class Pairs(Situation):
    """Pairs of answers along the batch: `chosen, rejected = scores.chunk(2)` (DPO)."""

    def batch(self, generator):
        sizes = self.sizes
        return (torch.randint(sizes.vocabulary, (sizes.samples // 2, 2, sizes.tokens), generator=generator),)

    def forward(self, tokens):
        tokens = torch.cat([tokens[:, 0], tokens[:, 1]])
        scores = self.head(self.pool(self.encode(self.embed(tokens)))).log_softmax(1)[:, 0]
        chosen, rejected = scores.chunk(2)
        return -F.logsigmoid(chosen - rejected)


@situation
class PairLosses(Pairs):
    """Pairs of losses along the batch: `a, b = losses.chunk(2)`, joined with `cat` and slices."""

    def forward(self, tokens):
        h = self.encode(self.embed(torch.cat([tokens[:, 0], tokens[:, 1]])))
        losses = F.cross_entropy(
            self.head(h).mT, tokens.transpose(0, 1).flatten(0, 1) % self.sizes.classes, reduction="none"
        )
        half = len(tokens)
        a, b = torch.cat([losses[:half], losses[half:]]).mean(1).chunk(2)
        return F.softplus(a - b) + 0.1 * a


@situation
class SortedByLength(Situation):
    """Samples sorted by length before the layers and put back behind them."""

    def batch(self, generator):
        tokens, labels = super().batch(generator)
        return tokens, labels, torch.randint(2, tokens.shape[1] + 1, (len(tokens),), generator=generator)

    def forward(self, tokens, labels, lengths):
        order = lengths.argsort(descending=True)
        h = self.encode(self.embed(tokens[order]))[order.argsort()]
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        h = (h * mask[:, :, None]).sum(1) / lengths[:, None]
        return F.cross_entropy(self.head(h), labels, reduction="none")


class Experts(nn.Module):
    """Sparse mixture of experts as in Mixtral: router, loop over experts, index_add."""

    def __init__(self, sizes, count=4, top=2):
        super().__init__()
        self.top = top
        self.router = nn.Linear(sizes.width, count, bias=False)
        self.up = nn.ModuleList(nn.Linear(sizes.width, sizes.hidden // 2) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(sizes.hidden // 2, sizes.width) for _ in range(count))

    def forward(self, h):
        flat = h.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(self.top, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros_like(flat)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, place = torch.where(chosen == number)
            update = down(F.silu(up(flat[rows]))) * weights[rows, place, None]
            total.index_add_(0, rows, update)
        return total.view_as(h)


@situation
class MixtureOfExperts(Situation):
    """Tokens routed to experts by data: topk, loop over experts, `index_add_` (Mixtral)."""

    def __init__(self, sizes):
        super().__init__(sizes)
        for block in self.blocks:
            block.up, block.down = Experts(sizes), nn.Identity()

    def activate(self, h):
        return h


@situation
class RandomTokens(Situation):
    """Another number of tokens in each step."""

    def batch(self, generator):
        tokens, labels = super().batch(generator)
        T = self.sizes.tokens
        return tokens[:, : int(torch.randint(T // 2, T + 1, (), generator=generator))], labels


@situation
class RandomSamples(Situation):
    """Another number of samples in each step."""

    def batch(self, generator):
        B = int(torch.randint(self.sizes.samples // 2, self.sizes.samples + 1, (), generator=generator))
        tokens, labels = super().batch(generator)
        return tokens[:B], labels[:B]


@situation
class RandomShapes(Situation):
    """Another number of samples and of tokens in each step."""

    def batch(self, generator):
        tokens, labels = super().batch(generator)
        B, T = (int(torch.randint(size // 2, size + 1, (), generator=generator)) for size in tokens.shape)
        return tokens[:B, :T], labels[:B]


@situation
class LayerDrop(Situation):
    """Layers left out at random in each step."""

    def batch(self, generator):
        self.uses = (torch.rand(len(self.blocks), generator=generator) < 0.7).tolist()
        return super().batch(generator)

    def encode(self, h):
        for block, use in zip(self.blocks, self.uses, strict=True):
            h = block(h) if use else h
        return h


@situation
class BagsOfEntries(Situation):
    """Lists of entries of different lengths, `nn.EmbeddingBag` with offsets (recommendation)."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.bags = nn.ModuleList(nn.EmbeddingBag(sizes.vocabulary, sizes.width, mode=mode) for mode in ("sum", "max"))

    def forward(self, tokens, labels):
        lengths = 1 + tokens[:, 0] % tokens.shape[1]
        entries = tokens[torch.arange(tokens.shape[1]) < lengths[:, None]]
        pooled = [bag(entries, lengths.cumsum(0) - lengths) for bag in self.bags]
        h = self.encode(torch.stack(pooled, 1))
        return F.cross_entropy(self.head(h.mean(1)), labels, reduction="none")


@situation
class RecurrentCtc(Situation):
    """`F.ctc_loss` after a GRU with time first, other lengths in each step (speech recognition)."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.recurrent = nn.GRU(sizes.width, sizes.width // 2, bidirectional=True)

    def forward(self, tokens, labels):
        lengths = tokens.shape[1] - tokens[:, -1] % (tokens.shape[1] - 5)
        h = self.scan(self.encode(self.embed(tokens)).transpose(0, 1), lengths)
        letters = 1 + tokens[:, :2] % (self.sizes.classes - 1)
        return F.ctc_loss(self.head(h).log_softmax(2), letters, lengths, 1 + labels % 2, reduction="none")

    def scan(self, h, lengths):
        return self.recurrent(h)[0]


@situation
class PackedSequences(RecurrentCtc):
    """`F.ctc_loss` after a GRU on packed sequences (`pack_padded_sequence`)."""

    def scan(self, h, lengths):
        packed = pack_padded_sequence(h, lengths, enforce_sorted=False)
        return pad_packed_sequence(self.recurrent(packed)[0], total_length=len(h))[0]
