"""Tiny models of transformers with random weights, and trainings of them with a few samples."""

import torch
from torch.utils.data import SequentialSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import samplewise as sw
from samplewise.integrations.huggingface import PerSample

VOCABULARY = 20
LENGTH = 6
CLASSES = 3


class PerSampleTrainer(PerSample, Trainer):
    pass


class SequentialTrainer(PerSampleTrainer):
    """Takes the samples in their order."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def bert(head=BertForSequenceClassification, dropout=0.0, seed=0, **options):
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **{"num_labels": CLASSES, **options},
    )
    return head(config)


def gpt2(**options):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, pad_token_id=0, **{"num_labels": CLASSES, **options},
    )  # fmt: skip
    return GPT2ForSequenceClassification(config)


def llama(head=LlamaForCausalLM, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return head(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, pad_token_id=0, **{**sizes, **options}))


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def vit():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = ViTConfig(image_size=8, patch_size=4, num_labels=CLASSES, hidden_dropout_prob=0.0, **sizes)
    return ViTForImageClassification(config)


# --- data: lists of dicts -------------------------------------------------------------------------------------------


def tokens(n, length=LENGTH, seed=1):
    return torch.randint(1, VOCABULARY, (n, length), generator=torch.Generator().manual_seed(seed))


def classes(n, length=LENGTH):
    return [{"input_ids": x, "labels": i % CLASSES} for i, x in enumerate(tokens(n, length).tolist())]


def texts(n, length=LENGTH):
    """Token sequences in which a different number of tokens is padding."""
    samples = []
    for i, x in enumerate(tokens(n, length)):
        used = 2 + i % (length - 1)
        mask = torch.arange(length) < used
        samples.append({"input_ids": x, "attention_mask": mask.long(), "labels": torch.where(mask, x, -100)})
    return samples


def tags(n):
    return [{**x, "labels": torch.where(x["labels"] < 0, -100, x["input_ids"] % CLASSES)} for x in texts(n)]


def vectors(n, size=CLASSES):
    labels = torch.rand(n, size, generator=torch.Generator().manual_seed(2)).round()
    return [{**x, "labels": y} for x, y in zip(classes(n), labels, strict=True)]


def numbers(n):
    return [{**x, "labels": 0.3 * i - 1} for i, x in enumerate(classes(n))]


def images(n):
    pixels = torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    return [{"pixel_values": x, "labels": i % CLASSES} for i, x in enumerate(pixels)]


TASKS = {  # name -> model, data
    "bert": (bert, classes),
    "bert tokens": (lambda: bert(BertForTokenClassification), tags),
    "bert multi-label": (lambda: bert(problem_type="multi_label_classification"), vectors),
    "bert regression": (lambda: bert(num_labels=1), numbers),
    "gpt2": (gpt2, classes),
    "gpt2 multi-label": (lambda: gpt2(problem_type="multi_label_classification"), vectors),
    "llama": (llama, texts),
    "t5": (t5, texts),
    "vit": (vit, images),
}


CHECKPOINTING = (  # options of TrainingArguments; transformers 4 has other names and another default
    {"activation_checkpointing": True}
    if hasattr(TrainingArguments, "activation_checkpointing")
    else {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
)


# --- training -------------------------------------------------------------------------------------------------------


def arguments(directory, batch=4, accumulate=1, **options):
    defaults = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulate,
        "learning_rate": 0.5,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "num_train_epochs": 1,
        "report_to": [],
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    return TrainingArguments(str(directory), **{**defaults, **options})


def train(model, data, directory, batch=4, accumulate=1, trainer=PerSampleTrainer, options=None, **keywords):
    """Train the model; returns the trainer."""
    made = trainer(model, arguments(directory, batch, accumulate, **(options or {})), train_dataset=data, **keywords)
    made.train()
    return made


def recorded(model, data, directory, *sizes, **keywords):
    """Train with a ledger; returns the trainer."""
    return train(model, sw.Indexed(data), directory, *sizes, ledger=sw.Ledger(), **keywords)


def vector(model):
    """All parameters of a model in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def collated(samples):
    return {key: torch.stack([torch.as_tensor(sample[key]) for sample in samples]) for key in samples[0] if key != "id"}


def one_at_a_time(model, windows, bound, lr=0.5, counted=None, divided=None):
    """Clipped updates by hand, with one backward pass per sample. Returns the norms of all samples.

    counted: function of a sample that returns its number of tokens, in losses that are means over tokens
    divided: another function of a sample, whose sum the update is divided by; default: `counted`
    """
    divided = divided or counted
    parameters = list(model.parameters())
    norms = []
    for window in windows:
        total = [torch.zeros_like(p) for p in parameters]
        denominator = sum(divided(sample) if divided else 1 for sample in window)
        for sample in window:
            loss = model(**collated([sample])).loss * (counted(sample) if counted else 1)
            row = torch.autograd.grad(loss, parameters, materialize_grads=True)
            norms.append(float(torch.stack([g.norm() for g in row]).norm()))
            for t, g in zip(total, row, strict=True):
                t += g * min(1, bound / norms[-1]) / denominator
        with torch.no_grad():
            for p, t in zip(parameters, total, strict=True):
                p -= lr * t
    return norms


def windows_of(ledger, data):
    """The samples of each update, in the order of the ledger."""
    found = {}
    for row in ledger.to_pylist():
        found.setdefault(row["update"], []).append(data[row["id"]])
    return list(found.values())
