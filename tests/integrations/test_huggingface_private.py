"""`PerSample(privacy=...)`: updates inside the Trainer equal those by hand; what would void them is refused."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("dp_accounting")

from huggingface_models import (
    TASKS,
    PerSampleTrainer,
    arguments,
    bert,
    classes,
    collated,
    llama,
    texts,
    vector,
)
from peft import LoraConfig, get_peft_model
from transformers import BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, TrainerCallback

import samplewise as sw
from samplewise.errors import LossesError, PrivacyError
from samplewise.privacy import private_update
from samplewise.privacy.private_update import PrivateUpdate
from samplewise.privacy.rng import stream
from samplewise.privacy.sampling import PoissonSampler
from samplewise.step.apply import UpdateApplier

SAMPLES = 12
UPDATES = 5
LR = 0.5
NOT_LOGGED = "The training loss and the size of the batches are not logged"


def plan(**options):
    settings = {"noise_multiplier": 0.5, "delta": 1e-3, "updates": UPDATES, "sample_rate": 0.3, "clip": 0.2}
    return sw.Privacy(**{**settings, "accountant": "rdp", "seed": 3, **options})


def lora():
    """Llama with adapters of which both matrices have values."""
    return adapted(llama())


def adapted(model):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian"))


def private(model, data, directory, privacy=None, batch=2, trainer=PerSampleTrainer, options=None, **keywords):
    args = arguments(directory, batch, **{"learning_rate": LR, **(options or {})})
    return trainer(model, args, train_dataset=data, privacy=privacy or plan(), **keywords)


# --- by hand ---------------------------------------------------------------------------------------------------------


def order_of(trainer):
    """Names of the parameters in the order of the optimizer, in which noise is drawn."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    return [names[id(p)] for group in trainer.optimizer.param_groups for p in group["params"]]


def by_hand(model, data, privacy, order, updates=UPDATES, bound=0.2):
    """Train the model: p -= lr × (Σ clip(g) + z) / (rate × N), with one backward pass per sample."""
    named = dict(model.named_parameters())
    parameters = [named[name] for name in order]
    secret = privacy._state.secret
    for number in range(updates):
        uniform = stream(secret, "sample", 0, number, privacy.secure).uniform(len(data))
        sums = [torch.zeros_like(p) for p in parameters]
        for i in (uniform < privacy.sample_rate).nonzero().view(-1).tolist():
            loss = model(**collated([data[i]])).loss  # the mean over the labels of the sample
            row = torch.autograd.grad(loss, parameters, materialize_grads=True)
            norm = float(torch.stack([g.norm() for g in row]).norm())
            for total, g in zip(sums, row, strict=True):
                total += g * min(1.0, bound / norm)
        random = stream(secret, "noise", 0, number, privacy.secure)
        with torch.no_grad():
            for p, total in zip(parameters, sums, strict=True):
                noise = random.normal(p.shape, p.dtype) * privacy.noise_multiplier * bound
                p -= LR * (total + noise) / (privacy.sample_rate * len(data))
    return model


def assert_equals_the_loop(make, data, directory, batch=2, **options):
    privacy = plan()
    trainer = private(make(), data, directory, privacy, batch, **options)
    trainer.train()
    expected = by_hand(make(), data, privacy, order_of(trainer))
    assert (vector(trainer.model) - vector(expected)).abs().max() <= 1e-6
    return trainer


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("task", TASKS)
def test_parameters_equal_those_of_a_loop_over_samples(task, tmp_path):
    make, data = TASKS[task]
    assert_equals_the_loop(make, data(SAMPLES), tmp_path)


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_adapters_change_as_in_a_loop_over_samples(batch, tmp_path):
    """Opacus issue 820: adapters that silently are not trained."""
    trainer = assert_equals_the_loop(lora, texts(SAMPLES), tmp_path, batch)
    before = dict(lora().named_parameters())
    for name, p in trainer.model.named_parameters():
        changed = (p - before[name]).abs().max().item()
        assert changed > 1e-3 if p.requires_grad else changed == 0, name
    assert trainer.privacy.left == 0 and trainer.privacy.spent().updates == trainer.state.global_step == UPDATES


def quantized():
    """Llama with linear layers in NF4 of bitsandbytes, and adapters."""
    bnb = pytest.importorskip("bitsandbytes")
    model = llama(hidden_size=64)
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight.data
        layer.self_attn.q_proj = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
        layer.self_attn.q_proj.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    return adapted(model.to("cpu"))


def test_adapters_of_a_quantized_model(tmp_path):
    trainer = assert_equals_the_loop(quantized, texts(SAMPLES), tmp_path)
    changed = [
        p - q for p, q in zip(trainer.model.parameters(), quantized().parameters(), strict=True) if p.requires_grad
    ]
    assert len(changed) == 2 and all(change.abs().max() > 1e-3 for change in changed)


@pytest.mark.parametrize("bf16", [False, True])
def test_adapters_of_a_model_in_half_precision(bf16, tmp_path):
    """Rounding of the frozen layers, with and without padding, is not taken for interaction."""
    model = adapted(llama(hidden_size=64, num_hidden_layers=3).bfloat16())
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    options = {"bf16": bf16}
    trainer = private(model, ragged(SAMPLES), tmp_path, batch=8, options=options, data_collator=padded("right"))
    trainer.train()
    after = [p for p in trainer.model.parameters() if p.requires_grad]
    assert all((p - q).abs().max() > 1e-3 and p.dtype is torch.float32 for p, q in zip(after, before, strict=True))


def test_samples_that_are_not_finite_contribute_nothing(tmp_path):
    make, data = TASKS["vit"]
    data = data(SAMPLES)
    trained = {}
    for broken in (False, True):
        samples = [
            {**x, "pixel_values": x["pixel_values"] * (torch.nan if broken and i == 2 else 1)}
            for i, x in enumerate(data)
        ]
        trained[broken] = private(make(), samples, tmp_path / str(broken), plan(sample_rate=1.0, updates=1))
        trained[broken].train()
    assert trained[True].privacy.zeroed == 1 and trained[False].privacy.zeroed == 0
    change = (vector(trained[True].model) - vector(trained[False].model)).norm().item()
    assert 0 < change <= LR * 0.2 / SAMPLES * 1.001  # one clipped gradient


def test_labels_are_shifted_as_the_model_does(tmp_path):
    """The Trainer does not know it of GPT-2. The losses of a new model are almost the same with and without."""
    assert_equals_the_loop(positional, texts(SAMPLES), tmp_path)


def test_empty_draws_are_updates(tmp_path):
    """Each has noise, and is not told from others."""
    privacy = plan(sample_rate=1e-9, divide_by=1.0, updates=3)
    trainer = private(bert(), classes(SAMPLES), tmp_path, privacy, options={"learning_rate": 1.0})
    before = vector(trainer.model)
    trainer.train()
    assert trainer.state.global_step == 3
    expected = 0.2 * 0.5 * math.sqrt(3)  # noise of three updates
    assert (vector(trainer.model) - before).std().item() == pytest.approx(expected, rel=0.1)


def test_users_are_clipped_together(tmp_path):
    """Two users, of whom both are drawn always: the sum moves by two bounds at most."""
    privacy = plan(users=[i % 2 for i in range(SAMPLES)], sample_rate=1.0, noise_multiplier=1e-3, clip=1e-3, updates=1)
    trainer = private(bert(), classes(SAMPLES), tmp_path, privacy)
    before = vector(trainer.model)
    trainer.train()
    moved = (vector(trainer.model) - before).norm().item() / LR * 2  # divided by rate × users
    assert moved <= 2e-3 * 1.05


def test_weights_before_the_clip_read_losses_of_samples(tmp_path):
    trainer = private(bert(), classes(SAMPLES), tmp_path, transforms=[sw.weight(lambda losses: losses * 0)])
    before = vector(trainer.model)
    trainer.train()
    privacy = plan()
    expected = by_hand(bert(), classes(SAMPLES), privacy, order_of(trainer), bound=0.2)
    assert (vector(trainer.model) - vector(expected)).abs().max() > 1e-3
    assert (vector(trainer.model) - before).abs().max() > 1e-3  # noise alone


# --- the mutants of tests/privacy/test_mutants.py --------------------------------------------------------------------


def no_clip(patch):
    exact = PrivateUpdate._clip
    patch.setattr(
        PrivateUpdate, "_clip", lambda self: replace(exact(self), coefficients=lambda s: torch.ones_like(s.losses))
    )


def less_noise(patch):
    exact = PrivateUpdate._noise_std
    patch.setattr(PrivateUpdate, "_noise_std", lambda self: exact(self) / math.sqrt(2))


def actual_count(patch):
    exact = UpdateApplier.divide

    def mutant(self, window):
        divisor = self.config.policy.plan._divisor
        before = divisor.value
        divisor.value = max(1, window.samples)
        exact(self, window)
        divisor.value = before

    patch.setattr(UpdateApplier, "divide", mutant)


def shuffling(patch):
    def mutant(self, number, branch):
        size = round(self.units * self.sample_rate)
        per_pass = self.units // size
        order = torch.randperm(self.units, generator=torch.Generator().manual_seed(number // per_pass))
        return order[number % per_pass * size :][:size].sort().values

    patch.setattr(PoissonSampler, "draw_units", mutant)


def reused_noise(patch):
    patch.setattr(
        private_update, "stream", lambda secret, purpose, branch, number, secure: stream(secret, purpose, branch, 0)
    )


@pytest.mark.parametrize("mutant", [no_clip, less_noise, actual_count, shuffling, reused_noise])
def test_mutants_are_killed(mutant, tmp_path, monkeypatch):
    """Noise divided by the number of ranks: test_huggingface_processes.py."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        assert_equals_the_loop(bert, classes(SAMPLES), tmp_path)


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_nothing_of_the_samples_is_logged(tmp_path, caplog):
    trainer = private(
        llama(), texts(SAMPLES), tmp_path,
        options={"logging_strategy": "steps", "logging_steps": 1, "save_strategy": "steps", "save_steps": 2},
    )  # fmt: skip
    output = trainer.train()
    assert NOT_LOGGED in caplog.text
    assert {key for entry in trainer.state.log_history for key in entry} == {
        "grad_norm", "learning_rate", "epoch", "step", "train_runtime", "train_steps_per_second",
    }  # fmt: skip
    assert math.isnan(output.training_loss)
    assert output.metrics.keys() == {"train_runtime", "train_steps_per_second"}
    saved = json.loads((tmp_path / "checkpoint-4/trainer_state.json").read_text())
    assert saved["total_flos"] == saved["num_input_tokens_seen"] == 0
    state = saved["stateful_callbacks"]["PrivacyCallback"]["attributes"]["privacy"]
    assert state == {"update": 4, "spent": 4, "bound": 0.2, "zeroed": 0, "units": SAMPLES}
    lines = (tmp_path / "privacy.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines[1:]] == list(range(UPDATES))


def test_observe_shows_the_loss(tmp_path):
    trainer = private(
        bert(),
        classes(SAMPLES),
        tmp_path,
        plan(observe=True),
        options={"logging_strategy": "steps", "logging_steps": 1},
    )
    output = trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == UPDATES and all(0.5 < loss < 2 for loss in losses)
    assert 0.5 < output.training_loss < 2


def test_a_log_inside_of_compute_loss_is_refused(tmp_path):
    class Logging(PerSampleTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            self.log({"my loss": loss.item()})
            return loss

    with pytest.raises(PrivacyError, match=r"a call of log in compute_loss, with 'my loss'. Leave it out"):
        private(bert(), classes(SAMPLES), tmp_path, trainer=Logging).train()


def test_spending_is_recorded_before_the_update(tmp_path):
    class Failing(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            raise RuntimeError("failed")

    trainer = private(bert(), classes(SAMPLES), tmp_path, callbacks=[Failing()])
    before = vector(trainer.model)
    with pytest.raises(RuntimeError, match=r"failed"):
        trainer.train()
    assert torch.equal(vector(trainer.model), before)
    assert trainer.privacy.spent().updates == 1
    assert len((tmp_path / "privacy.jsonl").read_text().splitlines()) == 2
    with pytest.raises(PrivacyError, match=r"found update 0 after 1 updates. Pass resume_from_checkpoint=True"):
        trainer.train()


# --- resume ----------------------------------------------------------------------------------------------------------


def masked(samples):
    """Collator that draws random numbers, as for masked language models."""
    batch = collated(samples)
    batch["input_ids"] = torch.where(torch.rand(batch["input_ids"].shape) < 0.2, 0, batch["input_ids"])
    return batch


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("secure", [False, True])
def test_resume_repeats_draws_and_noise_without_spending(secure, tmp_path):
    """Dropout, a random collator, an adaptive bound, and a checkpoint in the middle of a pass."""

    def make(directory, stop=None):
        options = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2, "seed": 1}
        privacy = plan(seed=None, adaptive=0.5, secure=secure, updates=7)
        trainer = private(
            bert(dropout=0.2), classes(SAMPLES), directory, privacy, options=options, data_collator=masked,
            callbacks=[] if stop is None else [Stop(stop)],
        )  # fmt: skip
        torch.manual_seed(1)
        return trainer

    interrupted = make(tmp_path, stop=5)
    with pytest.raises(KeyboardInterrupt):
        interrupted.train()
    made = vector(interrupted.model)  # after five updates, of which the fifth is in no checkpoint
    log = (tmp_path / "privacy.jsonl").read_text()
    repeated = make(tmp_path, stop=5)
    with pytest.raises(KeyboardInterrupt):
        repeated.train(resume_from_checkpoint=True)
    assert torch.equal(vector(repeated.model), made)
    assert (tmp_path / "privacy.jsonl").read_text() == log and repeated.privacy.spent().updates == 5
    finished = make(tmp_path)
    finished.train(resume_from_checkpoint=True)
    assert finished.privacy.spent().updates == 7 and finished.privacy.left == 0
    assert finished.state.epoch == pytest.approx(7 / 3)
    assert not (tmp_path / "privacy.key").exists()


def test_another_sum_with_the_same_noise_is_refused(tmp_path, caplog):
    options = {"save_strategy": "steps", "save_steps": 2}
    plan_of_all = partial(plan, seed=None, sample_rate=0.99)  # no draw is empty
    with pytest.raises(KeyboardInterrupt):
        private(bert(), classes(SAMPLES), tmp_path, plan_of_all(), options=options, callbacks=[Stop(3)]).train()
    changed = [{**sample, "labels": 0} for sample in classes(SAMPLES)]
    trainer = private(bert(), changed, tmp_path, plan_of_all(), options=options)
    with pytest.raises(PrivacyError, match=r"update 2 must be repeated exactly, because its noise was used before"):
        trainer.train(resume_from_checkpoint=True)
    resumed = private(bert(), changed, tmp_path, plan_of_all(), options=options)
    resumed.train(resume_from_checkpoint=True)  # updates 2 and 3 with new noise are all that is paid for
    assert (resumed.state.global_step, resumed.privacy.spent().updates, resumed.privacy.left) == (4, UPDATES, 0)
    assert "The training ends here" in caplog.text


def test_a_checkpoint_without_privacy_is_not_continued(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    PerSampleTrainer(bert(), arguments(tmp_path, **options), train_dataset=classes(SAMPLES)).train()
    with pytest.raises(PrivacyError, match=r"a private step must be continued as one; found a state without privacy"):
        private(bert(), classes(SAMPLES), tmp_path).train(resume_from_checkpoint=True)


def test_a_private_checkpoint_is_not_continued_without_privacy(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    private(bert(), classes(SAMPLES), tmp_path, options=options).train()
    trainer = PerSampleTrainer(bert(), arguments(tmp_path, **options), train_dataset=classes(SAMPLES))
    with pytest.raises(PrivacyError, match=r"must be continued as one; found a trainer without privacy="):
        trainer.train(resume_from_checkpoint=True)


# --- refused ---------------------------------------------------------------------------------------------------------

SETTINGS = {
    "max_grad_norm": ({"max_grad_norm": 1.0}, "max_grad_norm must be 0 .* found 1.0. Set max_grad_norm=0."),
    "accumulation": (
        {"gradient_accumulation_steps": 4},
        "gradient_accumulation_steps must be 1 .* an update is one draw, in microbatches of per_device_train",
    ),
    "lengths": ({"train_sampling_strategy": "group_by_length"}, "must be 'random' .* Poisson draws"),
    "order": ({"train_sampling_strategy": "sequential"}, "must be 'random' .* found 'sequential'"),
    "drop_last": ({"dataloader_drop_last": True}, "dataloader_drop_last must be False .* Poisson draws"),
    "split": ({"accelerator_config": {"split_batches": True}}, "split_batches of accelerator_config must be False"),
    "batch size": ({"auto_find_batch_size": True}, "auto_find_batch_size must be False .* spends again"),
    "tokens": ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen must be 'no'"),
    "max_steps": ({"max_steps": 9}, "max_steps must be the 5 updates of sw.Privacy.* found 9. Leave it out."),
}


@pytest.mark.parametrize(("options", "message"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_are_refused(options, message, tmp_path):
    with pytest.raises(PrivacyError, match=message):
        private(bert(), classes(SAMPLES), tmp_path, options=options)


def test_settings_are_checked_again_before_the_training(tmp_path):
    trainer = private(bert(), classes(SAMPLES), tmp_path)
    trainer.args.max_grad_norm = 1.0
    with pytest.raises(PrivacyError, match=r"max_grad_norm must be 0 with privacy=, because each sample is clipped"):
        trainer.train()


def test_the_key_is_not_published(tmp_path):
    trainer = private(bert(), classes(SAMPLES), tmp_path, plan(seed=None), callbacks=[Stop(2)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(PrivacyError, match=r"found .*privacy.key. Resume the training, or remove this file."):
        trainer.push_to_hub()
    trainer.args.push_to_hub = True
    with pytest.raises(PrivacyError, match=r"hub_strategy must be 'end' with privacy=, because privacy.key"):
        trainer.train()


def test_the_arguments_of_the_user_are_not_changed(tmp_path):
    args = arguments(tmp_path)
    trainer = PerSampleTrainer(bert(), args, train_dataset=classes(SAMPLES), privacy=plan())
    assert (args.max_steps, trainer.args.max_steps) == (-1, UPDATES)


def test_arguments_that_are_refused(tmp_path):
    with pytest.raises(PrivacyError, match=r"a ledger must not be recorded with privacy=.* Leave it out."):
        private(bert(), classes(SAMPLES), tmp_path, ledger=sw.Ledger())
    with pytest.raises(PrivacyError, match=r"aggregate must be left out with privacy=.* found per\('sample'\)"):
        private(bert(), classes(SAMPLES), tmp_path, aggregate=sw.per("sample"))
    with pytest.raises(TypeError, match=r"privacy must be a sw.Privacy; found float"):
        private(bert(), classes(SAMPLES), tmp_path, 8.0)
    with pytest.raises(PrivacyError, match=r"transforms must act on single samples with privacy=; found noise"):
        private(bert(), classes(SAMPLES), tmp_path, transforms=[sw.noise(1.0)]).train()


def test_methods_that_are_replaced_must_not_be_overridden(tmp_path):
    class Own(PerSampleTrainer):
        def get_train_dataloader(self):
            raise AssertionError

    with pytest.raises(PrivacyError, match=r"found that Own overrides get_train_dataloader. Leave it out"):
        private(bert(), classes(SAMPLES), tmp_path, trainer=Own)


def test_unknown_losses_are_refused(tmp_path):
    class Halved(PerSampleTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) / 2

    with pytest.raises(LossesError, match=r"a loss of Halved that is not the mean .* Override per_sample_losses"):
        private(bert(), classes(SAMPLES), tmp_path, trainer=Halved).train()


def test_batchnorm_is_refused(tmp_path):
    model = bert()
    model.dropout = nn.Sequential(nn.BatchNorm1d(8))
    with pytest.raises((PrivacyError, sw.SamplesInteractError), match=r"BatchNorm"):
        private(model, classes(SAMPLES), tmp_path).train()


class Mixed(BertForSequenceClassification):
    """Logits that depend on other rows, which the graph does not show."""

    def forward(self, input_ids, labels):
        output = super().forward(input_ids)
        output.logits = output.logits * (1 + output.logits.detach().mean())
        output.loss = nn.functional.cross_entropy(output.logits, labels)
        return output


def test_samples_that_interact_are_refused(tmp_path):
    """Found by the recheck of the step, in eval mode."""
    with pytest.raises(sw.SamplesInteractError, match=r"samples must not depend on each other"):
        private(bert(Mixed), classes(SAMPLES), tmp_path, batch=8).train()


def padded(side):
    """Collator that pads the samples of a draw to the length of the longest."""

    def collate(samples):
        longest = max(len(sample["input_ids"]) for sample in samples)

        def pad(name, value):
            rows = []
            for sample in samples:
                filling = [value] * (longest - len(sample[name]))
                rows.append([*filling, *sample[name]] if side == "left" else [*sample[name], *filling])
            return torch.tensor(rows)

        return {name: pad(name, -100 if name == "labels" else 0) for name in ("input_ids", "attention_mask", "labels")}

    return collate


def ragged(n):
    samples = []
    for i, sample in enumerate(texts(n)):
        ids = sample["input_ids"][: 2 + i % 5].tolist()
        samples.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids})
    return samples


def positional():
    """Model with learned positions: padding on the left moves the tokens of a sample."""
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2, **ids, **dropout))
    nn.init.normal_(model.transformer.wpe.weight)
    return model


def test_padding_must_not_change_the_loss_of_a_sample(tmp_path):
    """The length of the longest sample of a draw would be in the gradients of all others."""
    trainer = private(positional(), ragged(SAMPLES), tmp_path / "left", data_collator=padded("left"))
    with pytest.raises(PrivacyError, match=r"it changes with the padding.* Pad on the right"):
        trainer.train()
    assert trainer.privacy.spent().updates == 0
    private(positional(), ragged(SAMPLES), tmp_path / "right", data_collator=padded("right")).train()
