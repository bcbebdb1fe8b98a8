"""Units of losses in the Hugging Face Trainer: means over labels or samples, sums and others."""

import logging

import pytest
import torch
import torch.nn.functional as F
from huggingface_models import (
    CLASSES,
    VOCABULARY,
    PerSampleTrainer,
    SequentialTrainer,
    bert,
    classes,
    collated,
    recorded,
    tags,
    texts,
    tokens,
    train,
    vector,
    windows_of,
)
from torch import nn
from transformers import (
    BertForQuestionAnswering,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Trainer,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

import samplewise as sw
from samplewise.errors import GraphError, LossesError

BOUND = 0.3
WEIGHT = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
UNKNOWN = "found that the loss of the trainer is neither a mean over samples or labels nor a sum. Pass denominator="


def own(criterion, base=PerSampleTrainer):
    """A trainer whose compute_loss is a function of the logits, the labels and the number of items."""

    class Own(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            return criterion(model(**inputs).logits, labels, num_items_in_batch)

    return Own


def loss_alone(criterion):
    """Function (model, sample): the loss of a batch of one sample."""

    def loss(model, sample):
        batch = collated([sample])
        labels = batch.pop("labels")
        return criterion(model(**batch).logits, labels, None)

    return loss


def clipped_by_hand(model, windows, loss, mean, share=lambda sample: 1, size=None):
    """Updates of samples' clipped gradients, one backward pass each. Returns the norms.

    share: denominator of a sample, by which its loss is multiplied; the sum is divided by all of them if `mean`
    size: of the batches by whose number the Trainer divides a sum; None: it does not divide
    """
    parameters = list(model.parameters())
    norms = []
    for window in windows:
        total = [torch.zeros_like(p) for p in parameters]
        for sample in window:
            row = torch.autograd.grad(loss(model, sample) * share(sample), parameters, materialize_grads=True)
            norms.append(float(torch.stack([g.norm() for g in row]).norm()))
            for t, g in zip(total, row, strict=True):
                t += g * min(1, BOUND / norms[-1])
        batches = 1 if size is None else -(len(window) // -size)
        with torch.no_grad():
            for p, t in zip(parameters, total, strict=True):
                p -= 0.5 * t / (sum(map(share, window)) if mean else batches)
    return norms


def assert_clipped(made, data, path, loss, sizes=(4, 1), mean=True, share=lambda sample: 1, **keywords):
    """A clipped training in float64 equals one with one backward pass per sample."""
    ours = recorded(made().double(), data, path, *sizes, transforms=[sw.clip(BOUND)], **keywords)
    ledger = sw.read_ledger(path)
    by_hand = made().double()
    size = None if ours.model_accepts_loss_kwargs else sizes[0]
    norms = clipped_by_hand(by_hand, windows_of(ledger, data), loss, mean, share, size)
    total = (vector(by_hand) - vector(made().double())).norm()
    torch.testing.assert_close(torch.tensor(ledger["norm"].to_pylist()), torch.tensor(norms), rtol=1e-5, atol=1e-6)
    assert (vector(ours.model) - vector(by_hand)).norm() <= 1e-6 * total
    assert (torch.tensor(ledger["weight"].to_pylist()) < 1).any()
    return ours


# --- class indices --------------------------------------------------------------------------------------------------


def focal(z, y, items=None):
    losses = F.cross_entropy(z, y, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


CRITERIA = {
    "mean": lambda z, y, n: F.cross_entropy(z, y),
    "focal": focal,
    "weighted": lambda z, y, n: F.cross_entropy(z, y, weight=WEIGHT, reduction="none").mean(),
    "margin": lambda z, y, n: F.multi_margin_loss(z, y),
    "sum": lambda z, y, n: F.cross_entropy(z, y, reduction="sum"),
    "half a sum": lambda z, y, n: F.cross_entropy(z, y, reduction="sum") / 2,
    "focal sum": lambda z, y, n: focal(z, y) * len(y),
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("sizes", [(4, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("name", CRITERIA)
def test_own_losses(name, sizes, tmp_path, caplog):
    criterion = CRITERIA[name]
    is_sum = "sum" in name
    loss = loss_alone(criterion)
    ours = assert_clipped(bert, classes(7), tmp_path, loss, sizes, mean=not is_sum, trainer=own(criterion))
    divided = [r for r in caplog.records if "does not depend on num_items_in_batch" in r.message]
    assert len(divided) == (sizes != (4, 1) and not is_sum and ours.model_accepts_loss_kwargs)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("name", ["sum", "focal sum"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_recording_a_sum_is_bit_identical(name, accumulate, tmp_path):
    plain = own(CRITERIA[name], Trainer)
    made = lambda: bert(dropout=0.2).double()  # noqa: E731
    expected = train(made(), classes(7), tmp_path / "plain", 2, accumulate, plain)
    ours = recorded(made(), classes(7), tmp_path / "ours", 2, accumulate, trainer=own(CRITERIA[name]))
    assert torch.equal(vector(expected.model), vector(ours.model))


def weighted_by_items(outputs, labels, num_items_in_batch=None):
    losses = F.cross_entropy(outputs.logits, labels, weight=WEIGHT, reduction="sum")
    return losses / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def test_a_criterion_that_divides_by_the_number_of_items(tmp_path):
    loss = loss_alone(CRITERIA["weighted"])
    assert_clipped(bert, classes(7), tmp_path, loss, (2, 2), compute_loss_func=weighted_by_items)


def test_losses_of_a_similar_criterion_are_not_recorded(tmp_path):
    """Label smoothing changes the loss of an untrained model by less than 0.1 %."""
    recorded(bert(), classes(4), tmp_path, trainer=own(lambda z, y, n: F.cross_entropy(z, y, label_smoothing=0.1)))
    ledger = sw.read_ledger(tmp_path)
    assert torch.tensor(ledger["loss"].to_pylist()).isnan().all()
    assert min(ledger["norm"].to_pylist()) > 0


def test_heads_without_labels_in_the_batch(tmp_path):
    """Start and end positions of answers."""
    made = lambda: bert(BertForQuestionAnswering, num_labels=2)  # noqa: E731
    data = [{"input_ids": x, "start_positions": i % 3, "end_positions": 3} for i, x in enumerate(tokens(7).tolist())]
    loss = lambda model, sample: model(**collated([sample])).loss  # noqa: E731
    assert_clipped(made, data, tmp_path, loss, (2, 2))


# --- class weights --------------------------------------------------------------------------------------------------

CLASS_WEIGHTS = {
    "torch": lambda z, y, n: F.cross_entropy(z, y, weight=WEIGHT.to(z.dtype)),
    "by hand": lambda z, y, n: (
        F.cross_entropy(z, y, weight=WEIGHT, reduction="none").sum() / WEIGHT[y].sum()  # the same
    ),
}


@pytest.mark.parametrize("name", CLASS_WEIGHTS)
def test_means_with_class_weights_need_a_denominator(name, tmp_path):
    trainer = own(CLASS_WEIGHTS[name])
    with pytest.raises(LossesError, match=rf"^clip\(0\.3\) must get the gradients .*; {UNKNOWN}"):
        train(bert().double(), classes(6), tmp_path, transforms=[sw.clip(BOUND)], trainer=trainer)
    loss = loss_alone(CLASS_WEIGHTS[name])
    share = lambda sample: float(WEIGHT[sample["labels"]])  # noqa: E731
    denominator = lambda batch: WEIGHT[batch["labels"]].sum()  # noqa: E731
    for sizes in ((6, 1), (2, 3)):
        directory = tmp_path / str(sizes[0])
        assert_clipped(bert, classes(8), directory, loss, sizes, share=share, trainer=trainer, denominator=denominator)


def test_class_weights_are_found_if_all_first_labels_are_equal(tmp_path):
    data = [{**sample, "labels": 1} for sample in classes(4)]
    with pytest.raises(LossesError, match=UNKNOWN):
        train(bert(), data, tmp_path, transforms=[sw.clip(BOUND)], trainer=own(CLASS_WEIGHTS["torch"]))


def test_recording_an_unknown_loss_is_bit_identical_and_without_norms(tmp_path, caplog):
    criterion = CLASS_WEIGHTS["torch"]
    plain = train(bert(dropout=0.2), classes(6), tmp_path / "plain", trainer=own(criterion, Trainer))
    ours = recorded(bert(dropout=0.2), classes(6), tmp_path / "ours", trainer=own(criterion))
    assert torch.equal(vector(plain.model), vector(ours.model))
    assert torch.tensor(sw.read_ledger(tmp_path / "ours")["norm"].to_pylist()).isnan().all()
    messages = [r.message for r in caplog.records if r.name == "samplewise"]
    assert len(messages) == 1 and messages[0].startswith("The ledger has no norms: the loss of the trainer is neither")
    weighed = {"transforms": [sw.weight(lambda counts: 0.5 * counts)], "trainer": own(criterion)}
    recorded(bert(), classes(6), tmp_path / "weighed", **weighed)
    assert torch.tensor(sw.read_ledger(tmp_path / "weighed")["norm"].to_pylist()).isnan().all()


@pytest.mark.parametrize("wrong", [0, -1.0, "tokens", float("inf")])
def test_a_denominator_of_another_kind(wrong, tmp_path):
    with pytest.raises(ValueError, match=r"^denominator must be a positive number, 'samples', 'labels' or a function"):
        train(bert(), classes(4), tmp_path, denominator=wrong)


# --- tokens ---------------------------------------------------------------------------------------------------------


def token_losses(z, y):
    return F.cross_entropy(z.transpose(1, 2), y, reduction="none")


def mean_of_means(z, y, items=None):
    return (token_losses(z, y).sum(1) / y.ne(-100).sum(1)).mean()


def focal_tokens(z, y, items=None):
    losses = token_losses(z, y)
    return ((1 - (-losses).exp()) * losses).sum() / y.ne(-100).sum()


def number_of_tags(sample):
    return int(sample["labels"].ne(-100).sum())


TOKEN_CRITERIA = {  # name -> criterion, denominator of a sample; None: a sum
    "mean of means": (mean_of_means, lambda sample: 1),
    "focal": (focal_tokens, number_of_tags),
    "sum": (lambda z, y, n: token_losses(z, y).sum(), None),
    "sum over sequences": (lambda z, y, n: token_losses(z, y).sum() / len(y), lambda sample: 1),
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("sizes", [(4, 1), (2, 2)])
@pytest.mark.parametrize("name", TOKEN_CRITERIA)
def test_own_losses_of_tokens(name, sizes, tmp_path):
    criterion, share = TOKEN_CRITERIA[name]
    made = lambda: bert(BertForTokenClassification)  # noqa: E731
    mean = share is not None
    share = share or (lambda sample: 1)
    loss = loss_alone(criterion)
    assert_clipped(made, tags(7), tmp_path, loss, sizes, mean, share, trainer=own(criterion))


def test_a_mean_of_means_that_is_noticed_later(tmp_path):
    """In the first batch, all samples have the same number of labels."""
    data = [{**sample, "labels": sample["input_ids"] % CLASSES} for sample in tags(4)] + tags(4)
    made = bert(BertForTokenClassification)
    with pytest.raises(LossesError, match=UNKNOWN):
        train(made, data, tmp_path, 4, transforms=[sw.clip(BOUND)], trainer=own(mean_of_means, SequentialTrainer))
    assert not torch.equal(vector(made), vector(bert(BertForTokenClassification)))


# --- pixels ---------------------------------------------------------------------------------------------------------


def segformer():
    torch.manual_seed(0)
    config = SegformerConfig(
        num_encoder_blocks=1, depths=[1], sr_ratios=[1], hidden_sizes=[8], patch_sizes=[3], strides=[2],
        num_attention_heads=[1], mlp_ratios=[2], decoder_hidden_size=8, num_labels=CLASSES, drop_path_rate=0.0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
    )  # fmt: skip
    model = SegformerForSemanticSegmentation(config)
    model.decode_head.batch_norm = nn.Identity()  # samples interact in it
    return model


@pytest.mark.parametrize("ignored", [False, True])
def test_segmentation(ignored, tmp_path):
    pixels = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    data = [{"pixel_values": x, "labels": (x[0] > 0).long() + (x[1] > 0).long()} for x in pixels]
    if ignored:
        for i, sample in enumerate(data):
            sample["labels"][: i + 1] = 255
    share = lambda sample: int(sample["labels"].ne(255).sum())  # noqa: E731
    loss = lambda model, sample: model(**collated([sample])).loss  # noqa: E731
    assert_clipped(segformer, data, tmp_path, loss, (2, 2), share=share)
    ledger = sw.read_ledger(tmp_path)
    assert ledger["count"].to_pylist() == [share(data[i]) for i in ledger["id"].to_pylist()]
    assert min(ledger["loss"].to_pylist()) > 0


# --- CTC ------------------------------------------------------------------------------------------------------------


def wav2vec2(**options):
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8, 8), conv_kernel=(8, 4), conv_stride=(4, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, hidden_dropout=0.1, activation_dropout=0.0, attention_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False, do_stable_layer_norm=True,
        feat_extract_norm="layer", **options,
    )  # fmt: skip
    config.hidden_dropout = 0.0
    return Wav2Vec2ForCTC(config)


def speech(n, ragged=True):
    generator = torch.Generator().manual_seed(4)
    samples = []
    for i, x in enumerate(torch.randn(n, 320, generator=generator, dtype=torch.float64)):
        labels = torch.randint(1, VOCABULARY, (5,), generator=generator)
        labels[3 + i % 3 if ragged else 5 :] = -100
        samples.append({"input_values": x, "labels": labels})
    return samples


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("sizes", [(4, 1), (2, 2)])
@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_ctc(reduction, ragged, sizes, tmp_path):
    loss = lambda model, sample: model(**collated([sample])).loss  # noqa: E731
    made = lambda: wav2vec2(ctc_loss_reduction=reduction)  # noqa: E731
    assert_clipped(made, speech(7, ragged), tmp_path, loss, sizes, mean=reduction == "mean")


# --- shifted labels -------------------------------------------------------------------------------------------------


def gpt2_language_model():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("norms", [False, True])
def test_a_language_model_without_a_loss_type(norms, tmp_path):
    """The Trainer does not know that GPT-2 shifts the labels."""
    data = texts(6)
    model = gpt2_language_model()
    keywords = {"ledger": sw.Ledger(norms=norms), "options": {"learning_rate": 0.0}}
    train(model, sw.Indexed(data), tmp_path, 4, **keywords)
    for row in sw.read_ledger(tmp_path).to_pylist():
        batch = collated([data[row["id"]]])
        number = int(batch["labels"][:, 1:].ne(-100).sum())
        model.zero_grad()
        loss = model(**batch).loss * number
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        assert row["count"] == number
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert not norms or row["norm"] == pytest.approx(float(norm), rel=1e-4)


def test_a_model_with_experts(tmp_path):
    """The loss contains that of the routers, which belongs to no sample."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 2, "max_position_embeddings": 16}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, output_router_logits=True, **sizes))
    data = texts(4)
    train(model, sw.Indexed(data), tmp_path, ledger=sw.Ledger(norms=False), options={"learning_rate": 0.0})
    for row in sw.read_ledger(tmp_path).to_pylist():
        batch = collated([data[row["id"]]])
        labels = batch["labels"][:, 1:]
        expected = F.cross_entropy(model(**batch).logits[:, :-1].transpose(1, 2), labels, reduction="sum")
        assert row["loss"] == pytest.approx(expected.item(), rel=1e-4)


# --- the probe ------------------------------------------------------------------------------------------------------


def test_the_probe_changes_no_random_numbers_and_no_attributes(tmp_path):
    class Counting(own(focal)):
        calls = 0

        def compute_loss(self, *args, **kwargs):
            self.calls += 1
            return super().compute_loss(*args, **kwargs)

    trainer = recorded(bert(dropout=0.5), classes(8), tmp_path / "ours", trainer=Counting)
    plain = train(bert(dropout=0.5), classes(8), tmp_path / "plain", trainer=own(focal, Trainer))
    assert torch.equal(vector(plain.model), vector(trainer.model))
    assert trainer.calls == 2


def test_a_loss_that_cannot_be_computed_for_single_samples(tmp_path, caplog):
    caplog.set_level(logging.WARNING)

    def criterion(z, y, n):
        assert len(y) == 4
        return focal(z, y)

    with pytest.raises(LossesError, match=UNKNOWN):
        train(bert(), classes(8), tmp_path, transforms=[sw.clip(BOUND)], trainer=own(criterion))
    train(bert(), classes(8), tmp_path, transforms=[sw.clip(BOUND)], trainer=own(criterion), denominator="samples")


# --- outputs --------------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Token classification with logits (T, B, classes), or (B, T, classes)."""

    def __init__(self, batch_first):
        super().__init__()
        torch.manual_seed(0)
        self.batch_first = batch_first
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, input_ids, labels):
        logits = self.linear(self.embedding(input_ids.T))
        if self.batch_first:
            logits = logits.transpose(0, 1)
        loss = F.cross_entropy(logits.flatten(0, 1), (labels if self.batch_first else labels.T).flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("length", [4, 6])
def test_outputs_with_the_batch_in_the_second_dimension(length, tmp_path):
    """Also if there are as many tokens as samples."""
    data = [{"input_ids": x, "labels": x % CLASSES} for x in tokens(4, length)]
    with pytest.raises(
        GraphError, match=rf"^the model must .* batch of 4 samples; found shape \({length}, 4, 3\), whose"
    ):
        train(Tagger(False), data, tmp_path, transforms=[sw.clip(BOUND)])
    loss = lambda model, sample: model(**collated([sample]))["loss"]  # noqa: E731
    assert_clipped(lambda: Tagger(True), data, tmp_path, loss, share=lambda sample: length)
