"""Influence scores beside those of kronfluence and captum: differences, and seconds in the same run.

    pip install kronfluence==1.0.1 captum==0.9.0             # into an environment of their own, with torch 2.13.0
    python benchmarks/attribution_peers.py                   # both
    python benchmarks/attribution_peers.py kronfluence --train 5000 --queries 500 --rounds 3

An MLP 784-128-64-10 on Fashion-MNIST (see examples/fashion_mnist.py), trained for a few epochs, one thread. Exits with
an error if identity scores differ from kronfluence's by more than 1e-5 of the largest, EK-FAC scores correlate with
kronfluence's by less than 0.999, TracIn differs from captum's TracInCP by more than 1e-6 of the largest, or fit and
score together take more than half of kronfluence's time.
"""

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

import samplewise as sw

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from fashion_mnist import load

BATCH = 500


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", default=["kronfluence", "captum"])
    parser.add_argument("--train", type=int, default=5000)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, queries = data("train", options.train), data("t10k", options.queries)
    model, checkpoints = trained(train)
    failures = []
    if "kronfluence" in options.peers:
        failures += beside_kronfluence(model, train, queries, options.rounds)
    if "captum" in options.peers:
        few = Subset(train, range(min(1000, len(train)))), Subset(queries, range(min(100, len(queries))))  # it is slow
        failures += beside_captum(model, checkpoints, *few)
    if failures:
        sys.exit("\n".join(failures))


def data(part, samples):
    x, y = load(part)
    return TensorDataset(x[:samples].flatten(1), y[:samples])


def trained(train, epochs=5):
    """The model after training, and (state_dict, lr) after each epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    checkpoints = []
    for _ in range(epochs):
        for x, y in DataLoader(train, 64, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        checkpoints.append((copy.deepcopy(model.state_dict()), 0.01))
    return model, checkpoints


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


# --- kronfluence ---------------------------------------------------------------------------------------------------


def beside_kronfluence(model, train, queries, rounds):
    ours, theirs = [], []
    for _ in range(rounds):  # alternating, because the machine is shared
        theirs.append(of_kronfluence(model, train, queries, "ekfac"))
        ours.append(of_samplewise(model, train, queries))
    identity = of_kronfluence(model, train, queries, "identity")[0]
    products = sw.influence(model, losses, DataLoader(train, BATCH), DataLoader(queries, BATCH))
    difference = relative_difference(products, identity)
    correlation = torch.corrcoef(torch.stack([ours[0][0].flatten(), theirs[0][0].flatten()]))[0, 1].item()
    fit, score, their_fit, their_score = (min(run[i] for run in runs) for runs in (ours, theirs) for i in (1, 2))
    ratio = min((a[1] + a[2]) / (b[1] + b[2]) for a, b in zip(ours, theirs, strict=True))
    print(f"identity, largest difference from kronfluence / largest score   {difference:.1e}")
    print(f"EK-FAC (empirical Fisher), correlation with kronfluence         {correlation:.6f}")
    print(f"EK-FAC seconds, fit and score: samplewise                       {fit:.1f} + {score:.1f}")
    print(f"                               kronfluence                      {their_fit:.1f} + {their_score:.1f}")
    print(f"                               ratio                            {ratio:.2f}")
    return [
        *(["identity differs from kronfluence's"] if difference > 1e-5 else []),
        *(["EK-FAC differs from kronfluence's"] if correlation < 0.999 else []),
        *(["EK-FAC takes more than half of kronfluence's time"] if ratio > 0.5 else []),
    ]


def of_samplewise(model, train, queries):
    """EK-FAC scores (queries, training samples), seconds of the fit, seconds of the scores."""
    start = time.perf_counter()
    curvature = sw.ekfac(model, losses, DataLoader(train, BATCH), labels="data")
    fitted = time.perf_counter()
    scores = sw.influence(model, losses, DataLoader(train, BATCH), DataLoader(queries, BATCH), curvature=curvature)
    return scores, fitted - start, time.perf_counter() - fitted


def of_kronfluence(model, train, queries, strategy):
    """Scores (queries, training samples), seconds of the fit, seconds of the scores."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Classification(Task):
        def compute_train_loss(self, batch, model, sample=False):
            return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

        def compute_measurement(self, batch, model):
            return self.compute_train_loss(batch, model)

    task = Classification()
    with tempfile.TemporaryDirectory() as directory:
        prepared = prepare_model(copy.deepcopy(model), task)
        analyzer = Analyzer("mlp", prepared, task, cpu=True, disable_tqdm=True, output_dir=directory)
        start = time.perf_counter()
        arguments = FactorArguments(strategy=strategy, use_empirical_fisher=True)
        analyzer.fit_all_factors("factors", train, per_device_batch_size=BATCH, factor_args=arguments)
        fitted = time.perf_counter()
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            queries,
            train,
            per_device_query_batch_size=BATCH,
            per_device_train_batch_size=BATCH,
            score_args=ScoreArguments(damping_factor=None),
        )
        end = time.perf_counter()
        scores = analyzer.load_pairwise_scores("scores")["all_modules"]
    return scores, fitted - start, end - fitted


# --- captum --------------------------------------------------------------------------------------------------------


def beside_captum(model, checkpoints, train, queries):
    from captum.influence import TracInCP

    start = time.perf_counter()
    ours = sw.influence(model, losses, DataLoader(train, BATCH), DataLoader(queries, BATCH), checkpoints)
    middle = time.perf_counter()
    rates = dict(enumerate(rate for _, rate in checkpoints))

    def load_checkpoint(model, number):
        model.load_state_dict(checkpoints[number][0])
        return rates[number]

    tracer = TracInCP(
        copy.deepcopy(model),
        train,
        list(rates),
        load_checkpoint,
        loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        batch_size=BATCH,
        sample_wise_grads_per_batch=True,
    )
    theirs = tracer.influence(tuple(default_collate(list(queries))))
    end = time.perf_counter()
    difference = relative_difference(ours, theirs)
    print(f"TracIn, largest difference from captum / largest score          {difference:.1e}")
    print(f"TracIn over {len(checkpoints)} checkpoints, seconds: samplewise, captum", end="        ")
    print(f"{middle - start:.1f}, {end - middle:.1f}")
    return ["TracIn differs from captum's"] if difference > 1e-6 else []


def relative_difference(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


if __name__ == "__main__":
    main()
