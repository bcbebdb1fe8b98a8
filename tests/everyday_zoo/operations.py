"""Situations: one operation on activations."""

import torch
import torch.nn.functional as F
from torch import nn

from everyday_zoo.situation import Situation, situation


@situation
class Baseline(Situation):
    """Unchanged transformer."""


# --------------------------------------------------------------------------------------- Python functions


class SwishFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * s * (1 + x * (1 - s))


@situation
class Swish(Situation):
    """Activation as an autograd.Function: `Swish.apply(h)`."""

    def activate(self, h):
        return SwishFunction.apply(h)


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


@situation
class GradientReversal(Situation):
    """Domain classifier behind a gradient reversal Function."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.domain = nn.Linear(sizes.width, 2)

    def forward(self, tokens, labels):
        h = self.pool(self.encode(self.embed(tokens)))
        domain = self.domain(ReverseGradient.apply(h, 0.3))
        losses = F.cross_entropy(self.head(h), labels, reduction="none")
        return losses + F.cross_entropy(domain, labels % 2, reduction="none")


class QuantizedProduct(torch.autograd.Function):
    """Product with a frozen weight of 8 bits; the weight is dequantized again for the backward pass."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        ctx.save_for_backward(weight, scale)
        return x @ (weight.to(x.dtype) * scale).t()

    @staticmethod
    def backward(ctx, gradient):
        weight, scale = ctx.saved_tensors
        return gradient @ (weight.to(gradient.dtype) * scale), None, None


class QuantizedLinear(nn.Module):
    def __init__(self, layer, rank=4):
        super().__init__()
        weight = layer.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", layer.bias.detach())
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return QuantizedProduct.apply(x, self.weight, self.scale) + self.bias + self.up(self.down(x))


@situation
class QuantizedLora(Situation):
    """Frozen weights of 8 bits in a matmul Function, with LoRA adapters (QLoRA)."""

    def __init__(self, sizes):
        super().__init__(sizes)
        replace_linears(self.blocks, QuantizedLinear)
        norms = [block.norms for block in self.blocks]
        nn.ModuleList([self.embedding, self.positions, *norms]).requires_grad_(False)


def replace_linears(module, make):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, make(child))
        else:
            replace_linears(child, make)


class ChunkedLoss(torch.autograd.Function):
    """Cross-entropy of a linear head over chunks of tokens; both gradients are computed in the backward pass."""

    chunk = 128

    @staticmethod
    def forward(ctx, h, weight, labels):
        ctx.save_for_backward(h, weight, labels)
        parts = zip(h.split(ChunkedLoss.chunk), labels.split(ChunkedLoss.chunk), strict=True)
        return torch.cat([F.cross_entropy(x @ weight.t(), y, reduction="none") for x, y in parts])

    @staticmethod
    def backward(ctx, gradient):
        h, weight, labels = ctx.saved_tensors
        of_h, of_weight = torch.empty_like(h), torch.zeros_like(weight)
        for rows in torch.arange(len(h)).split(ChunkedLoss.chunk):
            slopes = (h[rows] @ weight.t()).softmax(1)
            slopes[torch.arange(len(rows)), labels[rows]] -= 1
            slopes *= gradient[rows, None]
            of_h[rows] = slopes @ weight
            of_weight += slopes.t() @ h[rows]
        return of_h, of_weight, None


@situation
class ChunkedHead(Situation):
    """Language model whose head and loss are one chunked Function (TRL, Liger)."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens, labels):
        h = self.encode(self.embed(tokens))[:, :-1]
        losses = ChunkedLoss.apply(h.flatten(0, 1), self.head.weight, tokens[:, 1:].flatten())
        return losses.view(h.shape[:2]).mean(1)


# ----------------------------------------------------------------------------- movements along other dimensions


@situation
class Roll(Situation):
    """`torch.roll` over tokens in each layer."""

    def mix(self, attention, h):
        return attention(h.roll(2, 1)).roll(-2, 1)


@situation
class Flip(Situation):
    """`flip` over tokens in each layer."""

    def mix(self, attention, h):
        return attention(h) + attention(h.flip(1)).flip(1)


@situation
class Tril(Situation):
    """Linear attention with `tril` of the scores over tokens."""

    def mix(self, attention, h):
        q, k, v = attention.queries(h)
        scores = (q @ k.mT).tril() / h.shape[1]
        return attention.leave((scores @ v).transpose(1, 2).flatten(2))


@situation
class ComplexRotary(Situation):
    """Rotary embedding by complex numbers: `view_as_complex(q) * phases`."""

    def rotate(self, q):
        tokens, width = q.shape[-2:]
        frequencies = 100.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(tokens)[:, None] * frequencies
        phases = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * phases).flatten(-2).to(q.dtype)


@situation
class Fourier(Situation):
    """FFT over features and tokens in place of attention (FNet)."""

    def __init__(self, sizes):
        super().__init__(sizes)
        for block in self.blocks:
            del block.attention.enter

    def mix(self, attention, h):
        return attention.leave(torch.fft.fft(torch.fft.fft(h, dim=-1), dim=1).real / h.shape[1])


@situation
class TimeShift(Situation):
    """Time shift by slice assignment: `xx = zeros_like(x); xx[:, 1:] = x[:, :-1]` (RWKV)."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.share = nn.Parameter(torch.full((sizes.width,), 0.7))

    def mix(self, attention, h):
        before = torch.zeros_like(h)
        before[:, 1:] = h[:, :-1]
        return attention(h * self.share + before * (1 - self.share))


@situation
class Unfold(Situation):
    """Means of windows of tokens: `h.unfold(1, 4, 1)`."""

    def mix(self, attention, h):
        return attention(F.pad(h, (0, 0, 3, 0)).unfold(1, 4, 1).mean(-1))


@situation
class TopTokens(Situation):
    """Mean of the largest values over tokens: `h.topk(k, dim=1)`."""

    def pool(self, h):
        return h.topk(4, dim=1).values.mean(1)


# ------------------------------------------------------------------------------------- elementwise operations


@situation
class Erfinv(Situation):
    """Elementwise `erfinv` as an activation."""

    def activate(self, h):
        return torch.erfinv(0.9 * torch.tanh(h))


@situation
class Lgamma(Situation):
    """Elementwise `lgamma` as an activation."""

    def activate(self, h):
        return torch.lgamma(1 + F.softplus(h))


# ---------------------------------------------------------------------------------- data as indices of tokens


@situation
class LastToken(Situation):
    """Last-token pooling: `h[arange(B), last]`."""

    def batch(self, generator):
        tokens, labels = super().batch(generator)
        return tokens, labels, torch.randint(1, tokens.shape[1], labels.shape, generator=generator)

    def pool(self, h, last):
        return h[torch.arange(len(h)), last]


@situation
class MaskedTokens(Situation):
    """Masked language model: `logits[mask]`, summed per sample with `index_add`."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.head = nn.Linear(sizes.width, sizes.vocabulary)

    def batch(self, generator):
        tokens, _ = super().batch(generator)
        return tokens, torch.rand(tokens.shape, generator=generator) < 0.3

    def forward(self, tokens, mask):
        logits = self.head(self.encode(self.embed(tokens)))
        losses = F.cross_entropy(logits[mask], tokens[mask], reduction="none")
        samples = torch.arange(len(tokens))[:, None].expand_as(tokens)[mask]
        return losses.new_zeros(len(tokens)).index_add(0, samples, losses) / mask.sum(1).clamp(min=1)


@situation
class MaskedTokensScattered(MaskedTokens):
    """Masked language model on flat rows: `h.flatten(0, 1)[index]`, summed per sample with `scatter_add`."""

    def forward(self, tokens, mask):
        h = self.encode(self.embed(tokens)).flatten(0, 1)
        index = mask.flatten().nonzero().squeeze(1)
        losses = F.cross_entropy(self.head(h[index]), tokens.flatten()[index], reduction="none")
        return losses.new_zeros(len(tokens)).scatter_add(0, index // tokens.shape[1], losses)


@situation
class GatheredTokens(Situation):
    """Tokens chosen by data: `h.gather(1, index)`."""

    def batch(self, generator):
        tokens, labels = super().batch(generator)
        return tokens, labels, torch.randint(tokens.shape[1], (len(tokens), 4), generator=generator)

    def pool(self, h, index):
        return h.gather(1, index[:, :, None].expand(-1, -1, h.shape[-1])).mean(1)


@situation
class ScatteredImages(Situation):
    """Image features in place of some token embeddings: `masked_scatter` (vision-language models)."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.patches = nn.Linear(12, sizes.width)

    def batch(self, generator):
        tokens, labels = super().batch(generator)
        B, T = tokens.shape
        images = torch.randn(B, T // 4, 12, generator=generator, dtype=torch.get_default_dtype())
        places = torch.rand(B, T, generator=generator).argsort(1) < T // 4
        return tokens, labels, images, places

    def forward(self, tokens, labels, images, places):
        h = self.embed(tokens).masked_scatter(places[:, :, None], self.patches(images))
        return F.cross_entropy(self.head(self.pool(self.encode(h))), labels, reduction="none")
