"""The measurements of `samplewise bench`, in their order: zoo, transforms, networks of real size."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samplewise.bench.measure import (
    BFLOAT16,
    COMPARED,
    FLOAT16,
    FLOAT32,
    TF32,
    Precision,
    error_of_norms,
    make_updates,
    measure_updates,
    one_line,
    without_paths,
)
from samplewise.bench.networks import NETWORKS, Scale, Work, gpt2_small, resnet18, small_vit, vit_s
from samplewise.bench.report import FORMAT, VERSION, check_report, describe_environment, today
from samplewise.core.memory import allow_tf32, device_function, empty_cache, has_float64, has_tf32, is_out_of_memory
from samplewise.core.text import progress
from samplewise.step.step import Step
from samplewise.testing import runner
from samplewise.testing.cases import CASES
from samplewise.testing.compare import Tolerance, assert_same
from samplewise.testing.oracle import rows_of, wanted
from samplewise.transforms.clip import clip, normalize
from samplewise.transforms.weight import drop, weight

QUICK_CASES = 4  # of the zoo
UPDATES = 4  # of each network
SECONDS = {"quick": 0.0, "cpu": 10.0, "accelerator": 10.0}  # of timing a group of updates, after three rounds
STEP = "sw.Step"
CLIPPED = "sw.clip(c)"
Advance = Callable[[int], None]
MakeWork = Callable[[Scale], Work]


def run_bench(device: torch.device, quick: bool = False) -> dict[str, Any]:
    """Measure a device and return the report, which follows schema.json."""
    started = time.perf_counter()
    scale: Scale = "quick" if quick else "cpu" if device.type == "cpu" else "accelerator"
    cases = list(CASES.values())[: QUICK_CASES if quick else None]
    zoo = zoo_precisions(device)
    updates = 1 + len(TRANSFORMS) + len(NETWORKS) * len(update_precisions(device)) * UPDATES
    total = len(zoo) * len(cases) + len(TRANSFORMS) + updates
    # Without warnings of PyTorch about missing kernels, and of samplewise about slow models of the zoo.
    with progress(total, "measurements") as advance, warnings.catch_warnings(action="ignore"):
        report = {
            "format": FORMAT,
            "version": VERSION,
            "date": today(),
            "quick": quick,
            "environment": describe_environment(device),
            "zoo": [judge_zoo(name, precision, cases, device, advance) for name, precision in zoo.items()],
            "transforms": measure_transforms(scale, device, advance),
            "networks": [
                result
                for name, make in NETWORKS.items()
                for result in measure_network(name, make, scale, device, advance)
            ],
        }
    report["seconds"] = round(time.perf_counter() - started, 1)
    check_report(report, "the report")
    return report


# --- precisions -------------------------------------------------------------------------------------------------------


def zoo_precisions(device: torch.device) -> dict[str, runner.ZooPrecision]:
    precisions = {"float64": runner.FP64} if has_float64(device) else {}
    precisions["float32"] = runner.FP32
    if has_tf32(device):
        precisions["TF32"] = runner.TF32
    if torch.amp.is_autocast_available(device.type):
        precisions["bfloat16, autocast"] = runner.BF16
    return precisions


def update_precisions(device: torch.device) -> list[Precision]:
    """float32 without TF32; on an accelerator also TF32 and the mixed precision that the device is made for."""
    if device.type == "cpu":
        return [FLOAT32]
    tf32 = [TF32] if has_tf32(device) else []
    supports_bfloat16 = device_function(device, "is_bf16_supported")
    # Older GPUs, such as the T4, emulate bfloat16.
    emulated = device.type == "cuda" and supports_bfloat16 is not None and not supports_bfloat16(False)
    mixed = [FLOAT16 if emulated else BFLOAT16] if torch.amp.is_autocast_available(device.type) else []
    return [FLOAT32, *tf32, *mixed]


# --- zoo --------------------------------------------------------------------------------------------------------------


def judge_zoo(
    name: str, precision: runner.ZooPrecision, cases: list[Any], device: torch.device, advance: Advance
) -> dict[str, Any]:
    """Outcomes of the small models, compared with one backward pass per sample."""
    results = []
    with runner.one_thread():
        for case in cases:
            results.append(runner.run_case(case, precision, device))
            advance(1)
    counts = runner.count_outcomes(results)
    exceptions = [result for result in results if result.outcome in (runner.WRONG, runner.NOT_RUN)]
    return {
        "precision": name,
        "relative": precision.tolerance.relative,
        "floor": precision.tolerance.floor,
        **{outcome.replace(" ", "_"): count for outcome, count in counts.items()},
        "exceptions": [
            {"case": r.case.name, "outcome": r.outcome, "reason": without_paths(r.reason)[:200]} for r in exceptions
        ],
    }


# --- transforms -------------------------------------------------------------------------------------------------------

CLIP = 1.0
RATE = 0.1  # gradients are read from the change of the parameters
# Name -> transforms, and the weights (B,) of the samples' gradients in a plain loop, from their norms and losses.
Weights = Callable[[Tensor, Tensor], Tensor]
TRANSFORMS: dict[str, tuple[Callable[[float], list[Any]], Weights]] = {
    "none": (lambda c: [], lambda norms, losses: torch.ones_like(norms)),
    "sw.clip(c)": (lambda c: [clip(c)], lambda norms, losses: (CLIP / norms).clamp(max=1)),
    "sw.normalize()": (lambda c: [normalize()], lambda norms, losses: 1 / norms),
    "sw.weight(f)": (
        lambda c: [weight(lambda losses: torch.exp(-losses))],
        lambda norms, losses: torch.exp(-losses),
    ),
    "sw.drop(largest=1)": (
        lambda c: [drop(largest=1)],
        lambda norms, losses: (norms < norms.amax()).to(norms) * (len(norms) / (len(norms) - 1)),
    ),
}
EXACT = {torch.float64: Tolerance(1e-9, 1e-11), torch.float32: Tolerance(1e-3, 1e-4)}
EXACT_WORKS: dict[str, MakeWork] = {"ResNet-18": resnet18, "ViT": vit_s, "GPT-2": gpt2_small}  # small ones


def measure_transforms(scale: Scale, device: torch.device, advance: Advance) -> dict[str, Any]:
    """Updates with each transform: exact compared with a plain loop over samples, and timed on a small ViT."""
    dtype = torch.float64 if has_float64(device) else torch.float32
    works = {"ViT": vit_s} if scale == "quick" else EXACT_WORKS
    exact = []
    for name, (make, weights) in TRANSFORMS.items():
        reason = compare_updates(make, weights, works, device, dtype)
        exact.append({"update": name, "right": reason == "", "reason": reason})
        advance(1)
    work = seeded_work(small_vit, scale).to(device)
    result: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "relative": EXACT[dtype].relative,
        "floor": EXACT[dtype].floor,
        "samples": len(work.batch[0]),
        "exact": exact,
        "updates": [],
        "error": None,
    }
    try:
        with allow_tf32(False):
            bound = float(error_of_norms(work, device, FLOAT32)[1].median())
            chains = {name: {"transforms": make(bound)} for name, (make, _) in TRANSFORMS.items()}
            updates = make_updates(work, chains, device, FLOAT32)
            result["updates"] = measure_updates(updates, device, SECONDS[scale], advance)
    except Exception as problem:  # the networks are still measured
        result["error"] = one_line(problem)
    return result


def compare_updates(
    make: Callable[[float], list[Any]],
    weights: Weights,
    works: Mapping[str, MakeWork],
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """Compare second updates of small networks, in microbatches, with a plain loop. Empty if equal, else the reason."""
    for name, make_work in works.items():
        try:
            with allow_tf32(False):
                work = seeded_work(make_work, "quick").to(device, dtype)
                trained = wanted(work.model)
                optimizer = torch.optim.SGD(work.model.parameters(), lr=RATE, fused=device.type != "cpu")
                step = Step(
                    work.model, optimizer, work.loss_fn, len(work.batch[0]), microbatch=2, transforms=make(CLIP)
                )
                step.run([work.batch])  # verifies the graph; later updates use what it has found
                losses = work.losses()
                rows = rows_of(losses, trained)
                expected = rows.sum(weights(rows.norms(), losses.detach()) / len(losses))
                before = {key: p.detach().clone() for key, p in trained.items()}
                step.run([work.batch])
                change = {key: (before[key] - p.detach()) / RATE for key, p in trained.items()}
                assert_same(change, expected, EXACT[dtype], name)
        except Exception as error:  # the other transforms are still compared
            return f"{name}: {one_line(error)}"[:200]
    return ""


def seeded_work(make: MakeWork, scale: Scale) -> Work:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(scale)


# --- networks of real size --------------------------------------------------------------------------------------------


def measure_network(
    name: str, make: MakeWork, scale: Scale, device: torch.device, advance: Advance
) -> list[dict[str, Any]]:
    """Norms compared with backward passes of single samples, and updates next to a plain loop, in each precision."""
    results = []
    work = seeded_work(make, scale).to(device)
    for precision in update_precisions(device):
        result: dict[str, Any] = {
            "network": name,
            "parameters": sum(p.numel() for p in work.model.parameters()),
            "precision": precision.name,
            "tolerance": precision.tolerance,
            "norm_error": None,
            "updates": [],
            "error": None,
        }
        results.append(result)
        try:
            with allow_tf32(precision.tf32):
                work, error, bound = fit_to_memory(work, device, precision)
                result["norm_error"] = error if math.isfinite(error) else None
                chains: dict[str, dict[str, Any]] = {
                    STEP: {},
                    "sw.Step(record='norms')": {"record": "norms"},
                    CLIPPED: {"transforms": [clip(bound)]},
                }
                updates = make_updates(work, chains, device, precision)
                result["updates"] = measure_updates(updates, device, SECONDS[scale], advance)
        except Exception as problem:  # the other networks are still measured
            result["error"] = one_line(problem)
        result["samples"] = len(work.batch[0])
        work.model.zero_grad()
        empty_cache()
    return results


def fit_to_memory(work: Work, device: torch.device, precision: Precision) -> tuple[Work, float, float]:
    """The work with as many samples as fit into memory, the error of its norms, and their median."""
    while True:
        try:
            error, norms = error_of_norms(work, device, precision)
            bound = float(norms.median())
            make_updates(work, {CLIPPED: {"transforms": [clip(bound)]}}, device, precision)[CLIPPED]()
            return work, error, bound
        except Exception as problem:
            samples = len(work.batch[0]) // 2
            if not is_out_of_memory(problem) or samples < COMPARED:
                raise
        work = replace(work, batch=(work.batch[0][:samples], work.batch[1][:samples]))
        empty_cache()
