"""Table of clipped sums of Llama models with LoRA adapters (peft), relative to a plain step.

A plain step is a forward pass and the backward pass of the mean loss. One thread and one process: in every round both
steps run once, each with its own optimizer-free `zero_grad`. CPU time, which depends less on other load; ratios are
medians over rounds. The gradients are first compared with those of a loop over single samples.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tables import Options, Table
from timing import interleaved
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import samplewise as sw

VOCABULARY, RANK, CLIP = 512, 8, 1.0
QUERY_VALUE, ALL = ["q_proj", "v_proj"], "all-linear"
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # largest accepted relative difference of the gradients


@dataclass(frozen=True)
class Work:
    hidden: int
    layers: int
    samples: int
    tokens: int
    targets: list[str] | str
    dtype: torch.dtype = torch.float32  # of the frozen weights; adapters are float32
    checkpointing: bool = False

    @property
    def name(self) -> str:
        size = f"{self.hidden} × {self.layers}, batch {self.samples} × {self.tokens}"
        return size + ", bfloat16 base" * (self.dtype is torch.bfloat16) + ", checkpointing" * self.checkpointing

    @property
    def adapted(self) -> str:
        return "all linear layers" if self.targets == ALL else "q and v"


WORKS = [
    Work(128, 2, 8, 16, QUERY_VALUE),
    Work(128, 2, 8, 32, QUERY_VALUE),
    Work(128, 2, 8, 64, QUERY_VALUE),
    Work(256, 4, 8, 64, QUERY_VALUE),
    Work(128, 2, 8, 64, QUERY_VALUE, checkpointing=True),
    Work(128, 2, 8, 64, QUERY_VALUE, torch.bfloat16),
    Work(128, 2, 8, 64, QUERY_VALUE, torch.bfloat16, checkpointing=True),
]


def build(work: Work) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=work.hidden,
        intermediate_size=4 * work.hidden,
        num_hidden_layers=work.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=work.tokens,
        use_cache=False,
    )
    model = get_peft_model(LlamaForCausalLM(config).to(work.dtype), LoraConfig(r=RANK, target_modules=work.targets))
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zero at first, and so would be the gradients of lora_A
            nn.init.normal_(p, std=0.02)
    if work.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def losses_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1].float()
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def clipping(norms: Tensor) -> Tensor:
    return (CLIP / norms).clamp(max=1) / len(norms)


def plain_step(model: nn.Module, ids: Tensor) -> None:
    model.zero_grad()
    losses_of(model, ids).mean().backward()


def clipped_step(model: nn.Module, ids: Tensor) -> None:
    model.zero_grad()
    g = sw.gradients(losses_of(model, ids), model)
    g.backward(clipping(g.norms()))


def check(work: Work, model: nn.Module, ids: Tensor) -> None:
    """Compare a clipped step with a loop over single samples."""
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = [torch.zeros_like(p) for p in trained]
    for n in range(len(ids)):
        row = torch.autograd.grad(losses_of(model, ids[n : n + 1])[0], trained)
        norm = torch.stack([part.norm() for part in row]).norm()
        scale = min(1, CLIP / float(norm)) / len(ids)
        for total, part in zip(expected, row, strict=True):
            total.add_(part, alpha=scale)
    clipped_step(model, ids)
    found = torch.cat([p.grad.flatten() for p in trained])
    apart = float((found - torch.cat([e.flatten() for e in expected])).norm() / found.norm())
    assert apart < TOLERANCES[work.dtype], f"{work.name}: clipped sums differ by {apart:.1e}"


def lora(options: Options) -> Iterator[Table]:
    torch.set_num_threads(1)
    options = replace(options, rounds=3 * options.rounds)  # a round takes a tenth of a second
    rows = [["hidden size × layers, batch × tokens", "plain step, ms", "q and v", "all linear layers"]]
    for work in WORKS:
        cells = [cells_of(replace(work, targets=targets), options.rounds) for targets in (QUERY_VALUE, ALL)]
        rows.append([work.name, cells[0][0], *(ratio for _, ratio in cells)])
    title = f"LoRA of rank {RANK} on Llama models, clipped sum as a multiple of a plain step"
    yield Table("lora", title, rows, f"Processor time as a multiple of a plain step. {options.caption(1)}")


def cells_of(work: Work, rounds: int) -> tuple[str, str]:
    """Milliseconds of a plain step, and the ratio of a clipped sum to it."""
    torch.manual_seed(0)
    model, ids = build(work), torch.randint(0, VOCABULARY, (work.samples, work.tokens))
    check(work, model, ids)
    plain, clipped = partial(plain_step, model, ids), partial(clipped_step, model, ids)
    for _ in range(2):
        plain(), clipped()
    name = f"{work.name}, {work.adapted}"
    series = interleaved(name, plain, {"clipped": clipped}, rounds, time.process_time)["clipped"]
    print(f"{name}: {series.ratio:.2f}", file=sys.stderr)
    return f"{1e3 * series.plain_median:.1f}", f"{series.ratio:.2f}"
