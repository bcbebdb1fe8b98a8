"""samplewise attribute."""

import hashlib
import html
import json
import re
import shutil
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from recipes import HEALTHY, command, one_line, process
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.attribution import attribution_results, subject
from samplewise.attribution.methods import METHODS
from samplewise.core.state import seed_everything
from samplewise.errors import CheckpointWarning

metagradient = sys.modules[sw.metagradient.__module__]
# The validation samples are others than those of training, some have a wrong label, and both loaders shuffle.
SPLIT = HEALTHY.replace(
    "    return loader, loader\n",
    "    z = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))\n"
    "    labels = (z[:, :3].argmax(1) + (torch.arange(30) % 10 == 0)) % 3\n"
    "    return loader, DataLoader(TensorDataset(z, labels), batch_size=7, shuffle=True)\n",
)
LDS = {
    "mean": 0.33,
    "standard_error": 0.01,
    "ceiling": 0.8,
    "queries": 30,
    "subsets": 50,
    "baselines": {"random": 0.0, "nearest pixels": 0.12},
}


def datasets():
    x, z = (torch.randn(n, 6, generator=torch.Generator().manual_seed(k)) for k, n in enumerate((60, 30)))
    labels = (z[:, :3].argmax(1) + (torch.arange(30) % 10 == 0)) % 3
    return TensorDataset(x, x[:, :3].argmax(1)), TensorDataset(z, labels)


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Directory with a recipe and its run of two epochs."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "recipe.py").write_text(SPLIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert command("train", "recipe.py", "--epochs", 2, "--device", "cpu").exit_code == 0
    return directory


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the recipe and its run in the working directory."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return Path("runs/recipe")


def attribute(*arguments, recipe="recipe.py"):
    return command("attribute", recipe, "--device", "cpu", *arguments)


def scores(directory):
    """Scores (queries, samples), the queries in the order of the file; it must be sorted."""
    table = pq.read_table(Path(directory, "scores.parquet"))
    assert table.column_names == ["query", "sample", "score"]
    rows = {}
    for query, sample, score in zip(*(column.to_pylist() for column in table.columns), strict=True):
        rows.setdefault(query, {})[sample] = score
    for row in rows.values():
        assert list(row.values()) == sorted(row.values(), reverse=True)
    return list(rows), torch.tensor([[row[sample] for sample in sorted(row)] for row in rows.values()])


def page_text(directory):
    """Visible text of the page; parts are separated by |."""
    page = Path(directory, "attribution.html").read_text()
    return re.sub(r"[|\s]*\|[|\s]*", "|", html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", "|", page, flags=re.S)))


def settings(directory):
    return json.loads(Path(directory, "attribution.json").read_text())


def checkpoints(run):
    paths = sorted(Path(run, "checkpoints").glob("*.ckpt"))
    return [(sw.load_checkpoint(path)["model"], 0.5) for path in paths]


def test_scores_are_those_of_influence(run):
    result = attribute("--queries", "0, 3-5,4,29")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "scores  runs/recipe/attribution/scores.parquet",
        "page    runs/recipe/attribution/attribution.html",
    ]
    queries, found = scores(run / "attribution")
    assert queries == [0, 3, 4, 5, 29]
    train, validation = datasets()
    expected = sw.influence(
        network(),
        nn.CrossEntropyLoss(),
        DataLoader(train, batch_size=60),
        [tuple(each[queries] for each in validation.tensors)],
        checkpoints(run),
    )
    assert found.shape == (5, 60)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_settings_name_checkpoints_and_hold_checksums(run):
    attribute("--queries", "1,2", "--to", "there/results")
    found = settings("there/results")
    assert (found["method"], found["queries"], found["training samples"]) == ("influence", [1, 2], 60)
    assert [Path(each["path"]).name for each in found["checkpoints"]] == [
        "update-000000003.ckpt",
        "update-000000006.ckpt",
    ]
    assert found["weights"] == [0.5, 0.5]
    assert len({each["sha256"] for each in found["checkpoints"]}) == 2
    content = Path("there/results/scores.parquet").read_bytes()
    assert found["sha256"] == {"scores.parquet": hashlib.sha256(content).hexdigest()}
    assert not (run / "attribution").exists()


@pytest.mark.parametrize("form", ["number", "path"])
def test_one_checkpoint_counts_once(run, form):
    newest = max((run / "checkpoints").iterdir())
    attribute("--queries", "0", *(("--checkpoints", 1) if form == "number" else ("--run", newest)))
    _, found = scores(run / "attribution")
    train, validation = datasets()
    model = network()
    model.load_state_dict(sw.load_checkpoint(newest)["model"])
    queries = [tuple(each[:1] for each in validation.tensors)]
    expected = sw.influence(model, nn.CrossEntropyLoss(), DataLoader(train, batch_size=60), queries)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def batches():
    """All training samples as one batch, and the first two validation samples."""
    train, validation = datasets()
    return [train.tensors], [tuple(each[:2] for each in validation.tensors)]


def trained_network(path):
    model = network()
    model.load_state_dict(sw.load_checkpoint(path)["model"])
    return model


@pytest.mark.parametrize("damping", [None, 0.5])
def test_scores_are_those_of_ekfac(run, damping):
    given = () if damping is None else ("--damping", damping)
    assert attribute("--queries", "0-1", "--method", "ekfac", *given).exit_code == 0
    _, found = scores(run / "attribution")
    model, loss = trained_network(run), nn.CrossEntropyLoss()
    train, queries = batches()
    loader = DataLoader(datasets()[0], batch_size=20)
    curvature = sw.ekfac(model, loss, loader)
    expected = sw.influence(model, loss, train, queries, curvature=curvature, damping=damping)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    about = settings(run / "attribution")
    assert (about["method"], about["labels"], len(about["checkpoints"])) == ("ekfac", "expected", 1)
    assert about["damping"] == (damping or 0.1)


def test_ekfac_uses_the_labels_of_the_data_if_none_can_be_drawn(run):
    add_loss("F.cross_entropy(model(batch[0]), batch[1], reduction='none', label_smoothing=0.1)")
    assert attribute("--queries", "0-1", "--method", "ekfac").exit_code == 0
    assert settings(run / "attribution")["labels"] == "data"


@pytest.mark.parametrize(("damping", "limit"), [(None, 30), (0.5, 2)])
def test_scores_are_those_of_conjugate_gradients(run, damping, limit):
    given = () if damping is None else ("--damping", damping)
    result = attribute("--queries", "0-1", "--method", "ekfac", "--refine", limit, *given)
    assert result.exit_code == 0, result.stderr
    _, found = scores(run / "attribution")
    model, loss, (train, queries) = trained_network(run), nn.CrossEntropyLoss(), batches()
    curvature = sw.ekfac(model, loss, DataLoader(datasets()[0], batch_size=20))
    options = {"run": run} if damping is None else {"damping": damping}
    expected = sw.influence(model, loss, train, queries, curvature=curvature, refine=limit, **options)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    about = settings(run / "attribution")
    assert (about["refine"], about["iterations"] < limit) == (limit, damping is None)
    rule = (
        r"0\.333 = 1 / \(learning rate 0.5 \* 6 updates\)" if damping is None else r"\S+ = 0\.5 \* mean eigenvalue \S+"
    )
    assert re.fullmatch(rule, about["damping"])
    stopped = "The conjugate gradients stopped at the limit of iterations after 2 iterations, with a relative residual"
    assert (stopped in result.stderr) == (stopped in page_text(run / "attribution")) == (damping is not None)
    assert "|refine|" in page_text(run / "attribution")


@pytest.mark.parametrize("output", ["margin", "minus the loss"])
def test_scores_are_those_of_trak(run, output):
    if output == "minus the loss":
        add_loss("F.cross_entropy(model(batch[0]), batch[1], reduction='none', label_smoothing=0.1)")
    assert attribute("--queries", "0-1", "--method", "trak", "--dim", 8, "--damping", 0.1).exit_code == 0
    _, found = scores(run / "attribution")

    def minus_loss(model, batch):
        losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none", label_smoothing=0.1)
        return -losses, torch.ones_like(losses)

    models = [trained_network(path) for path in sorted((run / "checkpoints").iterdir())]
    expected = sw.trak(models, sw.attribution.margin if output == "margin" else minus_loss, *batches(), 8, damping=0.1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    about = settings(run / "attribution")
    assert (about["dim"], about["damping"], about["output"]) == (8, 0.1, output)
    assert ("raises the margin" if output == "margin" else "lowers the loss") in page_text(run / "attribution")


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.repeats])
def test_progress_ends_at_its_total(run, monkeypatch, method):
    shown = []

    @contextmanager
    def progress(total, description):
        shown.append([description, total, 0])

        def advance(parts):
            shown[-1][2] += parts

        yield advance

    monkeypatch.setattr(subject, "progress", progress)
    attribute("--queries", "0-24", "--method", method)  # two batches of queries
    assert [name for name, *_ in shown] == ["losses, batches", "scores, batches of training samples", "losses, batches"]
    assert all(done == total > 1 for _, total, done in shown)


def test_trak_of_several_runs(run):
    shutil.copytree(run, "runs/again")
    shutil.rmtree(min(Path("runs/again/checkpoints").iterdir()))
    shutil.rmtree(max((run / "checkpoints").iterdir()))
    found = attribute("--queries", "0", "--method", "trak", "--run", "runs/again", "--run", run)
    assert found.exit_code == 0
    about = settings("runs/again/attribution")
    assert [Path(each["path"]).name for each in about["checkpoints"]] == [
        "update-000000003.ckpt",
        "update-000000006.ckpt",
    ]
    assert about["dim"] == 15  # a quarter of the training samples
    assert "Attribution: again|TRAK at 2 checkpoints of recipe, again" in page_text("runs/again/attribution")


def add_loss(expression):
    """Add a loss function to the recipe in the working directory."""
    text = f"\nimport torch.nn.functional as F\n\n\ndef loss(model, batch):\n    return {expression}\n"
    Path("recipe.py").write_text(Path("recipe.py").read_text() + text)


def outcomes(run):
    """Losses of the validation samples, and which are misclassified, at the newest checkpoint."""
    model = network()
    model.load_state_dict(sw.load_checkpoint(run)["model"])
    z, labels = datasets()[1].tensors
    logits = model(z).detach()
    return nn.functional.cross_entropy(logits, labels, reduction="none"), logits.argmax(1) != labels


def test_worst_are_the_queries_of_highest_loss(run):
    attribute("--queries", "worst", "--limit", 4)
    losses, _ = outcomes(run)
    assert scores(run / "attribution")[0] == losses.argsort(descending=True)[:4].tolist()


def test_wrong_are_the_misclassified_queries(run):
    attribute("--queries", "wrong", "--limit", 1000)
    losses, wrong = outcomes(run)
    order = losses.argsort(descending=True)
    assert scores(run / "attribution")[0] == order[wrong[order]].tolist()
    assert 0 < wrong.sum() < 30


def test_the_page_shows_the_samples_of_highest_and_lowest_scores(run):
    attribute("--queries", "7,2", "--top", 3)
    _, found = scores(run / "attribution")
    page = page_text(run / "attribution")
    order = found[0].argsort(descending=True).tolist()
    shown = [int(number) for number in re.findall(r"sample (\d+)", page)]
    assert shown[:6] == [*order[:3], *order[:-4:-1]]
    assert len(shown) == 12
    losses, _ = outcomes(run)
    label = int(datasets()[1].tensors[1][7])
    assert f"|query 7|label {label} ●|predicted" in page
    shown_loss = float(re.search(r"\|query 7\|.*?\|loss\|([0-9.]+)\|", page)[1])
    assert shown_loss == pytest.approx(losses[7].item(), rel=1e-3)
    assert "Not measured." in page and "runs/recipe/evaluate/lds.json" in page


def test_few_training_samples_are_shown_once(run):
    attribute("--queries", "0", "--top", 40)
    page = page_text(run / "attribution")
    shown = re.findall(r"sample (\d+)", page)
    assert len(shown) == len(set(shown)) == 60


@pytest.mark.parametrize("place", ["default", "folder", "file"])
def test_measured_quality(run, place):
    folder = run / "evaluate" if place == "default" else Path("quality")
    folder.mkdir()
    (folder / "lds.json").write_text(json.dumps(LDS))
    given = {"default": (), "folder": ("--trust", folder), "file": ("--trust", folder / "lds.json")}[place]
    attribute("--queries", "0", *given)
    page = page_text(run / "attribution")
    assert "|measured scores|0.330 ± 0.010|" in page and "|noise ceiling|0.800|" in page
    assert "better than nearest pixels (0.12): they reach an LDS of 0.33, 41% of" in page
    assert settings(run / "attribution")["lds"] == LDS


def test_many_scores_are_cut_to_the_highest_and_lowest(run, monkeypatch):
    attribute("--queries", "0-1", "--to", "all")
    monkeypatch.setattr(attribution_results, "MAX_ROWS", 100)
    monkeypatch.setattr(attribution_results, "KEPT", 4)
    attribute("--queries", "0-1", "--to", "some")
    whole, cut = (pq.read_table(f"{name}/scores.parquet").to_pylist() for name in ("all", "some"))
    assert cut == [row for start in (0, 60) for row in (*whole[start : start + 4], *whole[start + 56 : start + 60])]


@pytest.mark.parametrize(
    "sampler",
    ["SubsetRandomSampler([40, 3, 17, 8])", "WeightedRandomSampler([k in (3, 8, 17, 40) for k in range(60)], 9)"],
)
def test_samples_that_a_sampler_never_draws_are_not_training_samples(recipe, sampler):
    text = SPLIT.replace("shuffle=True)\n    z", f"sampler={sampler})\n    z")
    text = text.replace("import DataLoader, ", f"import DataLoader, {sampler.partition('(')[0]}, ")
    command("train", recipe(text), "--device", "cpu")
    result = attribute("--queries", "0")
    assert (result.exit_code, result.stderr) == (0, "")
    assert sorted(pq.read_table("runs/recipe/attribution/scores.parquet")["sample"].to_pylist()) == [3, 8, 17, 40]


def test_random_augmentation_is_the_same_in_each_pass(recipe):
    text = SPLIT + (
        "\nclass Noisy(TensorDataset):\n"
        "    def __getitem__(self, i):\n"
        "        x, y = super().__getitem__(i)\n"
        "        return x + torch.randn(6), y\n"
    )
    text = text.replace("DataLoader(TensorDataset(x", "DataLoader(Noisy(x")
    command("train", recipe(text), "--device", "cpu")
    for name in ("first", "second"):
        attribute("--queries", "0-9", "--to", name)
    assert torch.equal(scores("first")[1], scores("second")[1])


def test_data_drawn_at_random_are_those_of_the_run(recipe):
    """Without a generator, the data depend on the seed of the run."""
    text = SPLIT.replace(", generator=torch.Generator().manual_seed(0)", "")
    command("train", recipe(text), "--device", "cpu", "--seed", 5)
    assert attribute("--queries", "0").exit_code == 0
    _, found = scores("runs/recipe/attribution")
    seed_everything(5)
    model = network()
    x = torch.randn(60, 6)
    model.load_state_dict(sw.load_checkpoint("runs/recipe")["model"])
    queries = [tuple(each[:1] for each in datasets()[1].tensors)]
    expected = sw.influence(model, nn.CrossEntropyLoss(), [(x, x[:, :3].argmax(1))], queries)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


TEXTS = """
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

WORDS = "pad a b c good bad fine poor film book".split()


class Tokenizer:
    def decode(self, ids, skip_special_tokens):
        return " ".join(WORDS[k] for k in ids)


class Collate:
    tokenizer = Tokenizer()

    def __call__(self, items):
        ids = torch.zeros(len(items), max(len(item["input_ids"]) for item in items), dtype=torch.long)
        for row, item in zip(ids, items):
            row[: len(item["input_ids"])] = torch.tensor(item["input_ids"])
        labels = torch.tensor([item["label"] for item in items])
        return {"input_ids": ids, "attention_mask": ids.gt(0).long(), "labels": labels}


def model():
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=10)
    return BertForSequenceClassification(BertConfig(num_labels=2, id2label={0: "negative", 1: "positive"}, **sizes))


def data():
    samples = [{"input_ids": [1 + k % 3, 4 + k % 4, 8 + k % 2][: 2 + k % 2], "label": k % 2} for k in range(24)]
    loader = DataLoader(samples[:16], 5, shuffle=True, collate_fn=Collate())
    return loader, DataLoader(samples[16:], 8, collate_fn=Collate())
"""


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("method", ["influence", "trak", "ekfac"])
def test_texts_of_a_model_of_transformers(recipe, method):
    assert command("train", recipe(TEXTS), "--device", "cpu").exit_code == 0
    result = attribute("--queries", "3", "--top", 2, "--method", method)
    assert result.exit_code == 0, result.stderr
    queries, found = scores("runs/recipe/attribution")
    assert queries == [3] and found.shape == (1, 16)
    page = page_text("runs/recipe/attribution")
    assert "|b poor book|query 3|label positive ●|predicted " in page
    assert len(re.findall(r"\|[a-z ]+\|sample \d+\|[+−].*?\|label (?:negative|positive) [●▲]\|loss\|", page)) == 4


def test_a_sampler_of_unknown_class_is_mentioned(recipe):
    text = SPLIT.replace("shuffle=True)\n    z", "sampler=Some())\n    z") + (
        "\nclass Some(torch.utils.data.Sampler):\n"
        "    def __iter__(self):\n"
        "        return iter([5, 3])\n\n"
        "    def __len__(self):\n"
        "        return 2\n"
    )
    command("train", recipe(text), "--device", "cpu")
    result = attribute("--queries", "0")
    note = "All 60 samples of the dataset count as training samples: it is not known which of them Some draws."
    assert (result.exit_code, result.stderr) == (0, f"{note}\n")
    assert note in page_text("runs/recipe/attribution")


def test_a_loss_with_weights_of_its_own(recipe):
    """Its saved weights are used, with those of the model at the same checkpoint."""
    text = SPLIT + (
        "\nclass Head(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = nn.Parameter(torch.ones(()))\n\n"
        "    def forward(self, model, batch):\n"
        "        return self.scale * nn.functional.cross_entropy(model(batch[0]), batch[1], reduction='none')\n\n\n"
        "loss = Head()\n"
    )
    text = text.replace("SGD(model.parameters()", "SGD([*model.parameters(), loss.scale]")
    assert command("train", recipe(text), "--device", "cpu", "--epochs", 2).exit_code == 0
    result = attribute("--queries", "0-1")
    assert "only the newest checkpoint is used" in result.stderr
    scale = sw.load_checkpoint("runs/recipe")["loss"]["scale"].item()
    assert scale < 0.99
    train, queries = batches()
    expected = scale**2 * sw.influence(trained_network("runs/recipe"), nn.CrossEntropyLoss(), train, queries)
    torch.testing.assert_close(scores("runs/recipe/attribution")[1], expected, rtol=1e-4, atol=1e-6)


def test_a_run_of_the_trainer_without_frozen_parameters(recipe):
    """A frozen layer that the checkpoints leave out is that of the recipe."""
    text = SPLIT.replace("return nn.Sequential(nn.Linear(6, 8),", "return nn.Sequential(frozen(),") + (
        "\n\ndef frozen():\n"
        "    layer = nn.Linear(6, 8)\n"
        "    nn.init.eye_(layer.weight)\n"
        "    nn.init.zeros_(layer.bias)\n"
        "    return layer.requires_grad_(False)\n"
    )
    recipe(text)
    functions = {}
    exec(text, functions)
    model = functions["model"]()
    step = sw.Step(model, functions["optimizer"](model), nn.CrossEntropyLoss())
    trainer = sw.Trainer(step, "runs/recipe", save="trained", progress=False)
    trainer.fit(functions["data"]()[0], epochs=2)
    assert "0.weight" not in sw.load_checkpoint("runs/recipe")["model"]
    assert attribute("--queries", "0-1", "--checkpoints", 1).exit_code == 0
    expected = sw.influence(model, nn.CrossEntropyLoss(), *batches())
    torch.testing.assert_close(scores("runs/recipe/attribution")[1], expected, rtol=1e-4, atol=1e-6)
    assert attribute("--queries", "0-1").exit_code == 0


@pytest.mark.parametrize("source", ["dataset", "ledger"])
def test_classes_have_names(run, source):
    if source == "ledger":
        names = {"version": 1, "classes": ["first", "second", "third"], "samples": {}}
        (run / "previews.json").write_text(json.dumps(names))
    else:
        text = Path("recipe.py").read_text()
        named = "    loader.dataset.classes = ['first', 'second', 'third']\n    return loader"
        Path("recipe.py").write_text(text.replace("    return loader", named))
    attribute("--queries", "7")
    label = ["first", "second", "third"][int(datasets()[1].tensors[1][7])]
    assert f"|query 7|label {label} ●|predicted " in page_text(run / "attribution")


def test_a_private_run_is_mentioned(run):
    about = json.loads((run / "run.json").read_text())
    about["settings"]["privacy"] = "epsilon 3"
    (run / "run.json").write_text(json.dumps(about))
    note = "Private run: epsilon 3. Its guarantee does not cover the scores and samples that are written."
    assert attribute("--queries", "0").stderr == f"{note}\n"
    assert note in page_text(run / "attribution")


# --- wrong input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--queries", "0,x"], "must be indices of validation samples such as 0,5,10-20, or wrong, or worst; found"),
        (["--queries", "0-30"], "must be indices of validation samples, 0 to 29; found 0-30."),
        (["--queries", "5-3"], "must be indices of validation samples, 0 to 29; found 5-3."),
        (["--queries", "0-99999999999999999999"], "must be indices of validation samples, 0 to 29; found"),
        (
            ["--method", "influenze"],
            "must be one of influence, trak, ekfac, metagradient; found 'influenze'. Did you mean 'influence'?",
        ),
        (["--damping", "1"], "must be used with method trak or ekfac; found influence."),
        (["--dim", "8", "--method", "ekfac"], "must be used with method trak; found ekfac."),
        (["--refine", "8", "--method", "trak"], "must be used with method ekfac; found trak."),
        (["--damping", "-1", "--method", "trak"], "must be a positive number; found -1.0."),
        (["--method", "ekfac", "--checkpoints", "2"], "checkpoints must be one with method ekfac; found 2."),
        (["--method", "ekfac", "--run", "a", "--run", "b"], "run must be one with method ekfac; found 2."),
        (["--run", "nowhere"], "a run must be a directory with a readable checkpoint of a trained model; found"),
        (["--top", "0"], "Input should be greater than or equal to 1."),
        (["--to", "recipe.py"], "must be a directory that can be written to; found"),
        (["--trust", "."], "lds.json must be the JSON file that LDS.save of samplewise.attribution.evaluate writes"),
        (["--device", "gpu"], "must be a device that torch can use; found 'gpu'"),
    ],
)
def test_bad_arguments_get_one_line(run, arguments, message):
    result = attribute(*arguments)
    assert result.exit_code == 2
    assert message in one_line(result)
    assert not list(Path(".").glob("**/scores.parquet"))


def test_a_recipe_that_was_not_trained(recipe):
    result = attribute(recipe=recipe(SPLIT))
    assert result.exit_code == 2
    assert "found none in" in one_line(result) and "Train first with samplewise train RECIPE" in result.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("return loader, DataLoader", "return loader; DataLoader"), "queries are samples of the validation loader"),
        (("nn.Linear(6, 8)", "nn.Linear(6, 9)"), "found '0.weight' of shape (9, 6) in the model and (8, 6) in"),
        (("torch.randn(60,", "torch.randn(61,"), "must be the one of the run, with 60 samples; found 61 samples"),
        (
            ("loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=20, shuffle=True)", "loader = [x]"),
            "the training loader must be a DataLoader that makes batches of a map-style dataset",
        ),
        (
            ("DataLoader(TensorDataset(z, labels), batch_size=7, shuffle=True)", "DataLoader(Stream(), batch_size=7)"),
            "the validation loader must be a DataLoader that makes batches of a map-style dataset, whose samples have "
            "an index; found DataLoader of Stream.",
        ),
        (("return nn.Seq", "return torch.nn.Identity(), nn.Seq"), "model() must return a torch.nn.Module"),
    ],
)
def test_a_recipe_that_does_not_fit_gets_one_line(run, change, message):
    text = Path("recipe.py").read_text()
    assert change[0] in text
    stream = "\n\nclass Stream(torch.utils.data.IterableDataset):\n    __iter__ = None\n"
    Path("recipe.py").write_text(text.replace(*change) + stream)
    result = attribute("--queries", "0")
    assert result.exit_code == 1
    assert message in one_line(result)


def test_wrong_needs_a_misclassified_sample(recipe):
    perfect = "nn.Linear(6, 3, bias=False)\n    nn.init.eye_(net.weight)\n    return net"
    text = re.sub(r"return nn\.Sequential.*", f"net = {perfect}", HEALTHY)
    command("train", recipe(text), "--device", "cpu")
    result = attribute("--queries", "wrong")
    assert result.exit_code == 2
    assert "found none among 60 samples. Use 'worst'." in one_line(result)


def test_wrong_needs_a_classification(recipe):
    text = HEALTHY.replace("argmax(1)", "clone()") + "\nloss = nn.MSELoss()\n"
    command("train", recipe(text), "--device", "cpu")
    result = attribute("--queries", "wrong")
    assert result.exit_code == 2
    assert "'wrong' needs a classification" in one_line(result)
    assert attribute("--queries", "worst").exit_code == 0


def test_scores_that_are_not_finite(run):
    add_loss("model(batch[0]).sum(1) * float('nan')")
    result = attribute("--queries", "0")
    assert result.exit_code == 1
    assert "finite" in one_line(result)


def test_unreadable_quality_is_a_warning_on_the_page(run):
    (run / "evaluate").mkdir()
    (run / "evaluate" / "lds.json").write_text("{}")
    assert attribute("--queries", "0").exit_code == 0
    page = page_text(run / "attribution")
    assert "Warnings" in page and "found other content" in page and "Not measured." in page


def test_a_damaged_checkpoint_is_left_out(run):
    newest = max((run / "checkpoints").iterdir())
    (newest / "model.safetensors").write_bytes(b"")
    with pytest.warns(CheckpointWarning, match="left out"):
        attribute("--queries", "0")
    assert len(settings(run / "attribution")["checkpoints"]) == 1


def test_a_killed_command_leaves_the_old_results(run):
    attribute("--queries", "0")
    before = {path.name: path.read_bytes() for path in (run / "attribution").iterdir()}
    code = (
        "import os, signal, sys\n"
        "from samplewise.core import files\n"
        "files.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from samplewise.cli.main import main\n"
        "main()\n"
    )
    killed = process("attribute", "recipe.py", "--device", "cpu", "--queries", "1", code=code)
    assert killed.returncode == -signal.SIGKILL
    assert {name: (run / "attribution" / name).read_bytes() for name in before} == before
    assert attribute("--queries", "1").exit_code == 0
    assert sorted(path.name for path in (run / "attribution").iterdir()) == sorted(before)
    assert scores(run / "attribution")[0] == [1]


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize(
    ("options", "settings"),
    [((), {}), (("--samples", 7, "--microbatch", 3, "--clip", 0.5), {"samples": 7, "microbatch": 3, "clip": 0.5})],
)
def test_metagradient_repeats_the_run(options, settings, trained, tmp_path, monkeypatch):
    shutil.copy(trained / "recipe.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert command("train", "recipe.py", "--epochs", 2, "--device", "cpu", "--seed", 3, *options).exit_code == 0
    assert attribute("--method", "metagradient", "--queries", "0,4,2").exit_code == 0
    train, validation = datasets()

    def make_step():
        model = network()
        transforms = [sw.clip(settings["clip"])] if settings else []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        samples, microbatch = settings.get("samples"), settings.get("microbatch")
        return sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples, microbatch=microbatch, transforms=transforms)

    loader = DataLoader(sw.Indexed(train), batch_size=20, shuffle=True)
    queries = [tuple(tensor[[0, 4, 2]] for tensor in validation.tensors)]
    wanted = sw.metagradient("runs/recipe", make_step, loader, queries, device="cpu")
    order, found = scores("runs/recipe/attribution")
    assert order == [0, 4, 2]
    torch.testing.assert_close(found, -wanted)


def test_a_run_that_is_not_smooth_is_noted_on_the_page(run, monkeypatch):
    monkeypatch.setattr(metagradient, "LARGEST_ERROR", 1e-9)
    result = attribute("--method", "metagradient", "--queries", "0,4")
    assert result.exit_code == 0
    note = "The training is not smooth enough for its derivative to predict the effect of leaving samples out: it was"
    assert note in result.stderr and note in page_text(run / "attribution")


def test_metagradient_needs_make_step(trained):
    train, validation = (DataLoader(part, batch_size=7) for part in datasets())
    with pytest.raises(ValueError, match="method metagradient repeats the run and needs make_step; found none"):
        sw.attribution.attribute(
            network(), nn.CrossEntropyLoss(), train, validation, trained / "runs/recipe", method="metagradient"
        )
