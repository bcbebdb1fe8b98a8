"""Private updates compared with plain updates and with Opacus, on the CNN of examples/private_fashion_mnist.py.

python benchmarks/run.py private: time and memory, in a process for each method
python benchmarks/private.py [table ...] [--seeds 3] [--updates 100]

  epsilon   epsilon of the published settings, and noise multiplier for epsilon 3, by each accountant
  accuracy  test accuracy on Fashion-MNIST after some updates with the same settings, initial parameters and draws

All methods clip the gradient of each sample, add Gaussian noise and divide by the expected batch size. They train on
the same batches, drawn beforehand by `sw.Privacy`: expected size 2048, of 60,000 samples. Opacus is used by its classes
for module, optimizer and criterion: its PrivacyEngine replaces the rate 2048/60000 by 1/30, since it derives it from
the number of batches.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import isolated
import torch
from memory import peak_above_start
from tables import Options, Table
from timing import interleaved
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import samplewise as sw
from samplewise.privacy.accounting import Releases, calibrate, epsilon

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import private_fashion_mnist as example

SETTINGS = example.FASHION
SAMPLES = 60_000
WARM = 2  # updates before those that are measured
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
Data = tuple[Tensor, Tensor]


def noise_images(samples: int) -> Data:
    """Random images and labels: times do not depend on them."""
    return torch.rand(samples, 1, 28, 28), torch.randint(10, (samples,))


def privacy(samples: int, batch: int, seed: int = 0) -> sw.Privacy:
    return sw.Privacy(
        noise_multiplier=SETTINGS.noise,
        delta=SETTINGS.delta,
        updates=SETTINGS.updates,
        sample_rate=batch / samples,
        clip=SETTINGS.clip,
        seed=seed,
    )


class Method:
    """Training of one model. `update()` makes an update with the next of the `draws` batches, drawn beforehand; with
    draws=None they are drawn as needed.
    """

    name: str

    def __init__(self, layout: str, data: Data, batch: int = SETTINGS.batch, seed: int = 0, draws: int | None = None):
        self.batch = batch
        self.plan = privacy(len(data[1]), batch, seed)
        torch.manual_seed(seed)
        self.network = example.published_cnn().to(memory_format=LAYOUTS[layout])
        self.model: nn.Module = self.network
        self.criterion: Any = nn.CrossEntropyLoss()
        self.optimizer: Any = torch.optim.SGD(self.network.parameters(), lr=SETTINGS.lr, momentum=SETTINGS.momentum)
        self.draws = self.passes(TensorDataset(*data))
        if draws is not None:
            self.draws = iter(list(islice(self.draws, draws)))
        self.prepare()

    def passes(self, dataset: TensorDataset) -> Iterator[Any]:
        loader = self.plan.loader(dataset)
        sampler: Any = loader.batch_sampler
        for number in range(SETTINGS.updates):
            yield loader.collate_fn(loader.dataset.__getitems__(sampler.draw(number, 0)))  # type: ignore[attr-defined]

    def prepare(self) -> None: ...

    def remove_noise(self) -> None:
        self.optimizer.noise_multiplier = 0.0

    def update(self) -> None:
        inputs, targets = next(self.draws).batch
        self.optimizer.zero_grad()
        self.criterion(self.model(inputs), targets).backward()
        self.optimizer.step()


class Plain(Method):
    name = "plain"


class Samplewise(Method):
    name = "samplewise"

    def prepare(self) -> None:
        self.step = sw.Step(self.model, self.optimizer, self.criterion, privacy=self.plan)
        self.updates = self.step.over(self.draws)

    def remove_noise(self) -> None:
        object.__setattr__(self.plan, "noise_multiplier", 1e-12)  # a plan is frozen, and 0 is no plan

    def update(self) -> None:
        next(self.updates)


class Loop(Method):
    """Backward passes of single samples, without noise: the reference for correctness."""

    name = "loop"

    def update(self) -> None:
        parameters = list(self.network.parameters())
        self.optimizer.zero_grad()
        for inputs, target in zip(*(column.split(1) for column in next(self.draws).batch), strict=True):
            rows = torch.autograd.grad(self.criterion(self.network(inputs), target), parameters)
            scale = (SETTINGS.clip / nn.utils.get_total_norm(rows)).clamp(max=1) / self.batch
            for parameter, row in zip(parameters, rows, strict=True):
                parameter.grad = row * scale if parameter.grad is None else parameter.grad + row * scale
        self.optimizer.step()


class OpacusHooks(Method):
    name = "Opacus hooks"

    def prepare(self) -> None:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        self.model = GradSampleModule(self.network)
        self.optimizer = DPOptimizer(self.optimizer, **self.mechanism(), expected_batch_size=self.batch)

    def mechanism(self) -> dict[str, float]:
        return {"noise_multiplier": SETTINGS.noise, "max_grad_norm": SETTINGS.clip}


class OpacusGhost(OpacusHooks):
    name = "Opacus ghost"

    def prepare(self) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        wrapped = GradSampleModuleFastGradientClipping(self.network, max_grad_norm=SETTINGS.clip)
        optimizer = DPOptimizerFastGradientClipping(self.optimizer, **self.mechanism(), expected_batch_size=self.batch)
        self.criterion = DPLossFastGradientClipping(wrapped, optimizer, self.criterion)
        self.model = wrapped
        self.optimizer = optimizer


METHODS = {method.name: method for method in (Plain, Samplewise, OpacusHooks, OpacusGhost)}
PRIVATE = list(METHODS)[1:]


def is_right(name: str, layout: str) -> bool:
    """Compare the parameters after one update without noise with those of the loop over samples."""
    torch.manual_seed(0)
    data = noise_images(64)
    found, expected = (method(layout, data, batch=32, draws=1) for method in (METHODS[name], Loop))
    found.remove_noise()
    for method in (found, expected):
        method.update()
    pairs = zip(found.network.parameters(), expected.network.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


# --------------------------------------------------------------------------------------------------------------- tables


def private(options: Options) -> Iterator[Table]:
    yield time_table(options)
    yield memory_table(options)


def time_table(options: Options) -> Table:
    rows = [["", *(head for layout in LAYOUTS for head in (f"{layout}, s", "over plain"))]]
    for name in PRIVATE if options.peers else PRIVATE[:1]:
        found = [isolated.call(__file__, "--time", layout, name, 1, options.rounds) for layout in LAYOUTS]
        print(f"private: {name}: {found}", file=sys.stderr)
        if name == PRIVATE[0]:
            rows.append(["plain", *(cell for one in found for cell in (one[0], "1"))])
        rows.append([name, *(cell for one in found for cell in one[1:])])
    unit = "Processor seconds, and multiples of a plain update next to each private one."
    return Table("private-time", "Time of an update", rows, f"{unit} {options.caption(1)}")


def timed(layout: str, name: str, threads: int, rounds: int) -> tuple[str, str, str]:
    """Median seconds of a plain update, of a private one, and median ratio of neighbors, as text. One method per
    process: hooks of Opacus's modules would make samplewise verify its gradients again in every update.
    """
    torch.set_num_threads(threads)
    data = noise_images(SAMPLES)
    methods = [method(layout, data, draws=WARM + rounds) for method in (Plain, METHODS[name])]
    # Without clipping, the learning rate saturates the network within a few updates, and max pooling of saturated
    # images is faster: its branches are predicted. All methods are timed with the initial parameters.
    for method in methods:
        method.optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(WARM):
        for method in methods:
            method.update()
    plain, private = methods
    found = interleaved(f"{name}, {layout}", plain.update, {name: private.update}, rounds, time.process_time)[name]
    wrong = "" if is_right(name, layout) else ", wrong"
    return f"{found.plain_median:.3f}", f"{found.median:.3f}", f"{found.ratio:.2f}{wrong}"


def memory_table(options: Options) -> Table:
    rows = [["", *(f"{layout}, MB" for layout in LAYOUTS)]]
    for name in METHODS if options.peers else (Plain.name, PRIVATE[0]):
        peaks = [isolated.call(__file__, "--peak", layout, name, 1) for layout in LAYOUTS]
        rows.append([name, *(f"{peak / 1e6:.0f}" for peak in peaks)])
    caption = "Peak memory of two updates above the memory before them."
    return Table("private-memory", "Peak memory of an update", rows, caption)


def peak(layout: str, name: str, threads: int) -> int:
    """Peak memory in bytes of two updates, above the memory before them."""
    torch.set_num_threads(threads)
    METHODS[name](layout, noise_images(64), batch=8, draws=2).update()  # loads the kernels
    return peak_above_start(METHODS[name](layout, noise_images(SAMPLES), draws=2).update)


def epsilon_table() -> Table:
    from opacus.accountants import create_accountant
    from opacus.accountants.utils import get_noise_multiplier

    rate, updates, delta = SETTINGS.batch / SAMPLES, SETTINGS.updates, SETTINGS.delta
    rows = [["", f"epsilon of noise {SETTINGS.noise}", "noise for epsilon 3", "its epsilon, by PLD"]]

    def by_pld(noise: float) -> float:
        return epsilon(Releases(noise, rate, updates), delta)

    for accountant in ("pld", "rdp"):
        noise = calibrate(3.0, delta, rate, updates, accountant)
        found = epsilon(Releases(SETTINGS.noise, rate, updates), delta, accountant)
        rows.append([f"samplewise, {accountant.upper()}", f"{found:.4f}", f"{noise:.4f}", f"{by_pld(noise):.4f}"])
    for accountant in ("prv", "rdp"):
        theirs = create_accountant(accountant)
        theirs.history = [(SETTINGS.noise, rate, updates)]
        target = {"target_epsilon": 3.0, "target_delta": delta, "sample_rate": rate, "steps": updates}
        noise = get_noise_multiplier(**target, accountant=accountant)
        found = theirs.get_epsilon(delta)
        rows.append([f"Opacus, {accountant.upper()}", f"{found:.4f}", f"{noise:.4f}", f"{by_pld(noise):.4f}"])
    notes = (f"rate {SETTINGS.batch}/{SAMPLES}, {updates} updates, delta {delta:g}",)
    return Table("private-epsilon", "Accountants", rows, notes=notes)


def accuracy_table(options: argparse.Namespace) -> Table:
    training, test = example.fashion()
    rows = [["", *(f"seed {seed}" for seed in range(options.seeds)), "mean ± sd"]]
    for name in options.methods or PRIVATE:
        found = [trained(name, seed, options.updates, training, test) for seed in range(options.seeds)]
        percent = [100 * one for one in found]
        spread = statistics.stdev(percent) if len(percent) > 1 else 0.0
        rows.append([name, *(f"{one:.2f}" for one in percent), f"{statistics.mean(percent):.2f} ± {spread:.2f}"])
    return Table("private-accuracy", f"Test accuracy after {options.updates} updates, in percent", rows)


def trained(name: str, seed: int, updates: int, training: Data, test: Data) -> float:
    method = METHODS[name]("contiguous", training, seed=seed)
    for _ in range(updates):
        method.update()
    found = example.accuracy(method.network, test, SETTINGS)
    print(f"{name}, seed {seed}, {updates} updates: {found:.2%}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="table", help="any of epsilon, accuracy; default: epsilon")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--methods", nargs="+", choices=PRIVATE, help="of the table accuracy; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.tables or ("epsilon",):
        print(accuracy_table(options) if name == "accuracy" else epsilon_table(), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["--peak"]:
        print(json.dumps(peak(*sys.argv[2:4], *map(int, sys.argv[4:]))))
    elif sys.argv[1:2] == ["--time"]:
        print(json.dumps(timed(*sys.argv[2:4], *map(int, sys.argv[4:]))))
    else:
        main()
