"""Five networks of real size with random weights, as workloads of the benchmark.

Dropout is zero, so that all methods compute the same gradients. ResNet-18 and ViT-S are those of `samplewise bench`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from workloads import Workload, classification, next_token

from samplewise.bench.networks import GPT2_WORDS, IMAGENET_CLASSES, VisionTransformer, resnet18_model

BERT_WORDS = 30522
LENGTH = 128
LORA_RANK = 8


# ------------------------------------------------------------------------------------- models


def gpt2_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    return GPT2LMHeadModel(config).train()


def with_adapters(model: nn.Module) -> nn.Module:
    """Model with LoRA adapters on the layers that peft chooses for it; only the adapters are trained."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=LORA_RANK, fan_in_fan_out=True, task_type="CAUSAL_LM"))
    for name, p in adapted.named_parameters():
        if "lora_B" in name:  # zero at first, and so would be the gradients of lora_A
            nn.init.normal_(p, std=0.02)
    return adapted


# ------------------------------------------------------------------------------------- losses


def logits_classification(outputs: Any, labels: Tensor) -> Tensor:
    return classification(outputs.logits, labels)


def logits_next_token(outputs: Any, tokens: Tensor) -> Tensor:
    return next_token(outputs.logits, tokens)


# ---------------------------------------------------------------------------------- workloads


def resnet18() -> Workload:
    images, labels = torch.randn(16, 3, 64, 64), torch.randint(IMAGENET_CLASSES, (16,))
    return Workload("resnet18", resnet18_model(), images, labels, classification, clip=70.3)


def vit() -> Workload:
    images, labels = torch.randn(8, 3, 224, 224), torch.randint(IMAGENET_CLASSES, (8,))
    return Workload("vit", VisionTransformer(), images, labels, classification, clip=77.0)


def bert() -> Workload:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(num_hidden_layers=6, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(config).train()
    tokens, labels = torch.randint(BERT_WORDS, (8, LENGTH)), torch.randint(2, (8,))
    return Workload("bert", model, tokens, labels, logits_classification, clip=22.5)


def gpt2() -> Workload:
    tokens = torch.randint(GPT2_WORDS, (4, LENGTH + 1))
    return Workload("gpt2", gpt2_model(), tokens[:, :-1], tokens[:, 1:], logits_next_token, clip=24.8)


def gpt2_lora() -> Workload:
    tokens = torch.randint(GPT2_WORDS, (4, LENGTH + 1))
    model = with_adapters(gpt2_model())
    return Workload("gpt2_lora", model, tokens[:, :-1], tokens[:, 1:], logits_next_token, clip=0.223)


REAL_NETS: dict[str, Callable[[], Workload]] = {f.__name__: f for f in (resnet18, vit, bert, gpt2, gpt2_lora)}
