"""`samplewise.integrations.huggingface.PerSample` against the Trainer, and against one backward pass per sample."""

import gc

import pytest
import torch
import torch.nn.functional as F
from huggingface_models import (
    CHECKPOINTING,
    CLASSES,
    TASKS,
    PerSampleTrainer,
    arguments,
    bert,
    classes,
    collated,
    llama,
    one_at_a_time,
    recorded,
    texts,
    train,
    vector,
    windows_of,
)
from torch import nn
from transformers import Trainer, TrainerCallback

import samplewise as sw
from samplewise.errors import BatchError, GraphError, LedgerError, LossesError, TransformError

SIZES = [(8, 1), (2, 4), (3, 2), (1, 8)]  # batch size, accumulated batches
RAGGED = 5  # samples: one update with each of the sizes, of batches of 5, of 2, 2 and 1, of 3 and 2, and of 1


@pytest.fixture(autouse=True, scope="module")
def _few_objects():
    """Accelerate collects garbage at the start of each training, which takes 0.5 s with all imported modules."""
    gc.freeze()
    yield
    gc.unfreeze()


def shifted_tokens(sample):
    return int((sample["labels"][1:] != -100).sum())


def labeled_tokens(sample):
    return int((sample["labels"] != -100).sum())


# --- log of the Trainer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", ["indexed", "strings"])
def test_norms_are_logged(tmp_path, ids):
    """Those of the updates since the last line of the log, beside the values of the Trainer, which stay the same."""
    data = [{**sample, "name": f"s{k}"} for k, sample in enumerate(classes(12))]
    settings = {"options": {"logging_strategy": "steps", "logging_steps": 2}}
    plain = train(bert(), classes(12), tmp_path / "plain", 2, 1, Trainer, **settings)
    ledger = sw.Ledger() if ids == "indexed" else sw.Ledger(id="name")
    recorded = sw.Indexed(classes(12)) if ids == "indexed" else data
    ours = train(bert(), recorded, tmp_path / "ours", 2, 1, ledger=ledger, transforms=[sw.clip(1e6)], **settings)
    table = sw.read_ledger(tmp_path / "ours").to_pydict()
    lines = [line for line in ours.state.log_history if "loss" in line]
    expected = [line for line in plain.state.log_history if "loss" in line]
    assert len(lines) == len(expected) == 3
    for k, (line, other) in enumerate(zip(lines, expected, strict=True)):
        assert {name: line[name] for name in other} == pytest.approx(other, rel=1e-3)
        norms = torch.tensor(table["norm"][4 * k : 4 * k + 4], dtype=torch.float64)
        assert line["samplewise/norm_median"] == pytest.approx(norms.quantile(0.5).item(), rel=1e-6)
        assert line["samplewise/norm_p95"] == pytest.approx(norms.quantile(0.95).item(), rel=1e-6)
        assert line["samplewise/clipped"] == 0
        assert line["samplewise/largest_id"] == table["id"][4 * k + int(norms.argmax())]


def test_logging_leaves_training_bit_identical(tmp_path):
    settings = {"options": {"logging_strategy": "steps", "logging_steps": 1}}
    plain = train(bert(dropout=0.2), classes(12), tmp_path / "plain", 4, 1, Trainer, **settings)
    ours = recorded(bert(dropout=0.2), classes(12), tmp_path / "ours", 4, 1, **settings)
    assert torch.equal(vector(ours.model), vector(plain.model))
    for line, other in zip(ours.state.log_history[:-1], plain.state.log_history[:-1], strict=True):
        assert {name: line[name] for name in other} == other
        assert "samplewise/norm_median" in line and "samplewise/clipped" not in line


# --- the same training as without the mixin -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "data", "accumulate"),
    [
        (lambda: bert(dropout=0.2), classes, 1),
        (lambda: llama(attention_dropout=0.2), texts, 1),
        (lambda: llama(attention_dropout=0.2), texts, 2),
    ],
    ids=["bert", "llama", "llama accumulating"],
)
def test_recording_leaves_training_bit_identical(made, data, accumulate, tmp_path):
    plain = train(made(), data(12), tmp_path / "plain", 4, accumulate, Trainer)
    ours = recorded(made(), data(12), tmp_path / "ours", 4, accumulate)
    assert torch.equal(vector(plain.model), vector(ours.model))
    assert not torch.equal(vector(plain.model), vector(made()))
    assert sorted(sw.read_ledger(tmp_path / "ours")["id"].to_pylist()) == list(range(12))


# --- accumulation ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("task", ["bert", "llama", *(pytest.param(t, marks=pytest.mark.slow) for t in TASKS)])
def test_accumulation_does_not_change_the_update(task, clipped, tmp_path):
    """Batches of different sizes give the update of all their samples in one batch."""
    made, data = TASKS[task]
    transforms = [sw.clip(0.3)] if clipped else []
    ends = []
    ledgers = []
    for batch, accumulate in SIZES:
        directory = tmp_path / str(batch)
        ends.append(vector(recorded(made(), data(RAGGED), directory, batch, accumulate, transforms=transforms).model))
        ledgers.append(sw.read_ledger(directory).sort_by("id"))
    plain = train(made(), data(RAGGED), tmp_path / "plain", 8, 1, Trainer)
    start = vector(made())
    update = ends[0] - start
    if not clipped:
        torch.testing.assert_close(ends[0], vector(plain.model), rtol=0, atol=0)
    for end, ledger in zip(ends[1:], ledgers[1:], strict=True):
        assert (end - ends[0]).norm() <= 1e-5 * update.norm()
        for name in ("loss", "norm", "weight"):
            found, first = (torch.tensor(table[name].to_pylist()) for table in (ledger, ledgers[0]))
            torch.testing.assert_close(found, first, rtol=1e-5, atol=1e-6)
        assert ledger["update"].to_pylist() == [0] * RAGGED
    assert (torch.tensor(ledgers[0]["weight"].to_pylist()) < 1).any() == clipped


def test_a_head_that_ignores_the_number_of_items_is_named_once(tmp_path, caplog):
    trainer = train(bert(), classes(8), tmp_path, 2, 2)
    train(llama(), texts(8), tmp_path, 2, 2)
    messages = [record.message for record in caplog.records if record.name == "samplewise"]
    assert len(messages) == trainer.model_accepts_loss_kwargs  # False in transformers 4
    for message in messages:
        assert "The loss of BertForSequenceClassification does not depend on num_items_in_batch" in message


def test_the_comparison_of_losses_changes_no_random_numbers_and_no_buffers(tmp_path):
    """The first step of an accumulating training computes the loss twice more."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, CLASSES))

        def forward(self, x, labels, **kwargs):
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    data = [{"x": x, "labels": i % CLASSES} for i, x in enumerate(torch.randn(8, 4))]
    divided = Model()
    divided.accepts_loss_kwargs = False
    plain = train(divided, data, tmp_path / "plain", 2, 2, Trainer)
    ours = train(Model(), data, tmp_path / "ours", 2, 2)
    assert torch.equal(vector(plain.model), vector(ours.model))
    assert torch.equal(plain.model.net[1].running_mean, ours.model.net[1].running_mean)


# --- clipping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_a_clipped_run_equals_one_backward_pass_per_sample(dtype, tolerance, tmp_path):
    data = classes(11)
    trainer = recorded(bert().to(dtype), data, tmp_path, 2, 2, transforms=[sw.clip(0.7)])
    ledger = sw.read_ledger(tmp_path)
    by_hand = bert().to(dtype)
    norms = torch.tensor(one_at_a_time(by_hand, windows_of(ledger, data), 0.7))
    total = (vector(by_hand) - vector(bert().to(dtype))).norm()
    assert (vector(trainer.model) - vector(by_hand)).norm() <= tolerance * total
    torch.testing.assert_close(torch.tensor(ledger["norm"].to_pylist()), norms, rtol=1e-5, atol=1e-6)
    weights = torch.tensor(ledger["weight"].to_pylist())
    torch.testing.assert_close(weights, (0.7 / norms).clamp(max=1), rtol=1e-5, atol=1e-6)
    assert 0 < (weights < 1).sum() <= 11


@pytest.mark.parametrize("options", [{}, CHECKPOINTING], ids=["plain", "checkpointing"])
def test_a_clipped_language_model_counts_tokens(options, tmp_path):
    data = texts(7)
    trainer = recorded(llama(), data, tmp_path, 2, 2, transforms=[sw.clip(3.0)], options=options)
    ledger = sw.read_ledger(tmp_path)
    by_hand = llama()
    # The Trainer of transformers 4 divides by all labels, also by the first one of a text, which is not predicted.
    divided = shifted_tokens if hasattr(trainer, "_loss_shifts_labels") else labeled_tokens
    windows = windows_of(ledger, data)
    norms = torch.tensor(one_at_a_time(by_hand, windows, 3.0, counted=shifted_tokens, divided=divided))
    total = (vector(by_hand) - vector(llama())).norm()
    assert (vector(trainer.model) - vector(by_hand)).norm() <= 3e-6 * total
    torch.testing.assert_close(torch.tensor(ledger["norm"].to_pylist()), norms, rtol=1e-4, atol=1e-5)
    assert ledger["count"].to_pylist() == [shifted_tokens(data[i]) for i in ledger["id"].to_pylist()]


@pytest.mark.parametrize("ledger", [False, True])
def test_transforms_get_token_counts(ledger, tmp_path):
    seen = []

    def noted(counts):
        seen.append(counts.tolist())
        return torch.ones(len(counts))

    data = texts(4)
    extra = {"ledger": sw.Ledger()} if ledger else {}
    train(llama(), sw.Indexed(data), tmp_path, 4, transforms=[sw.weight(noted)], **extra)
    assert sorted(seen[0]) == sorted(map(shifted_tokens, data))


def test_sequences_as_long_as_the_batch(tmp_path):
    data = classes(8, length=8)
    trainer = recorded(bert(), data, tmp_path, 8, transforms=[sw.clip(0.7)])
    by_hand = bert()
    one_at_a_time(by_hand, windows_of(sw.read_ledger(tmp_path), data), 0.7)
    torch.testing.assert_close(vector(trainer.model), vector(by_hand), rtol=0, atol=1e-6)


def test_mixed_precision_is_close(tmp_path):
    wide = recorded(llama(), texts(8), tmp_path / "wide", 4, transforms=[sw.clip(2.0)])
    narrow = recorded(llama(), texts(8), tmp_path / "narrow", 4, transforms=[sw.clip(2.0)], options={"bf16": True})
    total = (vector(wide.model) - vector(llama())).norm()
    assert 0 < (vector(wide.model) - vector(narrow.model)).norm() <= 0.05 * total
    norms = [torch.tensor(sw.read_ledger(tmp_path / name)["norm"].to_pylist()) for name in ("wide", "narrow")]
    torch.testing.assert_close(norms[0], norms[1], rtol=0.05, atol=0.05)


# --- the ledger -----------------------------------------------------------------------------------------------------


def test_the_ledger_holds_the_samples_own_losses(tmp_path):
    """With a learning rate of zero, the rows of both epochs are those of the untrained model."""
    data = classes(6)
    model = bert()
    recorded(model, data, tmp_path, 4, options={"learning_rate": 0.0, "num_train_epochs": 2})
    rows = sw.read_ledger(tmp_path).to_pylist()
    assert [(row["epoch"], row["update"]) for row in rows] == [(k // 6, k // 6 * 2 + k % 6 // 4) for k in range(12)]
    for row in rows:
        batch = collated([data[row["id"]]])
        out = model(**batch)
        out.loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        model.zero_grad()
        assert row["loss"] == pytest.approx(out.loss.item(), rel=1e-5)
        assert row["norm"] == pytest.approx(float(norm), rel=1e-5)
        assert row["weight"] == 1
        assert row["label"] == data[row["id"]]["labels"]
        assert row["prediction"] == int(out.logits.argmax())
        assert (row["margin"] >= 0) == (row["label"] == row["prediction"])


def test_losses_of_an_unknown_criterion_are_nan_unless_they_are_given(tmp_path):
    weight = torch.tensor([1.0, 5.0, 0.2])

    def criterion(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits, labels, weight=weight, reduction="sum") / num_items_in_batch

    class Known(PerSampleTrainer):
        def per_sample_losses(self, outputs, batch):
            known = super().per_sample_losses(outputs, batch)
            return known._replace(losses=known.losses * weight[batch["labels"]])

    options = {"compute_loss_func": criterion, "transforms": [sw.clip(1.0)]}
    recorded(bert(), classes(6), tmp_path / "unknown", 3, **options)
    recorded(bert(), classes(6), tmp_path / "known", 3, trainer=Known, **options)
    unknown, known = (sw.read_ledger(tmp_path / name) for name in ("unknown", "known"))
    assert torch.tensor(unknown["loss"].to_pylist()).isnan().all()
    assert not torch.tensor(known["loss"].to_pylist()).isnan().any()
    assert unknown["norm"].to_pylist() == known["norm"].to_pylist()
    with pytest.raises(LossesError, match="do not add up to the loss of the trainer"):
        train(bert(), classes(6), tmp_path, transforms=[sw.weight(lambda losses: losses)], compute_loss_func=criterion)


def test_label_smoothing_is_in_the_losses(tmp_path):
    data = classes(6)
    recorded(bert(), data, tmp_path, 6, options={"label_smoothing_factor": 0.2})
    ledger = sw.read_ledger(tmp_path)
    batch = collated([data[i] for i in ledger["id"].to_pylist()])
    logits = bert()(batch["input_ids"]).logits
    expected = F.cross_entropy(logits, batch["labels"], label_smoothing=0.2, reduction="none")
    torch.testing.assert_close(torch.tensor(ledger["loss"].to_pylist()), expected.detach(), rtol=1e-5, atol=1e-6)


def test_ids_and_columns_of_the_dataset(tmp_path):
    """Ids are strings of the dataset; the evaluation gets the same columns and must not pass them to the model."""
    data = [{**sample, "name": f"sample {i}", "score": i / 4} for i, sample in enumerate(classes(6))]
    ledger = sw.Ledger(tmp_path / "ledger", id="name", columns=["score"])
    trainer = train(bert(), data, tmp_path / "out", 4, ledger=ledger, eval_dataset=data[:2])
    assert trainer.evaluate()["eval_loss"] > 0
    rows = sw.read_ledger(tmp_path / "ledger").to_pylist()
    assert {row["name" if "name" in row else "id"]: row["score"] for row in rows} == {
        f"sample {i}": i / 4 for i in range(6)
    }


def test_a_dataset_without_ids(tmp_path):
    model = bert()
    with pytest.raises(BatchError, match="the batch must hold 'id'"):
        train(model, classes(4), tmp_path, ledger=sw.Ledger())
    assert torch.equal(vector(model), vector(bert()))  # before the first update


def test_without_a_ledger_ids_are_not_needed_and_not_passed_to_the_model(tmp_path):
    first = train(bert(), classes(4), tmp_path, transforms=sw.clip(0.1))
    second = train(bert(), sw.Indexed(classes(4)), tmp_path, transforms=sw.clip(0.1))
    assert torch.equal(vector(first.model), vector(second.model))


def test_a_ledger_without_norms(tmp_path):
    train(bert(), sw.Indexed(classes(4)), tmp_path, ledger=sw.Ledger(norms=False))
    rows = sw.read_ledger(tmp_path).to_pylist()
    assert all(row["norm"] != row["norm"] and row["loss"] > 0 for row in rows)


def test_suspects_and_the_report(tmp_path):
    from samplewise.report.page import write_report

    data = classes(12)
    model = bert(id2label={0: "cat", 1: "dog", 2: "owl"})
    recorded(model, data, tmp_path, 4, options={"num_train_epochs": 2})
    assert len(sw.suspects(sw.read_ledger(tmp_path)).top(3)) == 3
    page = write_report(tmp_path).read_text()
    assert "Ledger of a training loop without a log of samplewise" in page
    assert "yet" not in page.partition("<script")[0]  # nothing is announced that never comes
    assert "owl" in page


def test_a_new_training_in_the_same_directory_replaces_the_ledger(tmp_path):
    for n in (8, 6):
        recorded(bert(), classes(n), tmp_path)
    assert sw.read_ledger(tmp_path).num_rows == 6
    ledger = sw.Ledger(tmp_path)
    with pytest.raises(LedgerError, match="a new ledger must have a run directory without parts"):
        train(bert(), sw.Indexed(classes(6)), tmp_path, ledger=ledger)
    assert sw.read_ledger(tmp_path).num_rows == 6


# --- interruption ---------------------------------------------------------------------------------------------------


class Interrupt(TrainerCallback):
    """Raises an error after some updates."""

    def __init__(self, after):
        self.after = after

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("restore", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(restore, tmp_path):
    options = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    options |= {"learning_rate": 0.01, "restore_callback_states_from_checkpoint": restore}

    def trainer(name, callbacks):
        made = bert(dropout=0.2)
        args = arguments(tmp_path / name, 2, 2, **options)
        data = sw.Indexed(classes(10))
        return PerSampleTrainer(made, args, train_dataset=data, ledger=sw.Ledger(), callbacks=callbacks)

    whole = trainer("whole", [])
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        trainer("resumed", [Interrupt(5)]).train()
    assert sw.read_ledger(tmp_path / "resumed").num_rows == 14  # of four updates
    resumed = trainer("resumed", [])
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(vector(whole.model), vector(resumed.model))
    assert sw.read_ledger(tmp_path / "whole").equals(sw.read_ledger(tmp_path / "resumed"))
    assert sw.read_ledger(tmp_path / "whole").num_rows == 30


@pytest.mark.slow
def test_a_new_training_after_a_resumed_one_replaces_its_rows(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    recorded(bert(), classes(12), tmp_path, options=options)
    trainer = PerSampleTrainer(
        bert(), arguments(tmp_path, **options), train_dataset=sw.Indexed(classes(12)), ledger=sw.Ledger()
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sw.read_ledger(tmp_path).num_rows == 12
    trainer.train()
    assert sorted(sw.read_ledger(tmp_path)["id"].to_pylist()) == list(range(12))


@pytest.mark.slow
def test_a_search_of_the_batch_size_discards_batches_of_an_update_that_was_not_made(tmp_path):
    class Limited(PerSampleTrainer):
        steps = 0

        def training_step(self, model, inputs, *args):
            self.steps += 1
            if self.steps == 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *args)

    recorded(bert(), classes(12), tmp_path, 4, 2, trainer=Limited, options={"auto_find_batch_size": True})
    assert sorted(sw.read_ledger(tmp_path)["id"].to_pylist()) == list(range(12))


def test_a_search_of_the_batch_size_records_the_last_attempt_only(tmp_path):
    class Limited(PerSampleTrainer):
        def training_step(self, model, inputs, *args):
            if len(inputs["labels"]) > 2 and self.state.global_step:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *args)

    recorded(bert(), classes(12), tmp_path, 4, trainer=Limited, options={"auto_find_batch_size": True})
    ledger = sw.read_ledger(tmp_path)
    assert sorted(ledger["id"].to_pylist()) == list(range(12))
    assert max(ledger["update"].to_pylist()) == 5


# --- errors ---------------------------------------------------------------------------------------------------------


def test_a_loss_that_does_not_pass_through_the_outputs_is_refused(tmp_path):
    class Penalty(PerSampleTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            return super().compute_loss(model, inputs, **kwargs) + model.classifier.weight.square().sum()

    with pytest.raises(GraphError, match="the whole loss must pass through outputs; found that it depends on 'class"):
        train(bert(), classes(4), tmp_path, transforms=[sw.clip(1.0)], trainer=Penalty)


def test_a_model_without_outputs_per_sample_is_refused(tmp_path):
    class Total(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, x, labels):
            return {"loss": (self.linear(x)[:, 0] - labels).square().mean()}

    data = [{"x": [1.0, 2.0], "labels": 0.5}] * 4
    with pytest.raises(GraphError, match="one row for each of the 4 samples of a batch, such as logits; found none"):
        train(Total(), data, tmp_path, transforms=[sw.clip(1.0)])


def test_a_training_step_without_a_backward_pass_is_refused(tmp_path):
    class Silent(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return torch.zeros(())

    from samplewise.integrations.huggingface import PerSample

    with pytest.raises(GraphError, match=r"must call accelerator\.backward once; found 0 calls"):
        train(bert(), classes(4), tmp_path, trainer=type("Mixed", (PerSample, Silent), {}))


def test_transforms_of_a_whole_update_are_refused_before_the_training(tmp_path):
    with pytest.raises(TransformError, match=r"Use sw\.Step"):
        PerSampleTrainer(bert(), arguments(tmp_path), train_dataset=classes(4), transforms=[sw.noise(1.0)])


def test_a_ledger_of_another_type(tmp_path):
    with pytest.raises(TypeError, match=r"ledger must be a sw\.Ledger; found str"):
        PerSampleTrainer(bert(), arguments(tmp_path), train_dataset=classes(4), ledger="runs/a")


def test_max_grad_norm_is_announced_with_clipping(tmp_path, caplog):
    train(bert(), classes(4), tmp_path, transforms=[sw.clip(1.0)], options={"max_grad_norm": 1.0})
    train(bert(), classes(4), tmp_path, options={"max_grad_norm": 1.0})
    train(bert(), classes(4), tmp_path, transforms=[sw.clip(1.0)])
    messages = [record.message for record in caplog.records if record.name == "samplewise"]
    assert messages == [
        "max_grad_norm=1 of the TrainingArguments (default 1.0) also clips the sum of the gradients, after clip(1.0) "
        "of each sample. Set max_grad_norm=0 to leave that out."
    ]


def test_the_trainer_and_the_model_are_restored(tmp_path):
    trainer = recorded(bert(), classes(4), tmp_path)
    assert not trainer.model._forward_hooks
    assert trainer._outputs_hook.outputs == trainer._outputs_hook.inner == []
    assert "backward" not in vars(trainer.accelerator)
    assert trainer.data_collator is not None and "id" not in trainer._signature_columns


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_per_sample_gradients_add_up_to_the_gradient(task):
    """Without a trainer: outputs of several architectures in float64."""
    made, data = TASKS[task]
    model = made().double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in collated(data(5)).items()}
    out = model(**batch)
    expected = torch.autograd.grad(out.loss, list(model.parameters()), retain_graph=True, materialize_grads=True)
    found = sw.gradients(out.loss, model, outputs=out.logits).sum()
    for g, e in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-7, atol=1e-12)


@pytest.mark.slow
def test_the_trainer_of_sequence_to_sequence_models(tmp_path):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from samplewise.integrations.huggingface import PerSample

    kind = type("Mine", (PerSample, Seq2SeqTrainer), {})
    options = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "report_to": [], "use_cpu": True}
    options |= {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
    made, data = TASKS["t5"]
    kind(
        made(),
        Seq2SeqTrainingArguments(str(tmp_path), **options),
        train_dataset=sw.Indexed(data(6)),
        ledger=sw.Ledger(),
    ).train()
    rows = {row["id"]: row for row in sw.read_ledger(tmp_path).to_pylist()}
    assert {i: row["count"] for i, row in rows.items()} == {i: 2 + i % 5 for i in range(6)}
    assert all(row["loss"] > 0 and row["norm"] > 0 for row in rows.values())
