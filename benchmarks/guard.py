"""Training with 1 % corrupted samples: without them, without protection, with batch clipping, with sw.guard; and the
cost of the guard.

    python benchmarks/guard.py digits 5     # or text; the number of seeds
    python benchmarks/guard.py kinds        # each kind of corruption alone, on digits
    python benchmarks/guard.py cost

A third of the corrupted samples have a shuffled label (text: shuffled targets), a third is multiplied by 1,000 (text:
its loss is, as with a wrong weight), and a third is NaN (text: its loss is). "found" is the share of their ids in
quarantine.jsonl, by kind; "false" the share of other ids. The final loss is that of clean held-out samples.
"""

import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from time import process_time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import samplewise as sw

SEEDS = range(5, 15)  # 0 to 4 were used to write the script
KINDS = ("label", "scale", "nan")


def digits(seed):
    from sklearn.datasets import load_digits

    x, y = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    x, y = x.float()[order] / 16, y[order]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def corrupt(x, y, ids, kind, generator):
        if kind == "label":
            y[ids] = (y[ids] + torch.randint(1, 10, (len(ids),), generator=generator)) % 10
        else:
            x[ids] = x[ids] * 1000 if kind == "scale" else torch.nan

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return model, loss_fn, (x[:1500], y[:1500]), (x[1500:], y[1500:]), corrupt, 15


class CausalLM(nn.Module):
    """Transformer with one layer that predicts the next of 24 characters."""

    def __init__(self, size=32, length=24):
        super().__init__()
        self.token = nn.Embedding(28, size)
        self.place = nn.Parameter(torch.randn(length, size) * 0.02)
        self.layer = nn.TransformerEncoderLayer(size, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(size, 28)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens):
        return self.out(self.layer(self.token(tokens) + self.place, src_mask=self.mask, is_causal=True))


def text(seed):
    """Sentences of a random grammar: words of 4 to 6 letters, the next one of two that can follow."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*arguments):
        return torch.randint(*arguments, generator=generator)

    words = [draw(1, 27, (int(draw(4, 7, ())),)).tolist() for _ in range(20)]
    follows = draw(0, 20, (20, 2)).tolist()
    rows = []
    for _ in range(2500):
        word, row = int(draw(0, 20, ())), []
        while len(row) < 25:
            row += [*words[word], 0]
            word = follows[word][int(draw(0, 2, ()))]
        rows.append(row[:25])
    tokens = torch.tensor(rows)
    torch.manual_seed(seed)

    def corrupt(factor, tokens, ids, kind, generator):
        if kind == "label":
            tokens[ids] = torch.randint(0, 27, tokens[ids].shape, generator=generator)
        else:
            factor[ids] = 1000.0 if kind == "scale" else torch.nan

    def loss_fn(model, batch):
        losses = F.cross_entropy(model(batch[1][:, :-1]).transpose(1, 2), batch[1][:, 1:], reduction="none")
        return losses.sum(1) * batch[0], torch.full((len(losses),), 24.0)

    ones = torch.ones(2500)
    return CausalLM(), loss_fn, (ones[:2000], tokens[:2000]), (ones[2000:], tokens[2000:]), corrupt, 8


METHODS = {
    "without the corrupted samples": {"clean": True},
    "no protection, NaN updates skipped": {},
    "batch clipping": {"max_grad_norm": 1.0},
    "sw.guard()": {"transforms": True},
    "sw.guard() and batch clipping": {"transforms": True, "max_grad_norm": 1.0},
}


def trained(task, seed, run, clean=False, transforms=False, max_grad_norm=None):
    model, loss_fn, train, test, corrupt, epochs = task(seed)
    train = tuple(column.clone() for column in train)
    generator = torch.Generator().manual_seed(1000 + seed)
    samples = len(train[0])
    chosen = torch.randperm(samples, generator=generator)[: samples // 100].chunk(3)
    ids = dict(zip(KINDS, (part.tolist() for part in chosen), strict=True))
    for kind in KINDS:
        corrupt(*train, torch.tensor(ids[kind]), kind, generator)
    corrupted = {k for kind in KINDS for k in ids[kind]}
    dataset = sw.Indexed(TensorDataset(*train))
    if clean:
        dataset = Subset(dataset, [k for k in range(samples) if k not in corrupted])
    step = sw.Step(
        model,
        torch.optim.Adam(model.parameters(), 3e-3),
        loss_fn,
        samples=50,
        transforms=[sw.guard()] if transforms else (),
        max_grad_norm=max_grad_norm,
        on_nonfinite="skip",
    )
    callbacks = [sw.callbacks.Quarantine()] if transforms else []
    trainer = sw.Trainer(step, run, callbacks, seed=seed, device="cpu", progress=False, exists="overwrite")
    trainer.fit(DataLoader(dataset, batch_size=50, shuffle=True), epochs=epochs)
    with torch.no_grad():
        losses = loss_fn(model, test)
    loss = float(losses[0].sum() / losses[1].sum() if isinstance(losses, tuple) else losses.mean())
    result = {"loss": loss, "skipped": step.counters.skipped}
    if transforms:
        lines = [json.loads(line) for line in Path(run, "quarantine.jsonl").read_text().splitlines()]
        named = {line["id"] for line in lines}
        result |= {kind: len(named & set(ids[kind])) / len(ids[kind]) for kind in KINDS}
        result["all"] = len(named & corrupted) / len(corrupted)
        result["false"] = len(named - corrupted) / (samples - len(corrupted))
    return result


def compare(task, seeds):
    print("| training | held-out loss | ratio | worst ratio | skipped | found: label | scale | nan | all | false |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    clean = []
    for name, options in METHODS.items():
        with tempfile.TemporaryDirectory() as directory:
            results = [trained(task, seed, Path(directory, str(seed)), **options) for seed in SEEDS[:seeds]]
        clean = clean or [result["loss"] for result in results]
        ratios = [result["loss"] / other for result, other in zip(results, clean, strict=True)]
        shares = [
            f"{100 * mean(result[column] for result in results):.3g} %" if column in results[0] else ""
            for column in (*KINDS, "all", "false")
        ]
        loss, skipped = (mean(result[column] for result in results) for column in ("loss", "skipped"))
        numbers = f"{loss:.4f} | {median(ratios):.3f} | {max(ratios):.3f} | {skipped:.0f}"
        print(f"| {name} | {numbers} | {' | '.join(shares)} |", flush=True)


def by_kind():
    """Held-out loss by kind of corruption, over that of the same training, in the same order, without corruption."""

    def only(kind):
        def task(seed):
            *parts, corrupt, epochs = digits(seed)
            return *parts, lambda x, y, ids, k, generator: k == kind and corrupt(x, y, ids, k, generator), epochs

        return task

    print("| corrupted | no protection | `sw.guard()` |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:

        def losses(kind, **options):
            runs = (Path(directory, f"{kind} {options} {seed}") for seed in range(5))
            return [trained(only(kind), seed, run, **options)["loss"] for seed, run in enumerate(runs)]

        expected = losses(None)
        for kind in (None, *KINDS):
            cells = [
                mean(a / b for a, b in zip(found, expected, strict=True))
                for found in (losses(kind), losses(kind, transforms=True))
            ]
            print(f"| {kind or 'none'} | {cells[0]:.3f} | {cells[1]:.3f} |", flush=True)


def cost():
    """Median CPU time of an update with guard over that with clip, interleaved, on one thread."""
    print("| model | update with `sw.clip` | `sw.guard` / `sw.clip` |")
    print("|---|---|---|")
    torch.set_num_threads(1)
    for name, make in MODELS.items():
        steps, batches = [], []
        for transform in (sw.clip(1e6), sw.guard(clip=0.99, drop=50.0)):
            torch.manual_seed(0)
            model, batch, loss_fn = make()
            steps.append(sw.Step(model, torch.optim.Adam(model.parameters(), 1e-4), loss_fn, transforms=[transform]))
            batches.append(batch)
        times = [[], []]
        for k in range(1500 if name.startswith("MLP 64") else 200):
            for i in (0, 1) if k % 2 else (1, 0):
                started = process_time()
                steps[i](batches[i])
                times[i].append(process_time() - started)
        clip, guard = (median(values[len(values) // 5 :]) for values in times)
        print(f"| {name} | {1e3 * clip:.2f} ms | {guard / clip:.3f} |", flush=True)


def vectors(*sizes, batch=64):
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), (torch.randn(batch, sizes[0]), torch.arange(batch) % 10), nn.CrossEntropyLoss()


def images():
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()),
        nn.Linear(32 * 196, 10),
    )
    return model, (torch.randn(64, 1, 28, 28), torch.arange(64) % 10), nn.CrossEntropyLoss()


def sentences():
    model, loss_fn, train, *_ = text(0)
    return model, (train[0][:64], train[1][:64]), loss_fn


MODELS = {
    "MLP 64-64-10, 64 samples": lambda: vectors(64, 64, 10),
    "MLP 256-512-512-10, 64 samples": lambda: vectors(256, 512, 512, 10),
    "CNN with 2 layers, 64 images 28×28": images,
    "transformer with 1 layer, 64 × 24 tokens": sentences,
}

if __name__ == "__main__":
    if sys.argv[1] in ("cost", "kinds"):
        cost() if sys.argv[1] == "cost" else by_kind()
    else:
        compare({"digits": digits, "text": text}[sys.argv[1]], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
