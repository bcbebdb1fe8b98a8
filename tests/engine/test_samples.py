"""`samples=`: rows, tokens or losses that belong to samples, against the gradient of each sample's own part."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import samplewise as sw
from samplewise.engine.ownership import local_probe
from samplewise.errors import GraphError, LossesError, SamplesInteractError

B, CLASSES, VOCABULARY = 4, 3, 32


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def small_model():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def language_model(attention="sdpa"):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=64, num_key_value_heads=1, attn_implementation=attention, **sizes
    )
    return transformers.LlamaForCausalLM(config).double()


def check_parts(loss, model, outputs, samples, parts, rtol=1e-10):
    """Compare the rows with the gradients of `parts`, the part of each sample in the loss."""
    g = sw.gradients(loss, model, outputs=outputs, samples=samples)
    assert len(g) == len(parts)
    rows = g.full()
    for i, part in enumerate(parts):
        expected = torch.autograd.grad(part, list(model.parameters()), retain_graph=True, allow_unused=True)
        for row, gradient in zip(rows.values(), expected, strict=True):
            gradient = torch.zeros_like(row[i]) if gradient is None else gradient
            torch.testing.assert_close(row[i], gradient, rtol=rtol, atol=1e-3 * rtol)
    return g


def scores(model, x):
    return model(x).square().sum(1)


def preference(chosen, rejected):
    return -F.logsigmoid(chosen - rejected)


PAIRS = {
    "halves": (lambda s: (s[:B], s[B:]), torch.arange(B).repeat(2)),
    "chunks": (lambda s: s.chunk(2), torch.arange(B).repeat(2)),
    "interleaved": (lambda s: (s[0::2], s[1::2]), torch.arange(B).repeat_interleave(2)),
    "permuted": (
        lambda s: (s[[3, 0, 5, 6]], s[[1, 2, 4, 7]]),
        torch.tensor([1, 0, 1, 0, 2, 2, 3, 3]),
    ),
}


@pytest.mark.parametrize("order", PAIRS)
def test_pairs(order):
    model = small_model()
    x = torch.randn(2 * B, 5)
    sides, samples = PAIRS[order]
    z = model(x)
    g = check_parts(
        preference(*sides(z.square().sum(1))).mean(),
        model,
        z,
        samples,
        (preference(*sides(scores(model, x))) / B).unbind(),
    )
    assert "irregular" not in str(g.explain()) or order == "permuted"


@pytest.mark.parametrize("order", PAIRS)
def test_losses_of_pairs_are_not_probed(order, monkeypatch):
    """How the losses of pairs are usually written: no pass through the whole graph in each step."""
    model = small_model()
    sides, _ = PAIRS[order]
    for _ in range(3):
        losses = preference(*sides(scores(model, torch.randn(2 * B, 5))))
        g = sw.gradients(losses, model)
        g.norms()
    assert "proven" in str(g.explain())
    assert "probed" not in str(g.explain())


def test_groups_of_different_sizes():
    model = small_model()
    x, y = torch.randn(9, 5), torch.arange(9) % CLASSES
    samples = torch.tensor([2, 0, 0, 1, 4, 2, 2, 0, 4], dtype=torch.int32)
    z = model(x)
    losses = F.cross_entropy(model(x), y, reduction="none") / 9
    parts = [losses[samples == i].sum() for i in range(5)]
    g = check_parts(F.cross_entropy(z, y), model, z, samples, parts)
    assert g.norms()[3] == 0  # a number without rows


def test_several_outputs_with_samples_of_their_own():
    model = small_model()
    a, b = torch.randn(3, 5), torch.randn(4, 5)
    u, v = model(a), model(b)
    owners = [torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2, 0])]
    rows = torch.cat([scores(model, a), scores(model, b)])
    parts = [rows[torch.cat(owners) == i].sum() for i in range(3)]
    check_parts(u.square().sum() + v.square().sum(), model, [u, v], owners, parts)


def test_rows_without_a_sample():
    model = small_model()
    x, y = torch.randn(6, 5), torch.tensor([0, 1, -100, 2, -100, 1])
    samples = torch.tensor([0, 0, -1, 1, -1, 1])
    z = model(x)
    losses = F.cross_entropy(model(x), y, reduction="none") / 4
    check_parts(F.cross_entropy(z, y), model, z, samples, [losses[:2].sum(), losses[3:].sum()])
    with pytest.raises(LossesError, match=r"negative must not enter the loss.*found 2 such rows. Number them, or mask"):
        sw.gradients(z.sum(), model, outputs=z, samples=samples)


def packed(lengths):
    """Position of each token in its document, and number of the document, (rows, tokens)."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    starts = (positions == 0).flatten().cumsum(0) - 1
    return positions, starts.view(positions.shape)


def document_losses(logits, tokens, positions, documents, count):
    """Losses (count,) of the documents: sums over tokens, without the first one of each."""
    labels = tokens.masked_fill(positions == 0, -100)[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
    return losses.new_zeros(count).index_add(0, documents[:, 1:].flatten(), losses.flatten())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [[[3, 5, 4, 4]], [[3, 5, 4], [7, 2, 3]], [[6, 6], [6, 6]]])
def test_packed_documents(lengths, attention):
    """One row with several documents, several rows, and as many tokens as documents by coincidence."""
    model = language_model(attention)
    positions, documents = packed(lengths)
    count = int(documents.max()) + 1
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, positions.shape)
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        parts = []
        for i in range(count):  # each document alone
            own = tokens[documents == i][None]
            z = model(input_ids=own, use_cache=False).logits
            parts.append(F.cross_entropy(z[0, :-1], own[0, 1:], reduction="sum"))
        loss = document_losses(logits, tokens, positions, documents, count).sum()
        # Its softmax is in float32 with eager attention.
        check_parts(loss, model, logits, documents, parts, rtol=1e-9 if attention == "sdpa" else 1e-4)


def test_packed_documents_are_not_probed(monkeypatch):
    """The mask of the attention shows which tokens belong together: no calls of its backward."""
    probes = []
    probe = local_probe.probe_passes
    monkeypatch.setattr(local_probe, "probe_passes", lambda passes: probes.append(passes) or probe(passes))
    model = language_model()
    for lengths in ([[3, 5, 4], [7, 2, 3]], [[2, 6, 4], [1, 8, 3]], [[5, 5, 2], [4, 4, 4]]):
        positions, documents = packed(lengths)
        tokens = torch.randint(VOCABULARY, positions.shape)
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        losses = document_losses(logits, tokens, positions, documents, 6)
        g = sw.gradients(losses.sum(), model, outputs=logits, samples=documents)
        torch.testing.assert_close(sw.gradients(losses, model).norms(), g.norms())
    assert not probes


def test_labels_that_are_ignored_belong_to_nobody():
    """The last token of a document predicts the first one of the next document, which is ignored."""
    model = language_model()
    for lengths in ([3, 5, 4], [2, 6, 4]):
        positions, documents = packed([lengths])
        tokens = torch.randint(VOCABULARY, positions.shape)
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0, :-1]
        labels = tokens.masked_fill(positions == 0, -100)[0, 1:]
        losses = F.cross_entropy(logits, labels, reduction="none")
        g = sw.gradients(losses, model, samples=documents[0, 1:])
        g.norms()
        assert "no rule" not in str(g.explain())
        parts = losses.new_zeros(3).index_add(0, documents[0, 1:], losses)
        rows = g.full()
        for i in range(3):
            expected = torch.autograd.grad(parts[i], list(model.parameters()), retain_graph=True)
            for row, gradient in zip(rows.values(), expected, strict=True):
                torch.testing.assert_close(row[i], gradient, rtol=1e-5, atol=1e-8)


def test_documents_that_attend_to_each_other_interact():
    model = language_model()
    tokens = torch.randint(VOCABULARY, (2, 12))
    documents = packed([[3, 5, 4], [7, 2, 3]])[1]
    logits = model(input_ids=tokens, use_cache=False).logits
    g = sw.gradients(logits.square().sum(), model, outputs=logits, samples=documents)
    with pytest.raises(SamplesInteractError, match=r"Attention.* mixes samples.*to sw.gradients, sw.backward"):
        g.norms()
    g = sw.gradients(logits.square().sum(), model, outputs=logits, samples=documents, interacting="allow")
    squares = model(input_ids=tokens, use_cache=False).logits.square().sum(2)
    parts = [squares[documents == i].sum() for i in range(6)]
    expected = torch.autograd.grad(parts[1], list(model.parameters()))
    for row, gradient in zip(g[1].values(), expected, strict=True):
        torch.testing.assert_close(row, gradient, rtol=1e-4, atol=1e-6)  # norms are in float32


def test_losses_of_samples():
    model = small_model()
    x, y = torch.randn(8, 5), torch.arange(8) % CLASSES
    samples = torch.tensor([0, 0, 1, -1, 2, 2, 2, 0])
    losses = F.cross_entropy(model(x), y, reduction="none")
    g = sw.gradients(losses, model, samples=samples)
    for i in range(3):
        expected = torch.autograd.grad(losses[samples == i].sum(), list(model.parameters()), retain_graph=True)
        for row, gradient in zip(g[i].values(), expected, strict=True):
            torch.testing.assert_close(row, gradient)
    tokens = losses.view(2, 4)
    same = sw.gradients(tokens, model, samples=samples.view(2, 4))
    torch.testing.assert_close(same.norms(), g.norms())
    rows = sw.gradients(tokens, model, samples=torch.tensor([1, 0]))
    torch.testing.assert_close(rows.norms(), sw.gradients(tokens.sum(1).flip(0), model).norms())


def test_backward_of_pairs_equals_the_loop():
    model = small_model()
    x = torch.randn(2 * B, 5)
    z = model(x)
    loss = preference(*z.square().sum(1).chunk(2)).mean()
    bound = 0.3
    stats = sw.backward(loss, model, z, [sw.clip(bound)], denominator=B, samples=torch.arange(B).repeat(2))
    total = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(B):
        (own,) = preference(*scores(model, x[[i, i + B]])[:, None])
        gradient = torch.autograd.grad(own, list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        torch.testing.assert_close(stats.norms[i], norm)
        torch._foreach_add_(total, gradient, alpha=float((bound / norm).clamp(max=1)) / B)
    for p, expected in zip(model.parameters(), total, strict=True):
        torch.testing.assert_close(p.grad, expected)


def test_backward_of_losses_adds_up_those_of_each_sample():
    model = small_model()
    x, y = torch.randn(8, 5), torch.arange(8) % CLASSES
    samples = torch.arange(8) // 2
    losses = F.cross_entropy(model(x), y, reduction="none")
    stats = sw.backward(losses, model, transforms=[sw.clip(1e9)], denominator=8, samples=samples)
    torch.testing.assert_close(stats.losses, losses.detach().view(4, 2).sum(1))
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (torch.arange(6.0), "must be a tensor of integers.*found dtype torch.float32"),
        ([0, 1], "one tensor for all outputs, or one for each; found 2 for 1 output"),
        (torch.arange(5), r"a shape that begins as \(6, 3\); found \(5,\)"),
        (torch.zeros(6, 2, dtype=torch.long), r"a shape that begins as \(6, 3\); found \(6, 2\)"),
        (torch.full((6,), -1), "must have a number of 0 or more for some row; found only negative numbers"),
    ],
)
def test_invalid_samples(samples, message):
    model = small_model()
    z = model(torch.randn(6, 5))
    with pytest.raises(LossesError, match=message):
        sw.gradients(z.sum(), model, outputs=z, samples=samples)


def test_a_scalar_loss_needs_outputs():
    model = small_model()
    with pytest.raises(LossesError, match=r"found a scalar loss without outputs. Pass outputs="):
        sw.gradients(model(torch.randn(6, 5)).sum(), model, samples=torch.arange(6))


# --- rest= ------------------------------------------------------------------------------------------------------------


class Matching(nn.Module):
    """A learned temperature and a penalty: paths to parameters that do not pass the outputs."""

    def __init__(self):
        super().__init__()
        self.encoder = small_model()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def loss(self, z, y):
        return F.cross_entropy(z * self.temperature, y) + self.encoder[0].weight.square().sum()


@pytest.mark.parametrize("transforms", [[], [sw.clip(0.2)]], ids=["none", "clip"])
def test_rest_gets_its_ordinary_gradient(transforms):
    model = Matching()
    x, y = torch.randn(6, 5), torch.arange(6) % CLASSES
    z = model.encoder(x)
    stats = sw.backward(model.loss(z, y), model, z, transforms, denominator=6, rest="plain")
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    encoder = dict(model.encoder.named_parameters())
    for i in range(6):
        own = F.cross_entropy(model.encoder(x[[i]]) * model.temperature, y[[i]])
        gradient = torch.autograd.grad(own, list(encoder.values()))
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        torch.testing.assert_close(stats.norms[i], norm)
        weight = float((0.2 / norm).clamp(max=1)) if transforms else 1.0
        for name, g in zip(encoder, gradient, strict=True):
            total[f"encoder.{name}"] += weight * g / 6
    (total["temperature"],) = torch.autograd.grad(model.loss(model.encoder(x).detach(), y), model.temperature)
    total["encoder.0.weight"] += 2 * model.encoder[0].weight.detach()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, total[name])


def test_rest_is_refused_by_default_and_the_message_names_the_remedy():
    model = Matching()
    z = model.encoder(torch.randn(6, 5))
    loss = model.loss(z, torch.arange(6) % CLASSES)
    with pytest.raises(GraphError, match=r"'temperature' and 1 other parameter on another path.*rest='plain'"):
        sw.backward(loss, model, z, [sw.clip(1.0)], denominator=6)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="rest must be 'refuse' or 'plain'; found 'all'"):
        sw.backward(loss, model, z, rest="all")


class Scaled(torch.autograd.Function):
    """An operation without a rule."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


@pytest.mark.filterwarnings("ignore:per-sample gradients of this model are computed in a slow way")
@pytest.mark.parametrize("options", [{"rest": "plain"}, {"through": lambda loss: loss.backward()}], ids=list)
def test_a_sample_without_a_gradient_needs_no_second_look_at_the_graph(options):
    """Norms of zero are computed in another way; the pass has freed the graph when they are read again."""
    w = nn.Parameter(torch.randn(3))
    x = torch.randn(4, 3)
    z = Scaled.apply(x, w)
    factors = torch.tensor([1.0, 0.0, 1.0, 1.0])
    loss = (z.square().sum(1) * factors).sum() + (w.sum() if "rest" in options else 0)
    stats = sw.backward(loss, {"w": w}, z, **options)
    torch.testing.assert_close(stats.norms, (2 * w * x * x * factors[:, None]).norm(dim=1).detach())


def test_samples_that_interact_are_allowed_on_request():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))
    x, y = torch.randn(6, 5), torch.arange(6) % CLASSES
    losses = F.cross_entropy(model(x), y, reduction="none")
    with pytest.raises(SamplesInteractError):
        sw.backward(losses, model, transforms=[sw.clip(1.0)], denominator=6, retain_graph=True)
    stats = sw.backward(losses, model, transforms=[sw.clip(0.1)], denominator=6, interacting="allow", retain_graph=True)
    rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    weights = (0.1 / stats.norms).clamp(max=1) / 6
    for k, p in enumerate(model.parameters()):
        torch.testing.assert_close(p.grad, sum(w * row[k] for w, row in zip(weights, rows, strict=True)))
