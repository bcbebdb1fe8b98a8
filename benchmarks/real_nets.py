"""Five networks of real size with random weights, as workloads of the benchmark.

Dropout is zero, so that all methods compute the same gradients. ResNet-18 and ViT-S follow the rule of workloads.py:
one module per parameter, and position ids of shape (B, T).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import Attention, Residual, Workload, classification, feed_forward, next_token

IMAGENET_CLASSES = 1000
BERT_WORDS, GPT2_WORDS = 30522, 50257
LENGTH = 128
LORA_RANK = 8


# ------------------------------------------------------------------------------------- models


def convolution(channels_in: int, channels_out: int, size: int, stride: int) -> nn.Sequential:
    """Convolution without bias, followed by a GroupNorm of 32 groups."""
    layer = nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(32, channels_out))


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        first = convolution(channels_in, channels_out, 3, stride)
        self.branch = nn.Sequential(first, nn.ReLU(), convolution(channels_out, channels_out, 3, 1))
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else convolution(channels_in, channels_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


def resnet18_model() -> nn.Module:
    blocks: list[nn.Module] = []
    for channels_in, channels_out in [(64, 64), (64, 128), (128, 256), (256, 512)]:
        stride = 1 if channels_in == channels_out else 2
        blocks += [BasicBlock(channels_in, channels_out, stride), BasicBlock(channels_out, channels_out, 1)]
    stem = [convolution(3, 64, 3, 1), nn.ReLU()]  # of small images, without pooling
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, IMAGENET_CLASSES)]
    return nn.Sequential(*stem, *blocks, *head)


class VisionTransformer(nn.Module):
    """ViT-S of patches of 16 × 16: the class token is a patch of zeros plus its position's vector."""

    def __init__(self, image: int = 224, patch: int = 16, width: int = 384, layers: int = 12, heads: int = 6):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Embedding(1 + (image // patch) ** 2, width)
        nn.init.normal_(self.positions.weight, std=0.02)
        blocks = [[Attention(width, heads, causal=False), feed_forward(width)] for _ in range(layers)]
        self.blocks = nn.Sequential(*[Residual(width, branch) for block in blocks for branch in block])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, IMAGENET_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.pad(self.patches(images).flatten(2).transpose(1, 2), (0, 0, 1, 0))
        positions = torch.arange(x.shape[1]).repeat(len(x), 1)
        return self.head(self.norm(self.blocks(x + self.positions(positions)))[:, 0])


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
