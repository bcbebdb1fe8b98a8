"""Clipped sum of per-sample gradients of Llama models with LoRA adapters (peft), relative to a plain step.

python benchmarks/lora.py [name ...] [--rounds 31]

A plain step is a forward pass and the backward pass of the mean loss. One thread and one process: in every round both
steps run once, each with its own optimizer-free `zero_grad`. CPU time, which depends less on other load; ratios are
medians over rounds. The gradients are first compared with those of a loop over single samples.
"""

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
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
        adapted = "all linear layers" if self.targets == ALL else "q and v"
        size = f"{self.hidden} x {self.layers}, batch {self.samples} x {self.tokens}"
        options = ", bfloat16" * (self.dtype is torch.bfloat16) + ", checkpointing" * self.checkpointing
        return f"{size}, {adapted}{options}"


WORKS = [
    Work(128, 2, 8, 32, QUERY_VALUE),
    Work(128, 2, 8, 64, QUERY_VALUE),
    Work(128, 2, 8, 64, ALL),
    Work(256, 4, 8, 64, QUERY_VALUE),
    Work(256, 4, 8, 64, ALL),
    Work(128, 2, 8, 64, QUERY_VALUE, checkpointing=True),
    Work(128, 2, 8, 64, QUERY_VALUE, torch.bfloat16),
    Work(128, 2, 8, 64, ALL, torch.bfloat16, checkpointing=True),
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


def seconds(call: Callable[[nn.Module, Tensor], None], model: nn.Module, ids: Tensor) -> float:
    start = time.process_time()
    call(model, ids)
    return time.process_time() - start


def line(work: Work, rounds: int) -> str:
    torch.manual_seed(0)
    model, ids = build(work), torch.randint(0, VOCABULARY, (work.samples, work.tokens))
    check(work, model, ids)
    steps = {plain_step: [], clipped_step: []}
    for call in steps:
        seconds(call, model, ids), seconds(call, model, ids)
    gc.collect()
    for number in range(rounds):
        for call in list(steps)[:: 1 if number % 2 else -1]:
            steps[call].append(seconds(call, model, ids))
    plain, clipped = (1e3 * statistics.median(times) for times in steps.values())
    count = sum(p.requires_grad for p in model.parameters()) // 2
    return f"| {work.name} | {count} | {plain:.1f} | {clipped:.1f} | {clipped / plain:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of the models; default: all models")
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"\n### LoRA of rank {RANK} on Llama models, clipped sum against a plain step\n")
    print("| hidden size x layers | adapters | plain, ms | clipped, ms | ratio |\n|---|---|---|---|---|")
    for work in WORKS:
        if not options.names or any(name in work.name for name in options.names):
            print(line(work, options.rounds), flush=True)


if __name__ == "__main__":
    main()
