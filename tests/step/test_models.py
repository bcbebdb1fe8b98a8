"""Models of all kinds: three updates of a Step, however cut, are those of the textbook loop, in float64."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from zoo import CASES, INDEPENDENT

import samplewise as sw
from samplewise.testing.case import default_dtype, seeded
from samplewise.testing.compare import assert_same
from samplewise.testing.oracle import rows_of, wanted

SAMPLES, MICROBATCH, UPDATES, LR = 4, 3, 3, 0.05
ARRIVE_IN = [5, 5, 2]  # so that windows are made of pieces of 3 and 1, of 1 and 3, of 2 and 2


def cut(inputs, sizes):
    return list(zip(*(x.split(sizes) for x in inputs), strict=True))


def textbook(model, loss_fn, inputs):
    """Returns the parameters that the first window does not reach."""
    optimizer, missed = torch.optim.SGD(wanted(model).values(), lr=LR), None
    for window in cut(inputs, SAMPLES):
        optimizer.zero_grad()
        loss_fn(model, window).mean().backward()
        if missed is None:
            missed = [name for name, p in wanted(model).items() if p.grad is None]
        optimizer.step()
    return missed


@torch.no_grad()
def clipped_by_rows(model, loss_fn, inputs, bound):
    """One sample's gradient after the other, each scaled down."""
    for window in cut(inputs, SAMPLES):
        with torch.enable_grad():
            rows = rows_of(loss_fn(model, window), wanted(model))
        scaled = rows.sum((bound / rows.norms()).clamp(max=1).nan_to_num(1.0))
        for name, p in wanted(model).items():
            p -= LR * scaled[name] / SAMPLES


def median_norm(model, loss_fn, inputs):
    norms = rows_of(loss_fn(model, inputs), wanted(model)).norms()
    return norms[norms > 0].median().item()


def compare(model, loss_fn, inputs, clip):
    """Also: a word is said of modules in eval mode and of parameters that are not reached, and of nothing else."""
    model = copy.deepcopy(model)
    twin, measured = copy.deepcopy(model), copy.deepcopy(model)
    transforms = [sw.clip(bound := median_norm(measured, loss_fn, inputs))] if clip else []
    step = sw.Step(
        model,
        torch.optim.SGD(wanted(model).values(), lr=LR),
        loss_fn,
        samples=SAMPLES,
        microbatch=MICROBATCH,
        transforms=transforms,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        updates = list(step.over(cut(inputs, ARRIVE_IN)))
    assert [update.samples for update in updates] == [SAMPLES] * UPDATES
    if clip:
        assert any(update.weights.lt(1).any() for update in updates)
        clipped_by_rows(twin, loss_fn, inputs, bound)
        missed = textbook(measured, loss_fn, inputs)
    else:
        missed = textbook(twin, loss_fn, inputs)
    assert_same(wanted(model), wanted(twin), what="parameters")

    asleep = ["modules are in eval mode while training"] * any(not m.training for m in model.modules())
    unreached = ["the optimizer has parameters that the loss does not reach"] * bool(missed)
    slow = "per-sample gradients of this model are computed in a slow way in each step"  # of some cases
    messages = [str(warning.message).split(":")[0] for warning in caught]
    assert [message for message in messages if message != slow] == asleep + unreached


clips = pytest.mark.parametrize("clip", [False, True], ids=["plain", "clip"])

# ------------------------------------------------------------- the zoo


BY_FREQUENCY = CASES["embedding_scaled_by_frequency"]  # divides by how often a token comes in the whole batch
TRAINED = [case for case in INDEPENDENT if case.traits.rows and not case.name.endswith("_scaled_by_frequency")]


@pytest.mark.sweep(1 / 24)
@clips
@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_the_zoo(case, clip):
    model, inputs = case.build(SAMPLES * UPDATES)
    compare(model, lambda model, batch: case.losses(model, batch), inputs, clip)


def test_gradients_divided_by_how_often_a_token_comes():
    model, inputs = BY_FREQUENCY.build(SAMPLES)
    with pytest.warns(sw.TrainingWarning, match="samples depend on each other: the gradient of sample"):
        sw.Step(model, sw.sgd(LR), lambda model, batch: BY_FREQUENCY.losses(model, batch)).run([inputs])


# ------------------------------------------------------------- Hugging Face, tiny and random


T, VOCABULARY = 6, 23
TEXT = dict(
    vocab_size=VOCABULARY,
    hidden_size=12,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
)
QUIET = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
VISION = dict(image_size=8, patch_size=4, hidden_size=12, intermediate_size=10, num_hidden_layers=2)
GPT2 = dict(vocab_size=VOCABULARY, n_embd=12, n_layer=2, n_head=2, n_positions=16)
T5 = dict(vocab_size=VOCABULARY, d_model=12, d_kv=6, d_ff=10, num_layers=2, num_heads=2)


def next_words(model, batch):
    (ids,) = batch
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def translations(model, batch):
    (ids,) = batch
    logits = model(input_ids=ids, decoder_input_ids=ids.flip(1)[:, :5], use_cache=False).logits
    return F.cross_entropy(logits.transpose(1, 2), ids[:, :5], reduction="none").mean(1)


def classes(model, batch):
    x, labels = batch
    return F.cross_entropy(model(x).logits, labels, reduction="none")


def padded_classes(model, batch):
    ids, labels = batch
    mask = (torch.arange(T) < 2 + labels[:, None]).long()  # rows of different lengths
    return F.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, labels, reduction="none")


def mixtral():
    config = transformers.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2)
    config._experts_implementation = "eager"  # the default has no float64
    return transformers.MixtralForCausalLM(config)


HUGGING_FACE = {
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        ),
        next_words,
    ),
    "gpt2 with dropout, in eval mode": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).eval(),
        next_words,
    ),
    "llama": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=1)),
        next_words,
    ),
    "mixtral": (mixtral, next_words),
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, dropout_rate=0.0)),
        translations,
    ),
    "bert": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, **QUIET, num_labels=3)),
        padded_classes,
    ),
    "electra with dropout, in eval mode": (
        lambda: transformers.ElectraForSequenceClassification(
            transformers.ElectraConfig(**TEXT, embedding_size=8, num_labels=3)
        ).eval(),
        classes,
    ),
    "vit": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**VISION, num_attention_heads=2, num_labels=3, **QUIET)
        ),
        classes,
    ),
    "convnext": (
        lambda: transformers.ConvNextForImageClassification(
            transformers.ConvNextConfig(
                patch_size=2, hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, image_size=8, num_labels=3
            )
        ),
        classes,
    ),
    "resnet, its batch norms in eval mode": (
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], num_labels=3)
        ).eval(),
        classes,
    ),
}


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize(("name", "clip"), [*itertools.product(HUGGING_FACE, [False, True])])
def test_hugging_face(name, clip):
    build, loss_fn = HUGGING_FACE[name]
    with seeded(0), default_dtype(torch.float32):
        model = build()
        for p in model.parameters():
            p.data += 0.2 * torch.randn_like(p)  # attention that is not uniform tests more
        ids, labels = torch.randint(3, VOCABULARY, (SAMPLES * UPDATES, T)), torch.arange(SAMPLES * UPDATES) % 3
        images = torch.randn(SAMPLES * UPDATES, 3, 8, 8, dtype=torch.float64)
    takes_images = "Image" in type(model).__name__
    inputs = (images, labels) if takes_images else (ids, labels) if "classes" in loss_fn.__name__ else (ids,)
    compare(model.double(), loss_fn, inputs, clip)
