"""Common mistakes in a training script: one message for each, once; none for correct scripts."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from zoo import CASES

import samplewise as sw

CLIP = [sw.clip(1.0)]
transforms = pytest.mark.parametrize("transforms", [(), CLIP], ids=["plain", "clip"])


def mlp(*between):
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 1))


def cnn(norm, head=1):
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, head))


def batches(*shape, updates=3):
    return [(torch.randn(shape or (8, 6)), torch.randn(shape[0] if shape else 8)) for _ in range(updates)]


def squares(model, batch):
    x, y = batch
    return (model(x).flatten(1).mean(1) - y).square()


def train(model, loss_fn=squares, data=None, optimizer=None, **options):
    """What is said during three updates."""
    step = sw.Step(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.01), loss_fn, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.run(batches() if data is None else data)
    assert step.counters.updates >= 3
    return [str(warning.message) for warning in caught]


def refuses(error, message, model, loss_fn=squares, **options):
    """At the first update, and before anything is changed."""
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(error, match=message) as caught:
        train(model, loss_fn, **options)
    assert all(torch.equal(p, then) for p, then in zip(model.parameters(), before, strict=True))
    return str(caught.value)


# ------------------------------------------------------------- eval mode


@transforms
def test_a_model_in_eval_mode(transforms):
    (said,) = train(mlp().eval(), transforms=transforms)
    assert said.startswith("modules are in eval mode while training: the model.")
    assert "Call train() on them, unless this is intended." in said


def test_a_submodule_in_eval_mode_is_named():
    model = nn.ModuleDict({"body": mlp(nn.Dropout()), "head": nn.Linear(1, 1)})
    model["body"].eval()
    (said,) = train(model, lambda model, batch: squares(nn.Sequential(model["body"], model["head"]), batch))
    assert "eval mode while training: body. " in said  # and not body.0, body.1, ...


def test_many_submodules_in_eval_mode_are_counted():
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(9)], nn.Linear(6, 1))
    for layer in model[:9]:
        layer.eval()
    (said,) = train(model)
    assert "0, 1, 2, 3, 4 and 4 more" in said


def test_a_loss_module_in_eval_mode_is_named():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, model, batch):
            return self.scale.exp() * squares(model, batch)

    model, loss = mlp(), Scaled().eval()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.01)
    (said,) = train(model, loss, optimizer=optimizer)
    assert "eval mode" in said


# ------------------------------------------------------------- parameters without a gradient, or without an optimizer


@transforms
def test_a_layer_that_the_loss_never_reaches(transforms):
    model = mlp()
    model.idle = nn.Linear(2, 2)
    (said,) = train(model, lambda model, batch: squares(model[:3], batch), transforms=transforms)
    assert "the optimizer has parameters that the loss does not reach: idle.weight, idle.bias." in said


@transforms
def test_a_detached_body(transforms):
    model = nn.Sequential(mlp(), nn.Linear(1, 1))

    def loss_fn(model, batch):
        return squares(lambda x: model[1](model[0](x).detach()), batch)

    (said,) = train(model, loss_fn, transforms=transforms)
    assert "does not reach: 0.0.weight, 0.0.bias, 0.2.weight, 0.2.bias." in said
    assert "Look for a detach" in said


@transforms
def test_a_layer_that_the_optimizer_does_not_have(transforms):
    model = mlp()
    (said,) = train(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.01), transforms=transforms)
    assert "the loss reaches parameters that the optimizer does not have: 2.weight, 2.bias." in said
    assert "Add them to the optimizer, or freeze them" in said


@pytest.mark.parametrize("numbers", [dict(samples=1), dict(samples=4, microbatch=1)], ids=str)
def test_a_layer_without_an_optimizer_is_seen_one_sample_at_a_time(numbers):
    model = mlp()
    (said,) = train(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.01), **numbers)
    assert "optimizer does not have: 2.weight, 2.bias." in said


def test_a_layer_without_an_optimizer_is_an_error_where_warnings_are():
    model = mlp()
    step = sw.Step(model, torch.optim.SGD(model[0].parameters(), lr=0.01), squares)
    with pytest.raises(sw.TrainingWarning, match="optimizer does not have"):  # as pyproject.toml says
        step.run(batches())


@transforms
def test_frozen_parameters_are_not_complained_of(transforms):
    model = mlp()
    model[0].requires_grad_(False)
    model.idle = nn.Linear(2, 2).requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    assert (
        train(model, lambda model, batch: squares(model[:3], batch), optimizer=optimizer, transforms=transforms) == []
    )


def test_parameters_frozen_after_the_optimizer_was_made_are_not_complained_of():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model[0].requires_grad_(False)
    assert train(model, optimizer=optimizer) == []


@transforms
@pytest.mark.parametrize("numbers", [{}, dict(samples=8, microbatch=3)], ids=str)
def test_an_optimizer_made_from_another_model(transforms, numbers):
    model, other = mlp(), mlp()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
    refuses(sw.SamplewiseError, r"must (reach|depend on)", model, optimizer=optimizer, transforms=transforms, **numbers)


# ------------------------------------------------------------- losses that are not one per sample


def under_no_grad(model, batch):
    with torch.no_grad():
        return squares(model, batch)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda model, batch: squares(model, batch).mean(), r"1-D.*found shape \(\)\. Use reduction='none'"),
        (lambda model, batch: squares(model, batch).sum(), r"1-D.*found shape \(\)\. Use reduction='none'"),
        (lambda model, batch: squares(model, batch).mean().item(), "one value per sample; found float"),
        (lambda model, batch: (model(batch[0]) - batch[1]).square(), r"1-D.*found shape \(8, 8\)"),
        (lambda model, batch: (model(batch[0]) - batch[1][:, None]).square(), r"1-D.*found shape \(8, 1\)"),
        (under_no_grad, r"attached.*outside torch\.no_grad\(\)"),
        (lambda model, batch: squares(model, batch).detach(), r"attached.*without \.detach\(\)"),
        (lambda model, batch: squares(model, batch)[:0], "at least one sample"),
        (
            lambda model, batch: (squares(model, batch), 3),
            r"counts must be a tensor like the losses, \(8,\).*found int",
        ),
        (lambda model, batch: (squares(model, batch).mean(), torch.ones(8)), r"found shape \(\)"),
    ],
    ids="mean sum item table column no_grad detached empty counts mean-with-counts".split(),
)
@transforms
@pytest.mark.parametrize("recheck", [None, False])
def test_losses_that_are_not_one_per_sample(loss_fn, message, transforms, recheck):
    refuses(sw.LossesError, message, mlp(), loss_fn, transforms=transforms, recheck=recheck)


def test_fewer_losses_than_samples_in_a_window_that_is_cut():
    message = "one loss per sample if batches are cut; found 2 losses for 4 samples"
    refuses(sw.LossesError, message, mlp(), lambda model, batch: squares(model, batch)[::2], microbatch=4)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(1),
        lambda model, batch: (batch[1] - model(batch[0])).abs().mean(0),
        lambda model, batch: torch.sub(model(batch[0]), other=batch[1]).square().sum(1),
    ],
    ids=["difference", "the other way round", "by keyword"],
)
@transforms
def test_predictions_in_a_column_against_targets_in_a_row(loss_fn, transforms):
    message = r"tensors of shapes \(8, 1\) and \(8,\) broadcast to \(8, 8\).*squeeze\(1\)"
    refuses(sw.LossesError, message, mlp(), loss_fn, transforms=transforms)


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
def test_predictions_in_a_column_against_targets_in_a_row_in_torchs_own_loss():
    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1)

    refuses(sw.LossesError, r"In mse_loss, tensors of shapes \(8, 1\)", mlp(), loss_fn)


@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.L1Loss(), nn.BCEWithLogitsLoss(), nn.HuberLoss()])
def test_unequal_shapes_in_a_criterion(criterion):
    message = rf"{type(criterion).__name__} needs a target of shape \(8, 1\) .*found \(8,\)\. Use squeeze"
    refuses(sw.LossesError, message, mlp(), criterion)


# ------------------------------------------------------------- batch norm


@pytest.mark.parametrize("numbers", [dict(samples=1), dict(samples=8, microbatch=7)], ids=str)
def test_batch_norm_with_microbatches_of_one(numbers):
    (said,) = train(cnn(nn.BatchNorm2d(4)), data=batches(8, 3, 5, 5), **numbers)
    assert "BatchNorm in training mode gets microbatches of one sample: 1." in said
    assert "GroupNorm" in said


def test_batch_norm_without_a_picture_and_one_sample_is_torchs_own_error():
    refuses(ValueError, "more than 1 value per channel", mlp(nn.BatchNorm1d(8)), microbatch=1)


@pytest.mark.parametrize("numbers", [dict(samples=8, microbatch=4), dict(microbatch=3), dict(samples=12)], ids=str)
def test_batch_norm_with_a_window_in_pieces(numbers):
    (said,) = train(mlp(nn.BatchNorm1d(8)), data=batches(updates=9), **numbers)
    assert "BatchNorm in training mode gets a window in" in said
    assert "microbatches: 1." in said
    assert "depend on the microbatch size" in said


def test_batch_norm_in_a_loss_module_is_seen_too():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(1, affine=False)

        def forward(self, model, batch):
            return (self.norm(model(batch[0])).squeeze(1) - batch[1]).square()

    (said,) = train(mlp(), Normed(), microbatch=4)
    assert "microbatches: norm." in said


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.Identity()], ids=lambda n: type(n).__name__
)
@transforms
def test_other_norms_may_be_cut(norm, transforms):
    assert train(cnn(norm), data=batches(8, 3, 5, 5), samples=8, microbatch=3, transforms=transforms) == []


def test_batch_norm_over_a_whole_window_is_fine():
    assert train(mlp(nn.BatchNorm1d(8))) == []
    assert train(mlp(nn.BatchNorm1d(8)), samples=8) == []


@pytest.mark.parametrize(
    "chain",
    [
        CLIP,
        [sw.weight(lambda norms: 1 / (1 + norms))],
        [sw.drop(largest=1)],
        [sw.normalize("mean")],
        [sw.weight(torch.ones(8)), sw.clip(1.0)],
        [sw.group(lambda batch: [int(v > 0) for v in batch[1]]), sw.clip(1.0)],
    ],
    ids=str,
)
@pytest.mark.parametrize("microbatch", [None, 4])
def test_batch_norm_with_transforms_is_refused(chain, microbatch):
    model = mlp(nn.BatchNorm1d(8))
    refuses(sw.SamplesInteractError, "BatchNorm.* in training mode", model, transforms=chain, microbatch=microbatch)


BY_LOSS = {
    "weight": [sw.weight(lambda losses: torch.exp(-losses))],
    "weights": [sw.weight(torch.linspace(0.5, 1.5, 8))],
    "drop": [sw.drop(largest=1, score="losses")],
}
by_loss = pytest.mark.parametrize("chain", BY_LOSS.values(), ids=BY_LOSS)


@by_loss
def test_batch_norm_goes_with_weights_that_know_nothing_of_gradients(chain):
    """They weigh losses, as one may without per-sample gradients."""
    assert train(mlp(nn.BatchNorm1d(8)), transforms=chain) == []
    (said,) = train(mlp(nn.BatchNorm1d(8)), transforms=chain, microbatch=4)
    assert "BatchNorm in training mode gets a window in 2 microbatches: 1." in said


def test_batch_norm_in_eval_mode_goes_with_transforms():
    model = mlp(nn.BatchNorm1d(8))
    model[1].eval()
    assert train(model, transforms=CLIP, microbatch=3, samples=8) == []


# ------------------------------------------------------------- samples that depend on each other


def contrast(model, batch):
    x, _ = batch
    h = F.normalize(model[:2](x), dim=1)
    return F.cross_entropy(h @ F.normalize(model[:2](x + 0.1), dim=1).T / 0.2, torch.arange(len(x)), reduction="none")


def encoder():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh())


def test_negatives_within_the_batch_are_allowed_with_a_word():
    (said,) = train(encoder(), contrast)
    assert said.startswith("samples depend on each other: sample ")
    assert "depends on how its window is cut" in said


@by_loss
@pytest.mark.parametrize("microbatch", [None, 4])
def test_negatives_within_the_batch_go_with_weights_that_know_nothing_of_gradients(chain, microbatch):
    (said,) = train(encoder(), contrast, transforms=chain, microbatch=microbatch)
    assert said.startswith("samples depend on each other: sample ")


@pytest.mark.parametrize("chain", [CLIP, [sw.drop(largest=1)], [sw.normalize("mean")]], ids=str)
@pytest.mark.parametrize("microbatch", [None, 4])
@pytest.mark.parametrize("recheck", [None, False])
def test_negatives_within_the_batch_are_refused_with_transforms(chain, microbatch, recheck):
    options = dict(transforms=chain, microbatch=microbatch, recheck=recheck)
    refuses(sw.SamplesInteractError, "must not depend on", encoder(), contrast, **options)


# ------------------------------------------------------------- weights that are all zero


@pytest.mark.parametrize(
    "chain",
    [
        [sw.weight(lambda losses: 0 * losses)],
        [sw.weight(torch.zeros(8))],
        [sw.weight(lambda losses: 0 * losses, renormalize=True)],
        [sw.clip(1.0), sw.weight(torch.zeros(8))],
        [sw.drop(largest=8)],
        [sw.clip(0.0, by="parameter")],
        [sw.group(lambda batch: [0] * len(batch[1])), sw.clip(0.0)],
    ],
    ids=str,
)
@pytest.mark.parametrize("microbatch", [None, 3])
def test_weights_that_are_all_zero(chain, microbatch):
    message = refuses(
        sw.TransformError, "at least one sample .* nonzero weight", mlp(), transforms=chain, microbatch=microbatch
    )
    assert "found none with chain(" in message


def test_weights_of_which_some_are_zero():
    assert train(mlp(), transforms=[sw.weight(torch.tensor([0.0] * 7 + [1.0]))], samples=8, microbatch=3) == []


# ------------------------------------------------------------- windows


def test_no_window_is_short_but_the_last_and_none_is_forgotten():
    """`if i % 3 == 0: optimizer.step()` steps after the first batch, and never after the last ones."""
    model = mlp()
    step = sw.Step(model, sw.sgd(0.01), squares, samples=24)
    assert [update.samples for update in step.over(batches(updates=10))] == [24, 24, 24, 8]


def test_gradients_left_over_from_before_are_not_counted_in():
    model, data = mlp(), batches(updates=1)
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    squares(model, data[0]).mean().backward()
    for each in (model, twin):
        sw.Step(each, sw.sgd(0.01), squares).run(data)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


# ------------------------------------------------------------- once


DRIVERS = {
    "run": lambda step, data: step.run(data),
    "one epoch after the other": lambda step, data: [step.run([batch]) for batch in data],
    "by hand": lambda step, data: [step(batch) for batch in data],
    "accumulate and apply": lambda step, data: [(step.accumulate(batch), step.apply()) for batch in data],
}


@pytest.mark.parametrize("drive", DRIVERS.values(), ids=DRIVERS)
def test_everything_at_once_is_said_once(drive):
    model = nn.ModuleDict({"body": mlp(nn.BatchNorm1d(8)), "idle": nn.Linear(2, 2), "still": nn.Dropout().eval()})
    trained = [p for name, p in model.named_parameters() if name != "body.3.bias"]

    def loss_fn(model, batch):
        losses = squares(model["body"], batch)
        return losses + losses.mean()

    step = sw.Step(model, torch.optim.SGD(trained, lr=0.01), loss_fn, microbatch=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drive(step, batches(updates=4))
    said = sorted(str(warning.message).split(":")[0] for warning in caught)
    assert said == [
        "BatchNorm in training mode gets a window in 2 microbatches",
        "modules are in eval mode while training",
        "samples depend on each other",
        "the loss reaches parameters that the optimizer does not have",
        "the optimizer has parameters that the loss does not reach",
    ]
    assert all(warning.category is sw.TrainingWarning for warning in caught)


@transforms
def test_a_first_update_that_is_skipped_does_not_hide_mistakes(transforms):
    model = mlp()
    model.idle = nn.Linear(2, 2)
    data = batches(updates=4)
    data[0][1][2] = torch.nan
    (said,) = train(
        model, lambda m, batch: squares(m[:3], batch), data, transforms=transforms, on_nonfinite="skip", recheck=False
    )
    assert "does not reach: idle.weight" in said


# ------------------------------------------------------------- nothing to say


def words(*shape):
    return [torch.randint(3, 23, shape or (8, 6)) for _ in range(3)]


def next_words(model, ids):
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def classes(model, inputs):
    return F.cross_entropy(model(inputs).logits, inputs.flatten(1)[:, 0].long() % 3, reduction="none")


def translations(model, ids):
    logits = model(input_ids=ids, decoder_input_ids=ids.flip(1)).logits
    return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1)


def zoo(name, samples):
    case = CASES[name]
    model, inputs = case.build(samples)
    return model, lambda model, batch: case.losses(model, batch), [inputs] * 3


def hugging_face(kind, config, loss_fn, data):
    return kind(config), loss_fn, data


TEXT = dict(
    vocab_size=23,
    hidden_size=12,
    intermediate_size=10,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
)
SQUARE = 6  # tokens, and samples
HEALTHY = {
    "mlp": lambda: (mlp(), squares, None),
    "dropout": lambda: (mlp(nn.Dropout(0.5)), squares, None),
    "group norm": lambda: (cnn(nn.GroupNorm(2, 4)), squares, batches(8, 3, 5, 5)),
    "criterion": lambda: (mlp(), nn.MSELoss(), [(x, y[:, None]) for x, y in batches()]),
    "one class": lambda: (mlp(), nn.BCEWithLogitsLoss(), [(x, y[:, None].sigmoid()) for x, y in batches()]),
    "encoder layer with as many tokens as samples": lambda: (
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        squares,
        batches(SQUARE, SQUARE, SQUARE),
    ),
    "encoder layer, time first": lambda: (
        nn.TransformerEncoderLayer(6, 2, 8),
        lambda model, batch: (model(batch[0].transpose(0, 1)).mean((0, 2)) - batch[1]).square(),
        batches(SQUARE, SQUARE, 6),
    ),
    "lstm with dropout": lambda: (
        nn.ModuleList([nn.LSTM(6, 4, num_layers=2, dropout=0.3, batch_first=True)]),
        lambda model, batch: squares(lambda x: model[0](x)[0], batch),
        batches(8, 5, 6),
    ),
    "added to a batch equal to tokens": lambda: zoo("added_to_batch_equal_to_tokens", 7),
    "relative positions, as many tokens as samples": lambda: zoo("relative_position_table", 7),
    "slopes per head, as many tokens as samples": lambda: zoo("learned_slopes_per_head", 7),
    "experts": lambda: zoo("experts_chosen_per_token", 7),
    "experts by sorting": lambda: zoo("experts_chosen_two_per_token_by_sorting", 7),
    "tied": lambda: zoo("causal_language_model_with_tied_head", 7),
    "lora": lambda: zoo("frozen_base_with_lora", 7),
    "bert with dropout": lambda: hugging_face(
        transformers.BertForSequenceClassification, transformers.BertConfig(**TEXT, num_labels=3), classes, words()
    ),
    "gpt2 with dropout, as many tokens as samples": lambda: hugging_face(
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(vocab_size=23, n_embd=12, n_layer=2, n_head=2, n_positions=16),
        next_words,
        words(SQUARE, SQUARE),
    ),
    "mixtral": lambda: hugging_face(
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig(
            **TEXT | {"intermediate_size": 16}, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2
        ),
        next_words,
        words(),
    ),
    "vit": lambda: hugging_face(
        transformers.ViTForImageClassification,
        transformers.ViTConfig(
            image_size=8,
            patch_size=4,
            hidden_size=12,
            intermediate_size=10,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_labels=3,
        ),
        classes,
        [x for x, _ in batches(8, 3, 8, 8)],
    ),
    "t5, as many tokens as samples": lambda: hugging_face(
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(vocab_size=23, d_model=12, d_kv=6, d_ff=10, num_layers=2, num_heads=2),
        translations,
        words(SQUARE, SQUARE),
    ),
}


@pytest.mark.sweep(1 / 16)
@pytest.mark.parametrize(("name", "clips"), [*itertools.product(HEALTHY, [False, True])])
@pytest.mark.parametrize("numbers", [dict(recheck=1), dict(microbatch=3)], ids=str)
def test_correct_programs_get_no_message(name, clips, numbers):
    model, loss_fn, data = HEALTHY[name]()
    assert train(model, loss_fn, data, transforms=CLIP if clips else (), **numbers) == []


@pytest.mark.parametrize(
    ("loss_fn", "transforms", "error"),
    [
        (lambda m, b: (m(b[0]) - b[1].flatten()).square().mean(1), [], sw.LossesError),
        (squares, [lambda losses: 0 * losses], sw.TransformError),
        (lambda m, b: squares(copy.deepcopy(m), b), [], sw.ParameterError),
    ],
    ids=["broadcast", "weights of zero", "another model"],
)
def test_an_error_is_told_again_to_who_tries_again(loss_fn, transforms, error):
    model = mlp()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn, transforms=transforms)
    for _ in range(3):
        with pytest.raises(error):
            step.run(batches(updates=1))


def test_a_frozen_part_in_eval_mode_is_no_mistake():
    model = mlp()
    model[0].requires_grad_(False).eval()
    assert train(model) == []


def test_a_loss_of_every_prediction_against_every_target():
    message = r"found shape \(8, 8\)\. A prediction \(B, 1\) against a target \(B,\) gives \(B, B\): use squeeze\(1\)"
    refuses(sw.LossesError, message, mlp(), lambda m, b: (m(b[0]) - b[1].flatten()).square())


# ------------------------------------------------------------- weights that depend on the cut


def mean_weight(losses):
    return losses / losses.mean()


def ranked(norms):
    return 1 + norms.argsort().argsort() / len(norms)


def by_place(batch):
    return torch.arange(len(batch[0])) + 1.0


CUT = "gives a sample another weight if it is called with half of the samples.*sw.weight(..., window=True)"


@pytest.mark.parametrize("function", [mean_weight, ranked, by_place])
@pytest.mark.parametrize("microbatch", [None, 3])
def test_a_weight_that_depends_on_the_other_samples(function, microbatch):
    (word,) = train(mlp(), transforms=[sw.weight(function)], microbatch=microbatch)
    assert word.startswith(f"weight({function.__name__}) gives a sample another weight if it is called with half")
    assert "sw.weight(..., window=True)" in word


@pytest.mark.parametrize("function", [mean_weight, ranked])
def test_also_in_microbatches_of_one_sample(function):
    (word,) = train(mlp(), transforms=[sw.clip(3.0), sw.weight(function)], samples=8, microbatch=1)
    assert "gives a sample another weight" in word


def test_also_for_groups():
    group = sw.group(lambda batch: (batch[1] > 0).long())
    (word,) = train(mlp(), transforms=[group, sw.weight(mean_weight)], samples=8, microbatch=4)
    assert "gives a sample another weight" in word


def inverse(norms):
    return 1 / (1 + norms)


def random_half(losses):
    return (torch.rand(len(losses)) > 0.5) + 0.5


@pytest.mark.parametrize(
    "transforms",
    [
        [sw.weight(mean_weight, window=True)],
        [sw.weight(inverse), sw.clip(1.0)],
        [sw.weight(random_half)],
        [sw.weight(lambda batch: batch[1].abs() + 1)],
        [sw.drop(largest=1), sw.weight(inverse)],
        [sw.weight(torch.arange(8) + 1.0)],
    ],
    ids=str,
)
def test_weights_of_each_sample_are_not_warned_about(transforms):
    assert train(mlp(), transforms=transforms, samples=8, microbatch=4) == []


class MovingMean:
    """Losses relative to a mean over calls: a state that additional calls would change."""

    def __init__(self):
        self.mean = 1.0
        self.calls = []

    def __call__(self, losses):
        self.mean = 0.9 * self.mean + 0.1 * losses.mean().item()
        self.calls.append(len(losses))
        return losses / self.mean


def in_a_closure():
    mean = torch.ones(())
    seen = [0]

    def weigh(losses):
        mean.mul_(0.9).add_(0.1 * losses.mean())
        seen[0] += 1
        return losses / (mean * seen[0])

    return weigh


def in_a_dict():
    state = {"mean": torch.ones(()), "history": [torch.zeros(())]}

    def weigh(losses):
        state["mean"].mul_(0.9).add_(0.1 * losses.mean())
        state["history"][0] += 1
        return losses / (state["mean"] * state["history"][0])

    return weigh


def in_a_module():
    norm = nn.BatchNorm1d(1)

    def weigh(losses):
        norm(losses[:, None])
        return losses / (norm.running_mean * norm.num_batches_tracked)

    return weigh


@pytest.mark.parametrize("make", [MovingMean, in_a_closure, in_a_dict, in_a_module])
@pytest.mark.parametrize("window", [False, True])
def test_the_check_restores_the_state_of_the_function(make, window):
    """A weight function with a memory gives the updates of a loop that calls it once per update."""
    torch.manual_seed(0)
    ours = mlp()
    theirs = copy.deepcopy(ours)
    data = batches()
    train(ours, transforms=[sw.weight(make(), window=window)], data=data)
    weigh = make()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    for batch in data:
        losses = squares(theirs, batch)
        optimizer.zero_grad()
        (weigh(losses.detach()) * losses).mean().backward()
        optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_the_check_leaves_the_random_numbers_as_they_were():
    def drawn(weigh):
        torch.manual_seed(1)
        train(mlp(), transforms=[sw.weight(weigh)], data=batches(updates=3))
        return torch.rand(3)

    assert torch.equal(drawn(lambda losses: 1 + losses), drawn(lambda losses: (1 + losses).clone()))
    torch.manual_seed(1)
    model, data = mlp(), batches(updates=3)
    step = sw.Step(model, sw.sgd(0.01), squares, transforms=[sw.weight(random_half)], recheck=False)
    torch.manual_seed(2)
    found = [update.weights for update in step.over(data)]
    torch.manual_seed(2)
    for weights in found:
        assert torch.equal(weights, random_half(weights))


def test_the_check_keeps_two_microbatches_of_a_long_window():
    step = sw.Step(mlp(), sw.sgd(0.01), squares, samples=8, microbatch=1, transforms=[sw.weight(inverse)])
    (x, y), *_ = batches()
    step.accumulate((x, y))
    assert len(step._windows._accumulator.first_stats) == 2
    step.apply()
    assert step._windows._accumulator.first_stats is None


# ------------------------------------------------------------- weights that are all small


def autoencoder():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 60))


def summed(model, batch):
    x, _ = batch
    return (model(x) - 10).square().sum(1), torch.full((len(x),), 60.0)


def test_every_weight_is_small():
    (word,) = train(mlp(), lambda model, batch: (model(batch[0]).squeeze(1) + 100).square(), transforms=CLIP)
    assert word.startswith("every weight of the first update is below 0.1, with chain(clip(1.0)); the largest is 0.0")
    assert "and the median norm of the samples' gradients is " in word
    assert word.endswith(". Use larger bounds or weights, unless this is intended.")


def test_every_weight_is_small_because_losses_are_sums():
    (word,) = train(autoencoder(), summed, transforms=[sw.clip(1.0)])
    remedy = "The loss of a sample is a sum over 60 counts on average: sw.clip(C, per_count=True) bounds the gradient"
    assert remedy in word
    assert train(autoencoder(), summed, transforms=[sw.clip(5.0, per_count=True)]) == []
    (word,) = train(autoencoder(), summed, transforms=[sw.clip(1e-3, per_count=True)])
    assert "every weight" in word
    assert "counts on average" not in word


@pytest.mark.parametrize(
    "transforms",
    [
        [sw.normalize(1e-3)],
        [sw.clip(1e-3, mode="automatic")],
        [sw.clip(1e-3), sw.noise(0.0)],
        [sw.weight(lambda losses: torch.where(losses == losses.max(), 0.2, 0.01), window=True)],
    ],
    ids=str,
)
def test_small_weights_that_are_intended(transforms):
    assert train(mlp(), transforms=transforms) == []


@pytest.mark.parametrize("transforms", [[], [sw.clip(1.0)]], ids=["plain", "clip"])
def test_a_mean_in_place_of_losses_is_a_warning(transforms):
    model, x = nn.Linear(6, 3), torch.randn(8, 6)
    step = sw.Step(model, sw.sgd(0.1), lambda m, b: m(b).square().mean().unsqueeze(0), transforms=transforms)
    message = r"one loss for a batch of 8 rows, so that the batch counts as one sample\. .* reduction='none'"
    with pytest.warns(sw.TrainingWarning, match=message) as caught:
        assert [update.samples for update in step.over([x, x])] == [1, 1]
    assert len(caught) == 1  # in the first window only


def test_a_batch_of_one_row_has_one_loss():
    step = sw.Step(nn.Linear(6, 3), sw.sgd(0.1), lambda m, b: m(b).square().sum(1))
    assert [update.samples for update in step.over([torch.randn(1, 6)])] == [1]


def test_a_recurrent_layer_without_batch_first_is_a_possible_cause():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(3, 4)

        def forward(self, x):
            return self.rnn(x)[0][:, -1]

    torch.manual_seed(0)
    step = sw.Step(Last(), sw.sgd(0.1), lambda m, b: m(b).square().sum(1), transforms=[sw.clip(1.0)])
    with pytest.raises(sw.SamplesInteractError, match="recurrent or attention layers without batch_first=True"):
        step.run([torch.randn(8, 5, 3)])
