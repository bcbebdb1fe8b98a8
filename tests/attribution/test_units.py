"""Tokens and packed documents as units of attribution, against a loop over units with plain autograd."""

import pytest
import torch
import torch.nn.functional as F
from projection_matrix import projection
from torch import nn

import samplewise as sw
from samplewise.attribution import margin

ROWS, T, VOCABULARY = 5, 4, 7


class Causal(nn.Module):
    """Language model with one layer of causal attention."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.qkv = nn.Linear(6, 18)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, tokens):
        q, k, v = self.qkv(self.embedding(tokens)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        return self.head(scores.softmax(2) @ v)


def token_losses(model, batch):
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")


def token_margins(model, batch):
    """Log-odds (B, T) of the next token."""
    logits = model(batch[0]).flatten(0, 1)
    return margin(lambda x: x, (logits, batch[1].flatten())).view(batch[1].shape)


def documents(batch):
    """Numbers of the documents of the rows of `numbered`; the last token of row 0 belongs to none."""
    numbers = [[4, 4, 9, -1], [1, 2, 2, 0], [0, 0, 0, 1], [1, 1, 0, 0], [5, 5, 5, 5]]
    return torch.tensor(numbers)[batch[2]]


DOCUMENTS = [[0, 0, 1, -1], [3, 4, 4, 2], [5, 5, 5, 6], [8, 8, 7, 7], [9, 9, 9, 9]]  # column of each token


@pytest.fixture
def task():
    torch.manual_seed(0)
    model = Causal().double()
    sequences = torch.randint(VOCABULARY, (ROWS + 2, T + 1))
    return model, (sequences[:ROWS, :-1], sequences[:ROWS, 1:]), (sequences[ROWS:, :-1], sequences[ROWS:, 1:])


def batches(data, size):
    return list(zip(*(part.split(size) for part in data), strict=True))


def numbered(data, size):
    """Batches (tokens, targets, number of the row)."""
    return batches((*data, torch.arange(len(data[0]))), size)


def gradients(model, values):
    """Row of the Jacobian of each value of a tensor, by a loop of backward passes."""
    parameters = list(model.parameters())
    rows = []
    for value in values.flatten():
        row = torch.autograd.grad(value, parameters, retain_graph=True)
        rows.append(torch.cat([part.flatten() for part in row]))
    return torch.stack(rows)


def summed(rows, columns):
    """Sums of the rows of tokens with the same column."""
    columns = torch.tensor(columns).flatten()
    inside = columns >= 0
    return torch.zeros(int(columns.max()) + 1, rows.shape[1], dtype=rows.dtype).index_add(
        0, columns[inside], rows[inside]
    )


@pytest.mark.parametrize("microbatch", ["auto", 3, None])
def test_influence_of_tokens_on_tokens(task, microbatch):
    model, train, queries = task
    wanted = gradients(model, token_losses(model, queries)) @ gradients(model, token_losses(model, train)).T
    scores = sw.influence(
        model, token_losses, batches(train, 2), batches(queries, 1), unit="token", microbatch=microbatch
    )
    assert scores.shape == (2 * T, ROWS * T)
    torch.testing.assert_close(scores, wanted, rtol=1e-10, atol=1e-12)


def test_influence_of_documents_and_rows_on_chosen_tokens(task):
    model, train, queries = task
    tokens = gradients(model, token_losses(model, train))
    chosen = gradients(model, token_losses(model, queries)).view(2, T, -1)[:, 1:3].flatten(0, 1)

    def middle(batch):
        return torch.tensor([-1, 0, 1, -1]).expand(len(batch[0]), T)

    options = {"query_unit": middle}
    of_documents = sw.influence(model, token_losses, numbered(train, 3), batches(queries, 2), unit=documents, **options)
    torch.testing.assert_close(of_documents, chosen @ summed(tokens, DOCUMENTS).T, rtol=1e-10, atol=1e-12)
    rows = tokens.view(ROWS, T, -1).sum(1)
    for unit in ("sample", None):
        of_rows = sw.influence(model, token_losses, batches(train, 2), batches(queries, 2), unit=unit, **options)
        torch.testing.assert_close(of_rows, chosen @ rows.T, rtol=1e-10, atol=1e-12)


def test_trak_of_tokens(task):
    model, train, queries = task
    matrix = projection(model, 8)
    features, of_queries = (gradients(model, token_margins(model, data)) @ matrix for data in (train, queries))
    gram = features.T @ features
    damped = gram + 0.1 * gram.trace() / 8 * torch.eye(8)
    weights = torch.sigmoid(-token_margins(model, train).detach()).flatten()
    wanted = of_queries @ torch.linalg.inv(damped) @ features.T * weights
    scores = sw.trak(model, token_margins, batches(train, 2), batches(queries, 2), 8, unit="token")
    assert scores.shape == (2 * T, ROWS * T)
    torch.testing.assert_close(scores.double(), wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


def test_a_store_of_documents_is_continued(task, tmp_path):
    model, train, queries = task
    wanted = summed(gradients(model, token_losses(model, train)) @ projection(model, 8), DOCUMENTS)
    store = sw.attribution.ProjectedStore(tmp_path, 8, dtype="float32")
    store.fill(model, token_losses, numbered(train, 3)[:1], unit=documents)
    assert len(store) == 7
    store.fill(model, token_losses, numbered(train, 3), unit=documents)
    torch.testing.assert_close(store.rows().double(), wanted, rtol=1e-5, atol=1e-5)
    found = store.project(model, token_losses, batches(queries, 2), unit="token")
    of_queries = gradients(model, token_losses(model, queries)) @ projection(model, 8)
    torch.testing.assert_close(found.double(), of_queries, rtol=1e-5, atol=1e-5)


def test_outputs_of_documents_need_equal_weights(task):
    model, train, queries = task

    def minus_losses(model, batch):
        losses = token_losses(model, batch)
        return -losses, torch.ones_like(losses)

    train, queries = numbered(train, 3), batches(queries, 2)
    options = {"unit": documents, "query_unit": "token"}
    assert sw.trak(model, minus_losses, train, queries, 8, **options).shape == (2 * T, 10)
    with pytest.raises(sw.LossesError, match=r"only if their weights are equal; found tokens of one unit"):
        sw.trak(model, token_margins, train, queries, 8, **options)


def test_entries_that_are_not_per_sample_are_kept_whole(task):
    model, train, queries = task

    @sw.batch_constants(2)
    def losses(model, batch):
        assert batch[2].shape == (2, T)
        return token_losses(model, batch[:2]) * batch[2][0]

    constant = torch.arange(2.0 * T).view(2, T).double()
    loaders = [[(*batch, constant) for batch in batches(data, 2)] for data in (train, queries)]
    scaled = [gradients(model, token_losses(model, data) * constant[0]) for data in (queries, train)]
    scores = sw.influence(model, losses, *loaders, unit="token")
    torch.testing.assert_close(scores, scaled[0] @ scaled[1].T, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------- refusals


def test_other_units(task):
    model, train, queries = task
    with pytest.raises(ValueError, match=r"unit must be 'sample', 'token' or a function .* found 'word'"):
        sw.influence(model, token_losses, batches(train, 2), batches(queries, 2), unit="word")
    with pytest.raises(ValueError, match=r"query_unit must be 'sample', 'token' or a function .* found 3"):
        sw.trak(model, token_margins, batches(train, 2), batches(queries, 2), 8, query_unit=3)


def test_losses_of_samples(task):
    model, train, queries = task

    def losses(model, batch):
        return token_losses(model, batch).sum(1)

    with pytest.raises(sw.LossesError, match=r"one value per token, \(B, T\), if a unit is given; found \(1,\)"):
        sw.influence(model, losses, batches(train, 2), batches(queries, 2), unit="token")


def test_numbers_of_another_shape(task):
    model, train, queries = task
    with pytest.raises(sw.BatchError, match=r"must return integers \(2, T\), .* found \(2,\) of torch.int64"):
        sw.influence(model, token_losses, batches(train, 2), batches(queries, 2), unit=lambda batch: batch[0][:, 0])
    ends = torch.tensor([[0, 1, -1], [0, 1, -1]])
    with pytest.raises(sw.LossesError, match=r"with a loss, \(4, 4\); found numbers for \(4, 3\)"):
        sw.influence(model, token_losses, batches(train, 2)[:2], batches(queries, 2), unit=lambda batch: ends)


def test_no_unit(task):
    model, train, queries = task
    with pytest.raises(sw.BatchError, match=r"must number at least one token, from 0 on; found only negative numbers"):
        sw.influence(
            model, token_losses, batches(train, 2), batches(queries, 2), query_unit=lambda batch: -1 - batch[0]
        )


def test_rows_of_different_lengths(task):
    model, train, queries = task

    def losses(model, batch):
        values = token_losses(model, batch)
        return values[:, : T - int(batch[0][0, 0] == train[0][2, 0])]

    with pytest.raises(sw.BatchError, match=r"needs rows of one length.* found [34] tokens after [34]"):
        sw.influence(model, losses, batches(train, 1), batches(queries, 2), unit="token")
