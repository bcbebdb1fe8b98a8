"""Previews of suspicious samples: images, texts and values; training is not affected."""

import base64
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import samplewise as sw
from samplewise.ledger import previews
from samplewise.ledger.aggregate import aggregate_visits
from samplewise.ledger.previews import indexed_items, preview, write_previews

X = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3


def pixels(found):
    image = found["image"]
    flat = torch.tensor(list(base64.b64decode(image["data"])))
    return flat.view(image["height"], image["width"], image["channels"])


def fit(run, data, epochs=1, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    ledger = sw.Ledger(**options)
    step = sw.Step(model, sw.sgd(0.1), nn.CrossEntropyLoss(), samples=7)
    trainer = sw.Trainer(step, run, [ledger], progress=False, device="cpu")
    trainer.fit(DataLoader(data, batch_size=5, shuffle=True), epochs=epochs)
    return model


def kept(run):
    found = json.loads((run / "previews.json").read_text())
    assert found["version"] == 1
    return found["samples"]


# --------------------------------------------------------------------------------------------------------- of a sample


def test_values_between_0_and_1_are_scaled_to_255():
    found = preview((X[3], Y[3]))
    assert found["label"] == "0"
    assert torch.equal(pixels(found)[:, :, 0], (255 * X[3, 0]).round().long())


def test_normalized_images_are_scaled_to_the_full_range():
    shown = pixels(preview(5 * X[0] - 2))
    assert (shown.min(), shown.max()) == (0, 255)
    assert preview(torch.full((8, 8), 7.0))["image"]["data"] == base64.b64encode(bytes(64)).decode()
    assert pixels(preview(torch.tensor([torch.nan, 0.5] * 32).view(8, 8))).flatten().tolist() == [0, 128] * 32


@pytest.mark.parametrize("kind", ["first", "last", "numpy", "bytes", "pillow"])
def test_channels_first_and_channels_last(kind):
    image = (255 * torch.rand(6, 9, 3)).round()
    image[0, 0] = torch.tensor([0.0, 255.0, 128.0])
    given = {
        "first": lambda: image.permute(2, 0, 1) / 255,
        "last": lambda: image / 255,
        "numpy": lambda: (image / 255).numpy(),
        "bytes": lambda: image.to(torch.uint8),
        "pillow": lambda: pillow(image),
    }[kind]()
    assert torch.equal(pixels(preview(given)), image.long())


def pillow(image):
    from PIL import Image

    return Image.fromarray(image.to(torch.uint8).numpy())


def test_large_images_shrink():
    found = preview(torch.rand(3, 200, 100))["image"]
    assert (found["height"], found["width"], found["channels"]) == (64, 32, 3)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (("some <b>text</b>", 1), {"label": "1", "text": "some <b>text</b>"}),
        ({"text": "a" * 1000, "labels": torch.tensor(4)}, {"label": "4", "text": "a" * 400}),
        ({"note": "alone", "y": 2}, {"label": "2", "text": "alone"}),
        ({"age": 40, "town": "Ulm", "y": 2}, {"label": "2", "values": {"age": 40, "town": "Ulm"}}),
        ((torch.tensor([1.0, 2.5]), np.int64(3)), {"label": "3", "values": {"0": 1.0, "1": 2.5}}),
        ((torch.arange(100), "cat"), {"label": "cat", "values": {str(k): k for k in range(32)}}),
        ({"ids": torch.arange(2)}, {"values": {"0": 0, "1": 1}}),
        ({"a": torch.arange(2), "b": 1.5}, {"values": {"a": "tensor([0, 1])", "b": 1.5}}),
        ((torch.ones(2), torch.ones(5)), {"values": {"0": 1.0, "1": 1.0}}),  # a target of several values is not a label
        ((torch.ones(2), torch.tensor([0.1])), {"label": "0.1", "values": {"0": 1.0, "1": 1.0}}),
        ({"age": 40, "map": torch.ones(8, 8)}, {"values": {"age": 40, "map": repr(torch.ones(8, 8))[:400]}}),
        ([(1, 2)], {"values": {"0": 1, "1": 2}}),
        ((slice(3), 0), {"label": "0", "text": "slice(None, 3, None)"}),
        ((torch.ones(1), 2, "a/1.png", 3), {"label": "2", "name": "a/1.png", "values": {"0": 1.0}}),
        (("text", 2, "a", "b"), {"label": "2", "name": "a, b", "text": "text"}),
    ],
)
def test_texts_and_values_of_a_sample(item, expected):
    assert preview(item) == expected


@pytest.mark.parametrize("name", ["image", "x"])
def test_an_image_in_a_dict(name):
    found = preview({"path": "a.png", name: X[3], "y": 2})
    assert found["label"] == "2" and torch.equal(pixels(found)[:, :, 0], (255 * X[3, 0]).round().long())
    assert pixels(preview({"path": "a.png", "image": X[3, 0]})).shape == (8, 8, 1)
    assert pixels(preview({"path": "a.png", name: Image.new("RGB", (9, 8))})).shape == (8, 9, 3)


# ----------------------------------------------------------------------------------------------------------- of a run


def test_a_trainer_writes_previews(tmp_path):
    fit(tmp_path, sw.Indexed(TensorDataset(X, Y)))
    found = kept(tmp_path)
    assert set(found) == {str(i) for i in range(20)}
    for i, shown in found.items():
        assert shown["label"] == str(int(Y[int(i)]))
        assert torch.equal(pixels(shown)[:, :, 0], (255 * X[int(i), 0]).round().long())


def test_the_most_suspicious_samples_get_previews(tmp_path, monkeypatch):
    monkeypatch.setattr(previews, "MAX_PREVIEWS", 3)
    visits = pa.table({"id": [0, 1, 2, 3, 4], "loss": [5.0, 4.0, 3.0, 2.0, 1.0], "norm": [1.0, 2.0, 3.0, 9.0, 8.0]})
    write_previews(tmp_path, lambda i: f"sample {i}", aggregate_visits([visits]))
    assert list(kept(tmp_path)) == ["0", "3", "1"]  # by loss, by norm, and the second by loss
    assert kept(tmp_path)["3"] == {"text": "sample 3"}


def test_samples_without_losses_and_norms_have_no_previews(tmp_path):
    visits = pa.table({"id": [0, 1], "loss": [np.nan, np.nan], "norm": [np.nan, np.nan]})
    write_previews(tmp_path, lambda i: f"sample {i}", aggregate_visits([visits]))
    assert list(tmp_path.iterdir()) == []


def test_items_of_subsets():
    data = sw.Indexed(TensorDataset(X, Y))
    item = indexed_items(DataLoader(Subset(Subset(data, range(10, 20)), range(5))))
    assert torch.equal(item(3)[0], X[3])  # ids are indices of Indexed
    assert indexed_items(DataLoader(TensorDataset(X, Y))) is None
    assert indexed_items([1, 2]) is indexed_items(None) is None


def test_ids_of_the_dataset(tmp_path):
    data = [{"x": X[i], "y": Y[i], "id": f"s{i}"} for i in range(20)]
    step = sw.Step(
        nn.Linear(64, 3),
        sw.sgd(0.1),
        lambda m, b: nn.functional.cross_entropy(m(b["x"].flatten(1)), b["y"], reduction="none"),
    )
    ledger = sw.Ledger(show=lambda name: (f"a text on {name}", 7))
    sw.Trainer(step, tmp_path, [ledger], progress=False, device="cpu").fit(DataLoader(data, batch_size=5), epochs=1)
    assert kept(tmp_path)["s3"] == {"label": "7", "text": "a text on s3"}


def test_no_previews_with_show_false(tmp_path):
    fit(tmp_path, sw.Indexed(TensorDataset(X, Y)), show=False)
    assert not (tmp_path / "previews.json").exists()


def test_previews_do_not_change_the_training(tmp_path):
    class Noisy(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + 0.1 * torch.randn(()), y

    runs = [
        fit(tmp_path / str(show), sw.Indexed(Noisy(X, Y)), epochs=4, **({} if show else {"show": False}))
        for show in (True, False)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*(run.parameters() for run in runs), strict=True))


def test_a_failing_preview_is_a_warning(tmp_path):
    def show(i):
        raise KeyError(f"no {i}")

    message = r"must be accessible by id to be shown in the report; found KeyError: 'no \d+'\. Pass Ledger\(show="
    with pytest.warns(sw.LedgerWarning, match=message):
        fit(tmp_path, sw.Indexed(TensorDataset(X, Y)), show=show)
    assert len(sw.read_ledger(tmp_path)) == 20 and not (tmp_path / "previews.json").exists()


def test_other_previews_are_written_if_one_fails(tmp_path):
    with pytest.warns(sw.LedgerWarning, match=r"found KeyError: 3\. Pass Ledger\(show="):
        fit(tmp_path, sw.Indexed(TensorDataset(X, Y)), show=lambda i: {k: f"text {k}" for k in range(20) if k != 3}[i])
    assert set(kept(tmp_path)) == {str(i) for i in range(20)} - {"3"}


def test_previews_are_written_after_epochs_1_2_4_and_8(tmp_path):
    looked = []
    ledger = sw.Ledger(tmp_path, show=lambda i: looked.append(i) or "")
    step = sw.Step(nn.Linear(1, 1), sw.sgd(0.1), lambda m, b: m(b["x"]).squeeze(1))
    ledger.on_fit_start(SimpleNamespace(fast_dev_run=False, run=None, loader=None), step)
    for epoch in range(9):
        for update in step.over([{"x": torch.ones(2, 1), "id": torch.arange(2)}]):
            ledger.on_update(update)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ledger.on_epoch_end(epoch)
    assert len(looked) == 2 * 4  # after 1, 2, 4 and 8 epochs


# ---------------------------------------------------------------------------------------------------------------- names


FEATURES = [f"feature {k}" for k in range(64)]


def flat_data(**attributes):
    data = TensorDataset(X.flatten(1), Y)
    for name, value in attributes.items():
        setattr(data, name, value)
    return sw.Indexed(Subset(data, range(20)))


def values_of(run):
    return kept(run)["0"]["values"]


def test_features_and_classes_that_are_passed(tmp_path):
    fit(tmp_path, flat_data(), features=FEATURES, classes=("cat", "dog", "cow"))
    assert list(values_of(tmp_path)) == FEATURES[:32]
    assert list(values_of(tmp_path).values()) == pytest.approx(X[0].flatten()[:32].tolist())
    assert json.loads((tmp_path / "previews.json").read_text())["classes"] == ["cat", "dog", "cow"]


def test_features_and_classes_of_the_dataset(tmp_path):
    fit(tmp_path, flat_data(feature_names=np.array(FEATURES), classes=["cat", "dog", "cow"]), classes=["a", "b", "c"])
    assert list(values_of(tmp_path)) == FEATURES[:32]
    assert json.loads((tmp_path / "previews.json").read_text())["classes"] == ["a", "b", "c"]  # those of the ledger


def test_classes_without_previews(tmp_path):
    fit(tmp_path, flat_data(), show=False, classes=["cat", "dog", "cow"])
    assert kept(tmp_path) == {} and json.loads((tmp_path / "previews.json").read_text())["classes"][0] == "cat"


def test_another_number_of_features_is_a_warning(tmp_path):
    with pytest.warns(
        sw.LedgerWarning, match=r"one name for each value of a sample; found 3 names for 64 values, which"
    ):
        fit(tmp_path, flat_data(), features=["a", "b", "c"])
    assert list(values_of(tmp_path)) == [str(k) for k in range(32)]


def test_names_that_are_no_list():
    with pytest.raises(TypeError, match=r"features must be a list of names; found 'age'\. Pass for example features="):
        sw.Ledger(features="age")
    with pytest.raises(TypeError, match=r"classes must be a list of names; found 3\."):
        sw.Ledger(classes=3)
