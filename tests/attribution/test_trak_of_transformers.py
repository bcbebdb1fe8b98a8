"""TRAK of tiny models of transformers and of a LoRA adapter, against the formula on rows of the plain loop."""

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from projection_matrix import projection

import samplewise as sw

DIM = 12
SIZES = dict(vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
QUIET = dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)  # not used in evaluation mode


def bert():
    config = transformers.BertConfig(**SIZES, **QUIET, max_position_embeddings=8, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def gpt2():
    config = transformers.GPT2Config(vocab_size=17, n_embd=8, n_inner=8, n_layer=1, n_head=2, n_positions=8)
    return transformers.GPT2LMHeadModel(config)


def lora():
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    model = peft.get_peft_model(gpt2(), config)
    for p in model.parameters():  # lora_B starts at zero, which makes the gradients of lora_A zero
        if p.requires_grad:
            p.data += 0.3 * torch.randn_like(p)
    return model


def classified(n):
    """Dicts of sequences of different lengths, with labels."""
    mask = (torch.arange(6) < 3 + torch.arange(n)[:, None] % 4).long()
    return {"input_ids": torch.randint(17, (n, 6)), "attention_mask": mask, "labels": torch.arange(n) % 3}


def sequences(n):
    return {"input_ids": torch.randint(17, (n, 6))}


def log_likelihood(model, batch):
    """Mean log-likelihood of the tokens of each sequence, which is minus the loss: its weight is 1."""
    ids = batch["input_ids"]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    outputs = -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
    return outputs, torch.ones_like(outputs)


def outputs_of(fn, model, batch):
    result = fn(model, batch)
    return result if isinstance(result, tuple) else (result, torch.sigmoid(-result))


def batches(data, size):
    n = len(data["input_ids"])
    return [{name: value[i : i + size] for name, value in data.items()} for i in range(0, n, size)]


def rows(model, fn, data):
    trained = [p for p in model.parameters() if p.requires_grad]
    found = []
    for sample in batches(data, 1):
        grads = torch.autograd.grad(outputs_of(fn, model, sample)[0][0], trained, allow_unused=True)
        found.append(
            torch.cat(
                [
                    torch.zeros_like(p).flatten() if g is None else g.flatten()
                    for p, g in zip(trained, grads, strict=True)
                ]
            )
        )
    return torch.stack(found)


@pytest.mark.parametrize(
    ("make", "data", "fn"),
    [(bert, classified, sw.attribution.margin), (gpt2, sequences, log_likelihood), (lora, sequences, log_likelihood)],
    ids=["bert", "gpt2", "lora"],
)
def test_formula(make, data, fn):
    torch.manual_seed(0)
    model = make().double().train()
    train, queries = data(20), data(3)
    found = sw.trak(model, fn, batches(train, 5), batches(queries, 2), DIM, damping=0.1)
    assert model.training
    model.eval()
    matrix = projection(model, DIM)
    features, of_queries = (rows(model, fn, each) @ matrix for each in (train, queries))
    gram = features.T @ features
    inverse = torch.linalg.inv(gram + 0.1 * gram.trace() / DIM * torch.eye(DIM))
    wanted = (of_queries @ inverse @ features.T * outputs_of(fn, model, train)[1].detach()).float()
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
