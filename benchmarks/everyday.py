"""Table of everyday situations: forward, backward and clip of a small transformer with one ordinary line or hook.

The unit is a plain step of the same situation, forward and `losses.mean().backward()`, which runs next to each step
that is measured, with the same batch. Data are new in each step. The first two steps are not counted. The clipped
gradient of a last step is compared with that of a loop over single samples.

Times are processor times of one thread, which other processes disturb least.

python everyday.py [--only NAME ...] [--quick] [--rounds N] [--peers] [--write FILE] [--list]
"""

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peers import norms_of, total_norm
from results import TOLERANCE, Result, failed
from tables import Options, Table, write
from torch import Tensor

import samplewise as sw

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import everyday_zoo as zoo

WARM = 2  # steps that are not counted
CLIP = 1.0
QUICK = (
    *("baseline", "last_token", "masked_tokens", "swish", "roll", "pairs", "mixture_of_experts"),
    *("full_backward_hook", "forward_hook_elsewhere", "changing_clamp", "random_tokens"),
)

Batch = tuple[Tensor, ...]
Step = Callable[[Batch], object]  # leaves the gradient of the batch in .grad


def situations() -> dict[str, tuple[str, Callable[[], Any]]]:
    """name -> (description, function that makes the model)"""
    ours = {name: (zoo.line(kind), partial(zoo.build, name)) for name, kind in zoo.SITUATIONS.items()}
    return ours | (import_module("everyday_models").MODELS if find_spec("transformers") else {})


# ------------------------------------------------------------------------------------------------- methods


def plain(model: Any) -> Step:
    return lambda batch: model(*batch).mean().backward()


def samplewise(model: Any) -> Step:
    def step(batch: Batch) -> None:
        g = sw.gradients(model(*batch), model)
        g.backward(coefficients(g.norms()))

    return step


def vmap_grad(model: Any) -> Step:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss(params: dict[str, Tensor], *sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, tuple(t[None] for t in sample)).sum()

    def step(batch: Batch) -> None:
        params = {name: p.detach() for name, p in trained.items()}
        rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, *(0 for _ in batch)))(params, *batch)
        sum_rows({trained[name]: r for name, r in rows.items()})

    return step


def opacus(model: Any) -> Step:
    from opacus import GradSampleModule

    wrapper = GradSampleModule(model, loss_reduction="sum")

    def step(batch: Batch) -> None:
        wrapper(*batch).sum().backward()
        rows = {p: p.grad_sample for p in model.parameters() if p.requires_grad and p.grad_sample is not None}
        sum_rows(rows)
        for p in rows:
            p.grad_sample = None

    return step


def loop(model: Any) -> Step:
    def step(batch: Batch) -> None:
        params = [p for p in model.parameters() if p.requires_grad]
        total = [torch.zeros_like(p) for p in params]
        for sample in zip(*(t.split(1) for t in batch), strict=True):
            losses = model(*sample)
            gradient = torch.autograd.grad(losses.sum(), params, allow_unused=True, materialize_grads=True)
            weight = coefficients(total_norm(list(gradient))[None]).item() / len(batch[0])
            torch._foreach_add_(total, gradient, alpha=weight)
        for p, g in zip(params, total, strict=True):
            p.grad = g

    return step


def coefficients(norms: Tensor) -> Tensor:
    """Coefficients of the clipped mean."""
    return (CLIP / norms).clamp(max=1) / len(norms)


def sum_rows(rows: dict[Any, Tensor]) -> None:
    weights = coefficients(norms_of(list(rows.values())))
    for p, r in rows.items():
        p.grad = torch.tensordot(weights, r, dims=1)


OURS = {"samplewise": samplewise}
PEERS = {"`vmap(grad)`": vmap_grad, "Opacus": opacus, "loop": loop}


# ----------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Timing:
    plain_ms: float
    first: float  # ratio of the first step
    steady: Result  # median ratio of the counted steps


def measure(make: Callable[[], Any], method: Callable[[Any], Step], rounds: int) -> Timing:
    """Times of a method next to plain steps of a model of its own."""
    reference = make()
    plain_step = plain(reference)
    try:
        model = make()
        step = method(model)
        for number in range(3):
            seconds(plain_step, reference, number)
        times = []
        for number in range(WARM + rounds):
            a = seconds(plain_step, reference, number)
            times.append((a, seconds(step, model, number)))
        if apart := distance(make(), model, step):
            return Timing(math.nan, math.nan, Result(word="wrong", why=f"off by {apart:.1%}"))
    except Exception as error:  # the other methods and situations are still measured
        return Timing(math.nan, math.nan, failed(error))
    plain_seconds = statistics.median(a for a, _ in times)
    steady = statistics.median(b / a for a, b in times[WARM:])
    return Timing(1e3 * plain_seconds, times[0][1] / plain_seconds, Result(steady))


def seconds(step: Step, model: Any, number: int) -> float:
    """Processor seconds of one step, without the preparation of its batch and hooks."""
    batch = model.prepare(number)
    start = time.process_time()
    with model.around():
        step(batch)
    duration = time.process_time() - start
    model.zero_grad()
    return duration


def distance(reference: Any, model: Any, step: Step) -> float:
    """Relative error of the norm of the clipped gradient, compared with the loop; 0 if below the tolerance."""
    norms = []
    for module, run in [(reference, loop(reference)), (model, step)]:
        batch = module.prepare(0)
        with module.around():
            run(batch)
        norms.append(total_norm([p.grad for p in module.parameters() if p.grad is not None]).item())
    apart = abs(norms[1] / norms[0] - 1)
    return apart if apart > TOLERANCE else 0.0


# --------------------------------------------------------------------------------------------------- table


def everyday(options: Options) -> Iterator[Table]:
    table = situations()
    names = list(dict.fromkeys(["baseline", *options.choose(table, QUICK)]))
    torch.set_num_threads(1)
    peers = PEERS if options.peers else {}
    rows = [["situation", "", "plain step, ms", "first step", "later steps", "of baseline", *peers]]
    reasons = [] if find_spec("transformers") else ["transformers is not installed: rows of its models are left out"]
    normal = math.nan
    for name in names:
        description, make = table[name]
        times = {kind: measure(make, method, options.rounds) for kind, method in (OURS | peers).items()}
        our = times["samplewise"]
        normal = our.steady.value or normal if name == "baseline" else normal
        share = f"{our.steady.value / normal:.2f}" if our.steady.value else ""
        numbers = [f"{our.plain_ms:.1f}", f"{our.first:.1f}", str(our.steady), share]
        rows.append([f"`{name}`", description, *numbers, *(str(times[kind].steady) for kind in peers)])
        reasons += [f"{kind} on {name}: {t.steady.why[:160]}" for kind, t in times.items() if t.steady.why]
        print("  ".join([f"{name:24}", *rows[-1][2:]]), file=sys.stderr)
    title = "Everyday situations: forward, backward and clip as a multiple of a plain step of the same situation"
    unit = "Multiples of a plain step of the same situation (forward and backward pass), time of the processor"
    caption = f"{unit}. {options.caption(1)}"
    yield Table("everyday", title, rows, caption, tuple(reasons))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", choices=situations())
    parser.add_argument("--quick", action="store_true", help=f"few rounds of {', '.join(QUICK)}")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--peers", action="store_true", help="also vmap(grad), Opacus and a loop over samples")
    parser.add_argument("--write", type=Path, metavar="FILE", help="for example docs/speed.md")
    parser.add_argument("--list", action="store_true", help="print the names")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{name:24} {description}" for name, (description, _) in situations().items()))
        return
    warnings.simplefilter("ignore")
    rounds = arguments.rounds or (7 if arguments.quick else 15)
    options = Options(rounds, [1], arguments.only, arguments.peers, quick=arguments.quick)
    for table in everyday(options):
        print(table)
        if arguments.write:
            write(table, arguments.write)


if __name__ == "__main__":
    main()
