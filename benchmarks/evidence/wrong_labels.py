"""Wrong labels of the MNIST test set that people found: in the first 100 of samplewise, and of cleanlab.

    python benchmarks/evidence/wrong_labels.py DIRECTORY [--write docs/evidence.md]

DIRECTORY must have the test set, mnist-t10k-images-idx3-ubyte.gz and mnist-t10k-labels-idx1-ubyte.gz (the files of
LeCun, Cortes and Burges, with "mnist-" before their names), and mnist-mturk.json, which is mturk/mnist_mturk.json of
the repository cleanlab/label-errors: the votes of five people each on 100 images. Needs `pip install cleanlab`.

A label counts as wrong if fewer than three of the five chose it; 15 of the 100 are. The other 9,900 labels count as
right, although nobody looked at them. The 100 were chosen by a method of cleanlab (confident learning), which favors
cleanlab: a wrong label that it did not question cannot count.

The CNN of benchmarks/dynamics.py is trained on the 10,000 images for 10 epochs. samplewise ranks by what its ledger
recorded during this training; cleanlab by predictions of five models for images that they were not trained on, which
samplewise also ranks, for comparison.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import mean, median

from record import Record, Table, Values, machine, parser, show

# isort: split
# Below, because record adds the directories of these modules to the path.
import torch
from dynamics import Case, Data, held_out_probabilities
from dynamics import record as train_with_ledger
from fashion_mnist import load
from torch import Tensor

import samplewise as sw

CASE = Case("mnist", "none", 0.0, epochs=10)
FIRST = 100
VOTES = 3  # of five, for a label that counts as right


def votes(path: Path, labels: Tensor) -> tuple[set[int], set[int]]:
    """Images with wrong labels, and all images that people looked at."""
    images = json.loads(path.read_text())
    if any(labels[image["id"]] != image["given_original_label"] for image in images):
        raise ValueError(f"{path} must have votes on the labels of the MNIST test set; found other labels.")
    wrong = {image["id"] for image in images if image["mturk"]["given"] < VOTES}
    return wrong, {image["id"] for image in images}


def during_training(data: Data, seed: int) -> dict[str, Iterable[int]]:
    with tempfile.TemporaryDirectory() as directory:
        train_with_ledger(CASE, *data, seed, Path(directory), norms=False)
        rankings = {
            "`sw.dynamics`, suspicion": sw.dynamics(directory),
            "`sw.suspects`, mean margin": sw.suspects(directory),
            "`sw.suspects`, mean loss": sw.suspects(directory, score="loss"),
        }
    return {name: ranking.top(len(data[1])).tolist() for name, ranking in rankings.items()}


def held_out(data: Data, seed: int) -> dict[str, Iterable[int]]:
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    labels, probabilities = data[1], held_out_probabilities(CASE, *data, seed)
    issues = find_label_issues(labels.numpy(), probabilities, return_indices_ranked_by="self_confidence")
    logits = torch.from_numpy(probabilities).log()
    others = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    visits = {"id": torch.arange(len(labels)), "margin": logits.gather(1, labels[:, None])[:, 0] - others}
    return {
        "cleanlab, label quality score": get_label_quality_scores(labels.numpy(), probabilities).argsort().tolist(),
        "cleanlab, `find_label_issues`": issues.tolist(),
        "`sw.suspects`, margin": sw.suspects(visits).top(len(labels)).tolist(),
    }


def run(rank: partial[dict[str, Iterable[int]]], wrong: set[int], looked_at: set[int]) -> Values:
    """For each ranking: the places of the wrong labels, from 1, and those of all images that people looked at."""
    return {
        name: {"wrong": places(ranking, wrong), "looked at": places(ranking, looked_at)}
        for name, ranking in rank().items()
    }


def places(ranking: Iterable[int], images: set[int]) -> list[int]:
    return [place for place, image in enumerate(ranking, 1) if image in images]


def main() -> None:
    arguments = parser(__doc__, "wrong_labels")
    arguments.add_argument("directory", type=Path)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    record = Record(options.results)
    data = load("mnist-t10k", options.directory)
    wrong, looked_at = votes(options.directory / "mnist-mturk.json", data[1])
    header = ["predictions", "ranking", f"wrong labels in the first {FIRST}", "each seed", "other images of the 100"]
    rows = [[*header, "CPU time"]]
    for title, method in (("during training", during_training), ("held out, five trainings", held_out)):
        keys = [f"{method.__name__}, seed {seed}" for seed in options.seeds]
        runs = [
            record.run(key, partial(run, partial(method, data, seed), wrong, looked_at))
            for key, seed in zip(keys, options.seeds, strict=True)
        ]
        seconds = median(record.seconds(key) for key in keys)
        for name in runs[0]:
            found = [first(values[name]["wrong"]) for values in runs]
            others = mean(first(values[name]["looked at"]) for values in runs) - mean(found)
            each = ", ".join(map(str, found))
            rows.append([title, name, f"{mean(found):.1f} of {len(wrong)}", each, f"{others:.1f}", f"{seconds:.0f} s"])
    caption = f"Seeds: {', '.join(map(str, options.seeds))}; means; CPU time of one seed; {machine()}."
    show(Table("evidence-wrong-labels", "Wrong labels found by people", rows, caption), options.write)


def first(places: list[int]) -> int:
    return sum(place <= FIRST for place in places)


if __name__ == "__main__":
    main()
