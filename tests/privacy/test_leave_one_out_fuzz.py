"""Random plans, chains, models and adversarial batches: leaving out any sample or user moves the sum by at most its
stated sensitivity.

    python tests/privacy/test_leave_one_out_fuzz.py [--seconds 600] [--seed 0]    draws cases until the time is over
    python tests/privacy/test_leave_one_out_fuzz.py --case 4711                   repeats one case
"""

import argparse
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from leave_one_out import ATTACKS, LOSSES, MODELS, columns, model_of, moved, tolerance

import samplewise as sw
from samplewise.errors import SamplewiseError

pytest.importorskip("dp_accounting")

CASES = 120  # in `make test-all`

CANCEL = ("canceling", "equal_pairs", "nearly_canceling")
# Models whose gradients, of a loss that is linear in the outputs, do not depend on sums of tokens.
WITHOUT_CANCELLED_ACTIVATIONS = ("linear", "wide", "two uses", "weight norm", "batched product")
WEIGHTS = {
    "losses": lambda: sw.weight(lambda losses: torch.sigmoid(losses)),
    "norms": lambda: sw.weight(lambda norms: 1 + norms.clamp(max=1e6)),
    "negative": lambda: sw.weight(lambda losses: torch.sin(losses) - 0.5),
    "huge": lambda: sw.weight(lambda norms: torch.full_like(norms, 1e8)),
    "zero": lambda: sw.weight(lambda losses: torch.zeros_like(losses)),
    "clip": lambda: sw.clip(3.0),
    "automatic clip": lambda: sw.clip(0.3, mode="automatic"),
    "normalize": lambda: sw.normalize(2.0),
}


@dataclass
class Case:
    """One case, drawn from its number."""

    number: int

    def __post_init__(self):
        draw = random.Random(self.number)
        self.model = draw.choice(list(MODELS))
        self.losses = draw.choice(list(LOSSES))
        self.dtype = draw.choice([torch.float32, torch.float64])
        self.samples = draw.choice([2, 5, 17, 40, 64])
        self.aligned = draw.random() < 0.5  # all samples are equal before the attacks, so that their gradients add up
        attacks = [*ATTACKS, *CANCEL]
        self.attacks = [
            (draw.choice(attacks), draw.randrange(self.samples), 10 ** draw.uniform(-2, 20))
            for _ in range(draw.choice([0, 1, 1, 1, 3]))
        ]
        if draw.random() < 0.1:  # all samples
            name, size = draw.choice(attacks), 10 ** draw.uniform(0, 15)
            self.attacks = [(name, row, size) for row in range(self.samples)]
        self.options = {
            "clip": 10 ** draw.uniform(-3, 2),
            "mode": draw.choice(["flat", "flat", "automatic"]),
            "by": draw.choice([None, None, "parameter"]),
            "microbatch": draw.choice([None, None, 1, 2, 7]),
        }
        self.weights = [draw.choice(list(WEIGHTS)) for _ in range(draw.choice([0, 0, 1, 2]))]
        if self.dtype is torch.float32 and draw.random() < 0.15:
            self.options["precision"] = "bf16-mixed"
        self.users = None
        if draw.random() < 0.25:
            self.users = sorted([0, 1, *(draw.randrange(1 + self.samples // 3) for _ in range(self.samples - 2))])
            self.weights = []
        attacked = [row for _, row, _ in self.attacks] or [0]
        row = draw.choice(attacked) if draw.random() < 0.7 else draw.randrange(self.samples)
        of_user = self.users and [k for k in range(self.samples) if self.users[k] == self.users[row]]
        self.left_out = set(of_user or [row])
        if self.losses != "linear" or self.model not in WITHOUT_CANCELLED_ACTIVATIONS:
            # What rounding leaves of activations that cancel depends on the kernels, and so on the size of the batch.
            self.attacks = [attack for attack in self.attacks if attack[0] not in CANCEL or attack[1] in self.left_out]

    def ratio(self):
        """How far the sum moves, in units of the sensitivity."""
        data = columns(self.samples, self.dtype, torch.Generator().manual_seed(self.number))
        if self.aligned:
            for column in data:
                column[:] = column[0].clone()
        for name, row, size in self.attacks:
            limit = 1e12 if self.dtype is torch.float32 else 1e30
            ATTACKS[name](*data, row, min(size, limit))
        options = {**self.options, "transforms": [WEIGHTS[name]() for name in self.weights], "users": self.users}
        losses = LOSSES[self.losses](self.model)
        ratio, _ = moved(model_of(self.model, self.dtype), losses, data, self.left_out, **options)
        return ratio

    def check(self):
        """Name of the result: "bounded", or the error of a refusal."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                ratio = self.ratio()
            except SamplewiseError as error:
                return type(error).__name__
        assert ratio <= tolerance(self.dtype, self.samples), f"{ratio:.6g} sensitivities: {self}, {vars(self)}"
        return "bounded"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_leaving_out_a_sample(part):
    first = random.SystemRandom().randrange(2**40)  # new cases in each run; a failure names its case
    results = Counter(Case(first + k).check() for k in range(part, CASES, 4))
    assert results["bounded"] > CASES / 4 * 0.6, results


@pytest.mark.parametrize("number", range(6))
def test_some_cases(number):
    assert Case(number).check() in ("bounded", "SamplesInteractError")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    options = parser.parse_args()
    if options.case is not None:
        print(vars(Case(options.case)), Case(options.case).check())
        return
    end = time.monotonic() + options.seconds
    results = Counter()
    failed = []
    number = options.seed << 32
    while time.monotonic() < end:
        try:
            results[Case(number).check()] += 1
        except Exception:
            failed.append(number)
            traceback.print_exc()
        number += 1
    print(f"{sum(results.values()) + len(failed)} cases: {dict(results)}; {len(failed)} failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
