"""Hugging Face Trainer: find wrong labels with the ledger of a training run, and clip the gradient of each sample.

    python examples/huggingface_classification.py

A small BERT learns to classify sequences of tokens made here; one label in twelve is wrong. What is different from a
training without samplewise: the class of the trainer, `sw.Indexed`, and the arguments `transforms` and `ledger`.
Nothing is downloaded. Needs transformers and accelerate: pip install 'samplewise[huggingface]'.
"""

from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import samplewise as sw
from samplewise.integrations.huggingface import PerSample

CLASSES = 4
SAMPLES = 480
WRONG = SAMPLES // 12


class PerSampleTrainer(PerSample, Trainer):
    pass


def make_data() -> tuple[list[dict[str, Any]], set[int]]:
    """Sequences of 10 tokens, of which most belong to the class of the sample; and the ids of samples whose label is
    another one.
    """
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(SAMPLES) % CLASSES
    own = 10 * classes[:, None] + torch.randint(10, (SAMPLES, 10), generator=generator)
    other = torch.randint(10 * CLASSES, (SAMPLES, 10), generator=generator)
    tokens = torch.where(torch.rand(SAMPLES, 10, generator=generator) < 0.8, own, other)
    wrong = torch.randperm(SAMPLES, generator=generator)[:WRONG]
    labels = classes.clone()
    labels[wrong] = (labels[wrong] + torch.randint(1, CLASSES, (WRONG,), generator=generator)) % CLASSES
    samples = [{"input_ids": x, "labels": y} for x, y in zip(tokens.tolist(), labels.tolist(), strict=True)]
    return samples, set(wrong.tolist())


def make_model() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=10 * CLASSES,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        id2label={k: str(k) for k in range(CLASSES)},
    )
    return BertForSequenceClassification(config)


def main() -> None:
    torch.manual_seed(0)
    data, wrong = make_data()
    with TemporaryDirectory() as output:
        args = TrainingArguments(
            output,
            num_train_epochs=5,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            max_grad_norm=0,  # sw.clip bounds the gradient of each sample instead
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = PerSampleTrainer(
            make_model(), args, train_dataset=sw.Indexed(data), transforms=[sw.clip(3.0)], ledger=sw.Ledger()
        )
        trainer.train()
        table = sw.read_ledger(output)
        suspects = sw.suspects(table).top(WRONG).tolist()
    found = sum(sample in wrong for sample in suspects)
    clipped = sum(weight < 1 for weight in table["weight"].to_pylist())
    print(f"{table.num_rows} visits of {SAMPLES} samples; {clipped} gradients were clipped")
    print(f"{found} of the {WRONG} most suspicious samples have a wrong label; {WRONG} labels are wrong")
    print(f"most suspicious: {', '.join(map(str, suspects[:10]))}")


if __name__ == "__main__":
    main()
