"""`aggregate=sw.per(...)` in the Hugging Face Trainer, against one backward pass per sample; and the columns that
transforms and aggregates name.
"""

import pytest
import torch
from huggingface_models import (
    PerSampleTrainer,
    arguments,
    bert,
    classes,
    collated,
    llama,
    numbers,
    recorded,
    texts,
    train,
    vector,
)
from transformers import BertForTokenClassification

import samplewise as sw

UNITS = {
    "token": sw.per("token"),
    "sample": sw.per("sample"),
    "group": sw.per("group", key="prompt"),
    "constant": sw.per(10),
}
SPLITS = [(6, 1), (2, 3), (4, 2)]  # batch size, accumulated batches: whole, microbatches, ragged
PROMPTS = ["a", "b", "a", "c", "b", "a"]


def prompted(samples):
    return [{**sample, "prompt": prompt} for sample, prompt in zip(samples, PROMPTS, strict=True)]


def by_hand(model, samples, unit, bound, counted, lr=0.5):
    """One update with clipped gradients. Returns the norms of the samples, in the unit of the aggregate."""
    parameters = list(model.parameters())
    counts = [counted(sample) for sample in samples]
    groups = [sum(n for n, s in zip(counts, samples, strict=True) if s["prompt"] == t["prompt"]) for t in samples]
    units = {"sample": counts, "group": groups}.get(unit, [1] * len(samples))
    divisor = {"token": sum(counts), "sample": len(samples), "group": 3, "constant": 10}[unit]
    total = [torch.zeros_like(p) for p in parameters]
    norms = []
    for sample, n, scale in zip(samples, counts, units, strict=True):
        entries = {key: value for key, value in sample.items() if key != "prompt"}
        row = torch.autograd.grad(model(**collated([entries])).loss * n / scale, parameters, materialize_grads=True)
        norms.append(float(torch.stack([g.norm() for g in row]).norm()))
        for t, g in zip(total, row, strict=True):
            t += g * min(1, bound / norms[-1]) / divisor
    with torch.no_grad():
        for p, t in zip(parameters, total, strict=True):
            p -= lr * t
    return norms


def shifted(sample):
    return int((sample["labels"][1:] != -100).sum())


TASKS = {
    "llama": (llama, texts, shifted),
    "bert": (bert, classes, lambda sample: 1),
    "bert regression": (lambda: bert(num_labels=1), numbers, lambda sample: 1),
}


def close(a, b):
    assert (a - b).norm() <= 2e-6 * b.norm()


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("bound", [torch.inf, 0.3])
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("unit", UNITS)
def test_an_update_is_that_of_the_formula(unit, split, bound, tmp_path):
    expected = llama()
    norms = by_hand(expected, prompted(texts(6)), unit, bound, shifted)
    transforms = () if bound == torch.inf else [sw.clip(bound)]
    trainer = recorded(llama(), prompted(texts(6)), tmp_path, *split, transforms=transforms, aggregate=UNITS[unit])
    close(vector(trainer.model), vector(expected))
    ledger = sw.read_ledger(tmp_path).sort_by("id")
    torch.testing.assert_close(torch.tensor(ledger["norm"].to_pylist()), torch.tensor(norms), rtol=1e-5, atol=0)
    clipped = [min(1.0, bound / norm) for norm in norms]
    torch.testing.assert_close(torch.tensor(ledger["weight"].to_pylist()), torch.tensor(clipped), rtol=1e-5, atol=0)


@pytest.mark.parametrize("unit", ["sample", "group", "constant"])
@pytest.mark.parametrize("task", ["bert", "bert regression"])
def test_losses_without_tokens(task, unit, tmp_path):
    made, data, counted = TASKS[task]
    expected = made()
    by_hand(expected, prompted(data(6)), unit, 0.3, counted)
    trainer = train(made(), prompted(data(6)), tmp_path, 4, 2, transforms=[sw.clip(0.3)], aggregate=UNITS[unit])
    close(vector(trainer.model), vector(expected))


def test_per_token_is_bit_identical_to_the_default(tmp_path):
    """But for transformers 4, whose Trainer also counts the first label of a language model."""
    plain = train(bert(), classes(6), tmp_path, 2, 2)
    ours = train(bert(), classes(6), tmp_path, 2, 2, aggregate=sw.per("token"))
    assert torch.equal(vector(plain.model), vector(ours.model))


def test_the_logged_loss_is_that_of_the_trainer(tmp_path):
    losses = []
    for aggregate in (None, *UNITS.values()):
        options = {"logging_strategy": "steps", "logging_steps": 1}
        trainer = train(llama(), prompted(texts(6)), tmp_path, 2, 3, options=options, aggregate=aggregate)
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-6)


@pytest.mark.parametrize("made", [bert, lambda: bert(BertForTokenClassification)], ids=["samples", "tokens"])
def test_columns_that_transforms_name_reach_them(made, tmp_path):
    """The model does not accept them, and the Trainer would remove them."""
    weights = torch.linspace(0, 2, 6).tolist()
    samples = texts(6) if made is not bert else classes(6)
    if made is not bert:
        samples = [{**s, "labels": torch.where(s["labels"] < 0, -100, s["input_ids"] % 3)} for s in samples]
    data = [{**sample, "weight": weight} for sample, weight in zip(samples, weights, strict=True)]
    trainer = recorded(made(), data, tmp_path, 4, 2, transforms=[sw.weight("weight")])
    assert sw.read_ledger(tmp_path).sort_by("id")["weight"].to_pylist() == pytest.approx(weights)
    table = train(made(), samples, tmp_path / "table", 6, 1, transforms=[sw.weight(Table(samples, weights))])
    close(vector(trainer.model), vector(table.model))


class Table:
    """Weights of samples, found by their tokens."""

    def __init__(self, samples, weights):
        self.rows = {tuple(map(int, s["input_ids"])): weight for s, weight in zip(samples, weights, strict=True)}

    def __call__(self, batch):
        return torch.tensor([self.rows[tuple(row)] for row in batch["input_ids"].tolist()])


class Halved(PerSampleTrainer):
    """A loss that is not a mean over the labels."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) / 2


def test_tokens_that_are_not_those_of_the_labels_are_refused(tmp_path):
    message = "must know the number of tokens in the loss of each sample; found that those of per_sample_losses"
    with pytest.raises(sw.LossesError, match=message):
        train(llama(), texts(6), tmp_path, 3, 2, trainer=Halved, aggregate=sw.per("sample"))


def test_refused_arguments(tmp_path):
    with pytest.raises(TypeError, match=r"aggregate must be a sw.per\(...\); found 'sample'"):
        PerSampleTrainer(bert(), arguments(tmp_path), train_dataset=classes(4), aggregate="sample")
    with pytest.raises(sw.BatchError, match="'prompt'"):
        train(bert(), classes(4), tmp_path, aggregate=sw.per("group", key="prompt"))
