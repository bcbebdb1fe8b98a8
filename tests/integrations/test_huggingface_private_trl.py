"""`PerSample(privacy=...)` with trl.SFTTrainer."""

import pytest

pytest.importorskip("trl")
pytest.importorskip("dp_accounting")

import math

import torch
from datasets import Dataset
from test_huggingface_private import UPDATES, order_of, plan
from test_huggingface_processes import finished, on_two_ranks, run
from test_huggingface_trl import TEXTS, lora, sft, tokenizer, trained
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

from samplewise.errors import PrivacyError
from samplewise.integrations.huggingface import PerSample
from samplewise.privacy.rng import stream

pytestmark = pytest.mark.slow


def table():
    return Dataset.from_dict({"text": TEXTS})


def by_hand(model, privacy, order, bound=0.2, lr=0.5):
    """Trained parameters after all updates, from one backward pass per text."""
    named = dict(model.named_parameters())
    parameters = [named[name] for name in order]
    tokens = tokenizer()
    for number in range(UPDATES):
        uniform = stream(privacy._state.secret, "sample", 0, number).uniform(len(TEXTS))
        sums = [torch.zeros_like(p) for p in parameters]
        for i in (uniform < privacy.sample_rate).nonzero().view(-1).tolist():
            ids = torch.tensor([tokens(TEXTS[i] + "<eos>")["input_ids"]])
            row = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, parameters)
            norm = float(torch.stack([g.norm() for g in row]).norm())
            for total, g in zip(sums, row, strict=True):
                total += g * min(1.0, bound / norm)
        random = stream(privacy._state.secret, "noise", 0, number)
        with torch.no_grad():
            for p, total in zip(parameters, sums, strict=True):
                noise = random.normal(p.shape, p.dtype) * privacy.noise_multiplier * bound
                p -= lr * (total + noise) / (privacy.sample_rate * len(TEXTS))
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_fine_tuning_equals_a_loop_over_texts(adapters, tmp_path):
    privacy = plan()
    options = {"logging_strategy": "steps", "logging_steps": 1}
    trainer = sft(
        tmp_path, data=table(), batch=2, adapters=lora() if adapters else None, options=options, privacy=privacy
    )
    before = trained(trainer)
    trainer.train()
    model = sft(tmp_path / "by hand", data=table(), adapters=lora() if adapters else None).model
    expected = by_hand(model, privacy, order_of(trainer))
    assert (trained(trainer) - expected).abs().max() <= 1e-6
    assert (trained(trainer) - before).abs().max() > 1e-2
    shown = {key for entry in trainer.state.log_history for key in entry}
    assert shown == {"grad_norm", "learning_rate", "epoch", "step", "train_runtime", "train_steps_per_second"}
    assert trainer._total_train_tokens == 0


def test_half_precision_and_observed_metrics(tmp_path):
    options = {"logging_strategy": "steps", "logging_steps": 1, "bf16": True}
    trainer = sft(tmp_path, data=table(), adapters=lora(), options=options, privacy=plan(observe=True))
    before = trained(trainer)
    trainer.train()
    assert (trained(trainer) - before).abs().max() > 1e-2
    assert math.isfinite(trainer.state.log_history[0]["mean_token_accuracy"])
    assert all(p.dtype is torch.float32 for p in trainer.model.parameters() if p.requires_grad)


@pytest.mark.parametrize("options", [{"packing": True, "max_length": 16}, {"padding_free": True, "max_length": None}])
def test_packed_rows_are_refused(options, tmp_path):
    with pytest.raises(PrivacyError, match=f"{next(iter(options))} must be False with privacy="):
        sft(tmp_path, data=table(), options=options, privacy=plan())


def test_trainers_of_pairs_are_refused(tmp_path):
    class Private(PerSample, RewardTrainer):
        pass

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=13, num_labels=1, pad_token_id=0, **sizes))
    pairs = Dataset.from_dict({"chosen": TEXTS, "rejected": TEXTS[::-1]})
    args = RewardConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_grad_norm=0)
    with pytest.raises(PrivacyError, match=r"found RewardTrainer, whose loss compares or generates .* trl.SFTTrainer"):
        Private(model, args, train_dataset=pairs, processing_class=tokenizer(), privacy=plan())


RANKS = """
import os
from test_huggingface_private_trl import *
options = {"ddp_backend": "gloo"} if os.environ.get("WORLD_SIZE") else {}
trainer = sft(sys.argv[1], data=table(), adapters=lora(), options=options, privacy=plan(sample_rate=0.2))
trainer.train()
if trainer.args.process_index == 0:
    torch.save(trained(trainer), sys.argv[1] + "/end.pt")
"""


def test_two_ranks_with_different_numbers_of_microbatches(tmp_path):
    code, errors = finished(run(RANKS, tmp_path / "one"))
    assert code == 0, errors
    on_two_ranks(RANKS, tmp_path / "two")
    first, second = (torch.load(tmp_path / name / "end.pt") for name in ("one", "two"))
    assert (first - second).abs().max() <= 1e-6
