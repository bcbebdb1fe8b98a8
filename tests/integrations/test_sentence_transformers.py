"""`PerSample` with the trainers of sentence-transformers, and losses that it refuses, such as in-batch negatives."""

import random

import pytest
import torch
from datasets import Dataset, disable_progress_bars
from sentence_transformers import (
    CrossEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

import samplewise as sw
from samplewise.errors import GraphError, SamplesInteractError
from samplewise.integrations.huggingface import PerSample

pytestmark = pytest.mark.slow
disable_progress_bars()

WORDS = "the a cat dog sat on mat ran big red".split()
SAMPLES = 10
BOUND = 1.0
LR = 0.05


class PerSampleTrainer(PerSample, SentenceTransformerTrainer):
    pass


class PerSampleCrossTrainer(PerSample, CrossEncoderTrainer):
    pass


def columns(*names, labels=None):
    rng = random.Random(0)
    texts = {
        name: [" ".join(rng.choices(WORDS, k=2 + (i + k) % 4)) for i in range(SAMPLES)] for k, name in enumerate(names)
    }
    return Dataset.from_dict({**texts, **({} if labels is None else {"label": labels})})


PAIRS = columns("sentence1", "sentence2", labels=[i / 9 for i in range(SAMPLES)])
BINARY = columns("sentence1", "sentence2", labels=[i % 2 for i in range(SAMPLES)])
TRIPLETS = columns("anchor", "positive", "negative")
MARGINS = columns("query", "positive", "negative", labels=[0.3 * i - 1 for i in range(SAMPLES)])
TASKS = {
    "CosineSimilarityLoss": PAIRS,
    "ContrastiveLoss": BINARY,
    "TripletLoss": TRIPLETS,
    "MarginMSELoss": MARGINS,
}


def saved(directory, head, dropout, **options):
    """Path of a BERT with random weights, and its tokenizer."""
    names = ["<pad>", "<unk>", "<sep>", *WORDS]
    made = Tokenizer(models.WordLevel({word: k for k, word in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "sep_token": "<sep>"}
    PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=16, **special).save_pretrained(directory)
    config = BertConfig(
        vocab_size=len(names), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, initializer_range=0.5, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    head(config).save_pretrained(directory)
    return str(directory)


def embedding(directory, dropout=0.0):
    transformer = Transformer(saved(directory, BertModel, dropout))
    return SentenceTransformer(modules=[transformer, Pooling(8)], device="cpu")


def arguments(directory, kind=SentenceTransformerTrainingArguments, batch=4, **options):
    defaults = {
        "per_device_train_batch_size": batch, "learning_rate": LR, "optim": "sgd", "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "num_train_epochs": 1, "report_to": [], "use_cpu": True, "bf16": False,
        "dataloader_pin_memory": False, "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    return kind(str(directory), **{**defaults, **options})


def trained(directory, name, data, kind=PerSampleTrainer, dropout=0.0, dtype=torch.float32, options=None, **keywords):
    model = embedding(directory / "model", dropout).to(dtype)
    loss = getattr(losses, name)(model)
    data = sw.Indexed(data) if kind is PerSampleTrainer else data
    trainer = kind(model, arguments(directory, **(options or {})), train_dataset=data, loss=loss, **keywords)
    trainer.train()
    return trainer


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", TASKS)
def test_clipping_equals_one_sample_at_a_time(tmp_path, name, accumulate):
    data = TASKS[name]
    keywords = {"transforms": [sw.clip(BOUND)], "ledger": sw.Ledger(), "dtype": torch.float64}
    found = trained(tmp_path, name, data, options={"gradient_accumulation_steps": accumulate}, **keywords)
    table = sw.read_ledger(tmp_path).to_pydict()
    assert sorted(table["id"]) == list(range(SAMPLES))
    assert table["update"] == [k // (4 * accumulate) for k in range(SAMPLES)]
    model = embedding(tmp_path / "again").double()
    loss = getattr(losses, name)(model)
    parameters = list(model.parameters())
    norms = []
    for start in range(0, SAMPLES, 4 * accumulate):
        window = table["id"][start : start + 4 * accumulate]
        totals = [torch.zeros_like(p) for p in parameters]
        for i in window:
            features, labels = found.collect_features(found.data_collator([data[i]]))
            row = torch.autograd.grad(loss(features, labels), parameters, allow_unused=True, materialize_grads=True)
            norms.append(torch.cat([r.flatten() for r in row]).norm().item())
            for total, r in zip(totals, row, strict=True):
                total += r * min(1, BOUND / max(norms[-1], 1e-30)) / len(window)
        with torch.no_grad():
            for p, total in zip(parameters, totals, strict=True):
                p -= LR * total
    torch.testing.assert_close(vector(found.model), vector(model), rtol=1e-9, atol=1e-9)
    assert table["norm"] == pytest.approx(norms, rel=1e-6, abs=1e-6)
    assert max(norms) > BOUND


@pytest.mark.parametrize("name", ["CosineSimilarityLoss", "TripletLoss"])
def test_recording_leaves_training_bit_identical(tmp_path, name):
    plain = trained(tmp_path / "plain", name, TASKS[name], SentenceTransformerTrainer, dropout=0.2)
    ours = trained(tmp_path / "ours", name, TASKS[name], dropout=0.2, ledger=sw.Ledger())
    assert torch.equal(vector(ours.model), vector(plain.model))
    assert sw.read_ledger(tmp_path / "ours").num_rows == SAMPLES


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("MultipleNegativesRankingLoss", TRIPLETS),
        ("CoSENTLoss", PAIRS),
        ("BatchHardTripletLoss", columns("text", labels=[0, 1] * 5)),
    ],
)
def test_losses_that_compare_samples_are_refused(tmp_path, name, data):
    message = (
        f"the loss of a sample must not depend on other samples; found {name}, which compares samples of a batch with "
        "each other, as in-batch negatives do. Use a loss of single samples, such as CosineSimilarityLoss"
    )
    with pytest.raises(SamplesInteractError) as refused:
        trained(tmp_path / "clipped", name, data, transforms=[sw.clip(BOUND)])
    assert str(refused.value).startswith(message)
    plain = trained(tmp_path / "plain", name, data, SentenceTransformerTrainer)
    ours = trained(tmp_path / "ours", name, data, ledger=sw.Ledger(norms=False))
    assert torch.equal(vector(ours.model), vector(plain.model))


def test_a_loss_with_parameters_is_refused(tmp_path):
    model = embedding(tmp_path / "model")
    loss = losses.SoftmaxLoss(model, 8, num_labels=2)
    trainer = PerSampleTrainer(
        model, arguments(tmp_path), train_dataset=sw.Indexed(BINARY), loss=loss, transforms=[sw.clip(BOUND)]
    )
    with pytest.raises(
        GraphError, match=r"found the parameter 'classifier.weight' of SoftmaxLoss\. Use a loss without"
    ):
        trainer.train()


def test_cross_encoders(tmp_path):
    def made(kind, directory, data, **keywords):
        path = saved(directory / "model", BertForSequenceClassification, 0.0, num_labels=1)
        model = CrossEncoder(path, device="cpu", num_labels=1)
        args = arguments(directory, CrossEncoderTrainingArguments)
        trainer = kind(model, args, train_dataset=data, loss=BinaryCrossEntropyLoss(model), **keywords)
        trainer.train()
        return vector(trainer.model)

    plain = made(CrossEncoderTrainer, tmp_path / "plain", BINARY)
    ours = made(PerSampleCrossTrainer, tmp_path / "ours", sw.Indexed(BINARY), ledger=sw.Ledger())
    assert torch.equal(ours, plain)
    assert sorted(sw.read_ledger(tmp_path / "ours")["id"].to_pylist()) == list(range(SAMPLES))
    assert min(sw.read_ledger(tmp_path / "ours")["norm"].to_pylist()) > 0
