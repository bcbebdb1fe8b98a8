"""Workloads of the benchmark by name."""

import torch
from real_nets import REAL_NETS
from small_nets import SMALL_NETS
from workloads import MEDIUM_NETS, Workload

WORKLOADS = SMALL_NETS | MEDIUM_NETS | REAL_NETS
TITLES = {
    "small_mlp": "MLP 64-128-128-10, B 64",
    "small_cnn": "CNN 16-32 of 28×28, B 64",
    "small_transformer": "transformer, 2 layers, d 64, T 32, B 16",
    "mlp": "MLP",
    "cnn": "GroupNorm CNN",
    "encoder": "encoder",
    "lm": "tied causal LM",
    "lstm": "LSTM",
    "long": "long sequences",
    "resnet18": "ResNet-18 GroupNorm, B 16, 64×64",
    "vit": "ViT-S, B 8",
    "bert": "BERT 6 layers, B 8, T 128",
    "gpt2": "GPT-2 small, B 4, T 128",
    "gpt2_lora": "GPT-2 small, LoRA",
}


def build(name: str) -> Workload:
    torch.manual_seed(1)  # with 0, one ReLU of the MLP's half million flips between a batch and a loop of one
    return WORKLOADS[name]()
