"""A training run with random settings that may be killed at any moment.

python random_run.py DIRECTORY SEED SECONDS: trains to the end, resuming whatever is there, and writes the parameters
and the time taken. SEED chooses the settings. After SECONDS seconds, the process kills itself; never if negative.
"""

import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from busy_process import Evaluation, Hooks, SecondModel, accuracy
from torch import nn
from torch.utils.data import DataLoader, Dataset

import samplewise as sw
from samplewise.loop.callbacks import ModelCheckpoint

SAMPLES = 26
EPOCHS = 3
PRIVATE_UPDATES = 12


# Bytes for which automatic microbatches have less than 9 samples, but more than 1.
BUDGETS = {"mlp": [1000], "norms": [1000], "convolution": [2000], "attention": [20_000], "routed": [500]}
PLANS = [{}, {"adaptive": 0.5}, {"clip": {"by": "parameter"}}, {"clip": {"mode": "automatic"}}]


def settings(seed):
    """Random settings of a run, as plain values."""
    draw = random.Random(seed)

    def sometimes(share=0.5):
        return draw.random() < share

    private = sometimes(0.35)
    model = draw.choice(["mlp", "norms", "convolution", "lstm", "attention", "routed"])
    chosen = {
        "private": private,
        "model": model,
        "double": model != "lstm" and sometimes(0.3),  # torch has a fused LSTM kernel for float32 only
        "optimizer": draw.choice(["sgd", "momentum", "adamw"]),
        "scheduler": sometimes(),
        "max_grad_norm": draw.choice([None, None, 0.5]),
        "microbatch": draw.choice([None, 1, 3, 4, *BUDGETS.get(model, ())]),
        "recheck": draw.choice([None, 3]) if private else draw.choice([None, False, 3]),
        "checkpoint": draw.choice(["1up", "2up", "5up", "1ep"]),
        "metrics": sometimes(0.8),
        "validate": sometimes(0.8),
        "workers": draw.choice([0, 0, 0, 0, 1]),
        "callbacks": [name for name in ("hooks", "evaluation", "second model") if sometimes()],
    }
    if private:
        return chosen | {"plan": draw.choice(PLANS), "transforms": "none"}
    transforms = draw.choice([*TRANSFORMS, "clip", "none"])
    of_windows = transforms in ("drop", "normalize")
    return chosen | {
        "samples": draw.choice([7, 9] if of_windows else [None, 1, 7, 9]),
        "batch": draw.choice([5, 8]),
        "tail": "drop" if of_windows else draw.choice(["update", "drop", "carry"]),
        "transforms": transforms,
        "precision": draw.choice([None, None, None, "bf16-mixed"]) if model in ("mlp", "norms") else None,
        "compile": draw.choice([None, None, None, "interpreted", "interpreted", "inductor"]),
        "ledger": sometimes(),
        "record": ["norms"] if sometimes(0.3) else [],
        "hook stays": sometimes(),
    }


# --- model and data --------------------------------------------------------------------------------------------------


class Augmented(Dataset):
    def __init__(self, dtype):
        self.dtype = dtype

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        own = torch.Generator().manual_seed(int(i))
        x = torch.randn(6, generator=own) + 0.1 * torch.randn(6)  # the second is the augmentation
        return x.to(self.dtype), int(i) % 3


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(2, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.layer(x.view(-1, 3, 2))[0][:, -1])


class Attention(nn.Module):
    """Tokens with an embedding that is tied to the head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.1, batch_first=True)

    def forward(self, x):
        hidden = self.layer(self.embedding(x.mul(2).round().long().clamp(-4, 3) + 4))
        return F.linear(hidden.mean(1), self.embedding.weight[:3])


class Routed(nn.Module):
    """Two experts; the data decide which one a sample goes to, so that ownership is probed."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.experts = nn.ModuleList([nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))])

    def forward(self, x):
        first = x[:, 0] > 0
        hidden = self.enter(x)
        chosen = [expert(hidden[rows]) for expert, rows in zip(self.experts, (first, ~first), strict=True)]
        return torch.cat(chosen)[torch.cat([first.nonzero(), first.logical_not().nonzero()]).flatten().argsort()]


def make_model(name):
    if name == "convolution":
        layers = nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.Tanh(), nn.Conv2d(4, 4, (2, 1), groups=2)
        )
        return nn.Sequential(layers, nn.Flatten(), nn.Linear(32, 3)).to(memory_format=torch.channels_last)
    made = {
        "mlp": lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3)),
        "norms": lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.PReLU(), nn.Linear(8, 8), nn.Linear(8, 3)),
        "lstm": Lstm,
        "attention": Attention,
        "routed": Routed,
    }
    return made[name]()


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


TRANSFORMS = {
    "none": list,
    "clip": lambda: [sw.clip(0.5)],
    "clip of parameters": lambda: [sw.clip(0.5, by="parameter")],
    "normalize": lambda: [sw.normalize()],
    "weight": lambda: [sw.weight(lambda losses: losses.clamp(max=1.0)), sw.clip(1.0)],
    "drop": lambda: [sw.drop(largest=1)],
    "noise": lambda: [sw.clip(0.5), sw.noise(0.1)],
}


# --- the run ---------------------------------------------------------------------------------------------------------


def make_step(chosen, dtype):
    torch.manual_seed(0)
    model = make_model(chosen["model"])
    model.to(dtype)
    optimizers = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    }
    optimizer = optimizers[chosen["optimizer"]](model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30) if chosen["scheduler"] else None
    size = chosen["microbatch"]
    options = {
        "microbatch": sw.auto(size) if size is not None and size > 100 else size,
        "max_grad_norm": chosen["max_grad_norm"],
        "recheck": chosen["recheck"],
        "scheduler": scheduler,
        "transforms": TRANSFORMS[chosen["transforms"]](),
    }
    data = Augmented(dtype)
    if chosen["private"]:
        plan = {"noise_multiplier": 1.0, "delta": 1e-3, "updates": PRIVATE_UPDATES, "sample_rate": 0.25, "seed": 3}
        clip = sw.clip(0.5, **chosen["plan"].get("clip", {}))
        privacy = sw.Privacy(**plan, clip=clip, adaptive=chosen["plan"].get("adaptive"), accountant="rdp")
        loader = privacy.loader(data, num_workers=chosen["workers"])
        return model, loader, sw.Step(model, optimizer, nn.CrossEntropyLoss(), privacy=privacy, **options)
    for name in ("samples", "tail", "precision", "record"):
        options[name] = chosen[name]
    data = sw.Indexed(data) if chosen["ledger"] else data
    loader = DataLoader(data, batch_size=chosen["batch"], shuffle=True, num_workers=chosen["workers"])
    return model, loader, sw.Step(model, optimizer, loss_fn, compile=bool(chosen["compile"]), **options)


def compile_at_any_speed(how):
    from samplewise.step.compiled import inductor, program_cache

    program_cache.refuse_library_bound = program_cache.refuse_slower = lambda *_: None
    if how == "interpreted":  # Inductor takes seconds
        inductor.compile_graph = lambda graph, inputs, threads: lambda flat: graph(*flat)


def main(directory, seed):
    started = time.monotonic()
    chosen = settings(seed)
    if chosen.get("compile"):
        compile_at_any_speed(chosen["compile"])
    dtype = torch.float64 if chosen["double"] else torch.float32
    model, loader, step = make_step(chosen, dtype)
    made = {
        "hooks": lambda: Hooks(chosen.get("hook stays", True)),
        "evaluation": lambda: Evaluation(Augmented(dtype)),
        "second model": SecondModel,
    }
    callbacks = [made[name]() for name in chosen["callbacks"]]
    if chosen.get("ledger"):
        callbacks.append(sw.Ledger(rows_per_file=20))
    callbacks.append(ModelCheckpoint(every=chosen["checkpoint"]))
    metrics = {"accuracy": accuracy} if chosen["metrics"] else {}
    trainer = sw.Trainer(
        step, directory, callbacks, metrics=metrics, log_every="2up", progress=False, seed=3, device="cpu"
    )
    validation = DataLoader(Augmented(dtype), batch_size=16) if chosen["validate"] else None
    trainer.fit(loader, validation, resume=True, **({} if chosen["private"] else {"epochs": EPOCHS}))
    torch.save([p.detach() for p in model.parameters()], directory / "parameters.pt")
    (directory / "seconds.json").write_text(json.dumps(time.monotonic() - started))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if float(sys.argv[3]) >= 0:
        threading.Timer(float(sys.argv[3]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    main(Path(sys.argv[1]), int(sys.argv[2]))
