"""Results of an audit: numbers, sentences, files, comparisons, wrong input."""

import json
import math

import pytest
import torch
from audited_loops import FAULTS, RIGHT, Task, token_loss
from torch import nn
from torch.nn import functional as F

import samplewise as sw


def audited(loop, **arguments):
    task = Task()
    with sw.audit(None, **arguments) as audit:
        loop(task)
    return audit


def train(model, optimizer, batches):
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_numbers_are_per_update_microbatch_and_sample():
    audit = audited(RIGHT["weighted_by_tokens"], per="token")
    rows = audit.updates
    assert audit.ok and audit.deviation < 1e-6
    assert audit.sums == pytest.approx([1, 1, 1], abs=1e-6)
    assert [row["update"] for row in rows[:10]] == [1] * 9 + [2]
    assert [row["microbatch"] for row in rows[:4]] == [1, 1, 1, 2]
    assert [row["targets"] for row in rows[:6]] == [1, 2, 3, 4, 5, 6]
    tokens = sum(row["targets"] for row in rows[:9])
    assert [row["weight"] for row in rows[:6]] == pytest.approx([n / tokens for n in range(1, 7)], rel=1e-6)
    assert len({row["sample"] for row in rows}) == 20


def test_printed_audit_has_a_verdict_and_says_where_to_look():
    audit = audited(FAULTS["mean_of_means"][0], per="token")
    text = str(audit)
    assert text.startswith("audit of 2 updates: 1 fault: microbatch-weights\n")
    assert "microbatches of an update must have equal weights for each target; found that in update 1" in text
    assert "audited_loops.py:" in audit.findings[0].where
    assert audit.verdict == "1 fault: microbatch-weights"
    assert "<table>" in audit._repr_html_()


def test_sentences_name_the_divisor():
    def padded(task):
        task.tokens()
        for x, y in task.batches():
            (token_loss(task.model(x), y, "sum") / 24).backward()
            task.optimizer.step()
            task.optimizer.zero_grad()

    (finding,) = audited(padded).findings
    assert finding.code == "weight-sum"
    assert "Each target is divided by 24, and 10 targets enter update 1" in finding.message


def test_sum_reduction_is_right_for_a_constant_divisor():
    def summed(task):
        for x, y in task.batches():
            F.cross_entropy(task.model(x), y, reduction="sum").backward()
            task.optimizer.step()
            task.optimizer.zero_grad()

    assert audited(summed, per=1).ok
    audit = audited(summed)
    assert "The loss is a sum: divide it by the number of targets, or audit with per=1." in audit.findings[0].message


def test_mean_of_one_text_per_microbatch_is_per_sample_and_not_per_token():
    def by_text(task):
        task.tokens()
        for i, (x, y) in enumerate(task.batches(1)):
            (token_loss(task.model(x), y) / 4).backward()
            if i % 4 == 3:
                task.optimizer.step()
                task.optimizer.zero_grad()

    assert audited(by_text, per="sample").ok
    assert audited(by_text).ok
    assert [f.code for f in audited(by_text, per="token").findings] == ["microbatch-weights"]


def test_allowed_findings_are_left_out():
    loop, code = FAULTS["trained_in_eval_mode"]
    assert audited(loop, allow=[code]).ok


def test_losses_that_are_no_cross_entropy():
    def regression(task):
        task.regression()
        task.y = task.y.unsqueeze(1)
        for x, y in task.batches():
            loss = ((task.model(x) - y).abs() ** 1.5).mean()
            loss.backward()
            task.optimizer.step()
            task.optimizer.zero_grad()

    unknown = audited(regression)
    assert unknown.ok and all(map(math.isnan, unknown.sums)) and math.isnan(unknown.deviation)
    assert "weights cannot be seen: the loss is no cross entropy of an output. Pass losses=" in unknown.notes[0]
    assert not any(row["known"] for row in unknown.updates)

    task = Task()
    batches = iter(range(0, 20, 4))

    def labels(args, kwargs):
        k = next(batches)
        return task.y[k : k + 4]

    with sw.audit(None, losses=lambda z, y: (z - y).abs() ** 1.5, labels=labels) as audit:
        regression(task)
    assert audit.ok and audit.sums == pytest.approx([1] * 5, abs=1e-6)


def test_losses_without_labels():
    audit = audited(RIGHT["plain"], losses=nn.CrossEntropyLoss(reduction="none"))
    assert not audit.ok and audit.verdict == "the audit has failed"
    assert "losses= needs labels, and the model has no argument 'labels'" in audit.notes[0]


@pytest.mark.parametrize("name", ["plain", "mean_of_means"])
def test_files(name, tmp_path):
    audit = audited(RIGHT.get(name) or FAULTS[name][0], norms=True)
    audit.save(tmp_path / "audit.json")
    audit.save(tmp_path / "audit.html")
    saved = json.loads((tmp_path / "audit.json").read_text())
    assert saved["ok"] == audit.ok and saved["updates"] == audit.updates
    assert [f["code"] for f in saved["findings"]] == [f.code for f in audit.findings]
    page = (tmp_path / "audit.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and audit.verdict in page
    assert audit.compare(tmp_path / "audit.json").ok
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"must be read from a file that audit.save\('….json'\) has written; found"):
        audit.compare(tmp_path / "other.json")


def test_comparison_of_an_interrupted_run():
    whole, repeated = Task(), Task()
    with sw.audit(whole.model) as uninterrupted:
        train(whole.model, whole.optimizer, whole.batches())
    with sw.audit(repeated.model) as resumed:
        train(repeated.model, repeated.optimizer, [*repeated.batches()[:3], *repeated.batches()[2:4]])
    comparison = uninterrupted.compare(resumed)
    assert not comparison.ok
    assert "update 4 has other samples in the second run: 4 of the first are missing there, and 4 are new" in str(
        comparison
    )
    assert uninterrupted.compare(uninterrupted).ok


def test_a_resumed_run_continues_another_audit(tmp_path):
    whole, resumed = Task(), Task()
    with sw.audit(whole.model) as uninterrupted:
        train(whole.model, whole.optimizer, whole.batches())
    for part, batches in enumerate((resumed.batches()[:2], resumed.batches()[2:])):
        with sw.audit(resumed.model) as audit:
            train(resumed.model, resumed.optimizer, batches)
        audit.save(tmp_path / f"{part}.json")
    assert uninterrupted.compare(tmp_path / "0.json", tmp_path / "1.json").ok
    comparison = uninterrupted.compare(audit)
    assert "update 1 has other samples in the second run" in str(comparison)
    assert "the number of updates differs: 5 and 3" in str(comparison)
    with pytest.raises(TypeError, match="compare needs another audit, or its file; found none"):
        uninterrupted.compare()


def test_comparison_of_two_ways_of_cutting_a_batch():
    audits = []
    for size, accumulation in ((8, 1), (2, 4)):
        task = Task()
        task.tokens()
        with sw.audit(task.model, norms=True) as audit:
            for i, (x, y) in enumerate(task.batches(size)[: 2 * accumulation]):
                (token_loss(task.model(x), y) / accumulation).backward()
                if (i + 1) % accumulation == 0:
                    task.optimizer.step()
                    task.optimizer.zero_grad()
        audits.append(audit)
    comparison = audits[0].compare(audits[1])
    assert not comparison.ok
    assert "in update 1, a sample's weight differs by" in str(comparison)
    assert "the gradient of update 1 has norm" in str(comparison)


def test_ids_of_samples():
    class Model(nn.Linear):
        def forward(self, x, name):
            return super().forward(x)

    model = Model(6, 5)
    task = Task()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sw.audit(model, ids="name") as audit:
        for x, y in task.batches() * 2:
            F.cross_entropy(model(x + torch.rand(()), name=[f"image {v:.3f}" for v in x[:, 0]]), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len({row["sample"] for row in audit.updates}) == 20


def test_an_optimizer_that_is_none_of_torch():
    task = Task()
    with sw.audit(task.model) as audit:
        for x, y in task.batches():
            F.cross_entropy(task.model(x), y).backward()
            for p in task.model.parameters():
                p.data -= 0.1 * p.grad
                p.grad = None
    assert audit.ok and audit.sums == pytest.approx([1] * 5, abs=1e-6)


def test_transforms_in_sw_backward():
    task = Task()
    with sw.audit(task.model) as audit:
        for x, y in task.batches():
            logits = task.model(x)
            loss = F.cross_entropy(logits, y)
            sw.backward(loss, task.model, logits, [sw.clip(0.5)], denominator=4)
            task.optimizer.step()
            task.optimizer.zero_grad()
    assert audit.ok and audit.sums == pytest.approx([1] * 5, abs=1e-6)


@pytest.mark.usefixtures("backend")
def test_step_reports_the_weights_of_its_samples():
    task = Task()
    step = sw.Step(task.model, task.optimizer, nn.CrossEntropyLoss(), samples=1, compile=True)
    with sw.audit(task.model, per="sample") as audit:
        step.run(task.batches())
    assert audit.ok and audit.sums == [1.0] * 20
    step.run(task.batches())
    assert "hooks" not in step.compiled  # compiled again


# --- wrong input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "model must be a torch.nn.Module, or None for all models; found int"),
        ({"per": "row"}, "per must be 'token', 'sample', a positive number or None; found 'row'"),
        ({"per": -1}, "per must be 'token', 'sample', a positive number or None; found -1"),
        ({"allow": ["eval"]}, "allow must hold codes of findings; found 'eval'. Did you mean 'eval-mode'"),
        ({"allow": 3}, "allow must be a list of codes of findings; found int"),
        ({"losses": 3}, "losses must be a function"),
        ({"losses": nn.MSELoss()}, "losses must return one loss per sample; found MSELoss with reduction='mean'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sw.audit(**arguments)


def test_results_are_read_after_the_block():
    with (
        sw.audit(None) as audit,
        pytest.raises(RuntimeError, match="results of an audit must be read after its block; found that it is run"),
    ):
        _ = audit.ok
    with pytest.raises(RuntimeError, match="an audit can be used for one block"):
        audit.__enter__()


def idle(task):
    pass


def forward_alone(task):
    task.model(task.x)


def backward_alone(task):
    F.cross_entropy(task.model(task.x), task.y).backward()


@pytest.mark.parametrize(
    ("loop", "note"),
    [
        (idle, "no call of the model was seen: pass the model that the loop trains"),
        (forward_alone, "no backward pass through an output of the model was seen"),
        (backward_alone, "no optimizer step was seen"),
    ],
)
def test_blocks_without_an_update(loop, note):
    audit = audited(loop)
    assert not audit.ok and audit.verdict == "no update seen"
    assert note in audit.notes[0]


def test_optimizer_of_a_copied_model():
    task, other = Task(), Task()
    with sw.audit(task.model) as audit:
        train(task.model, other.optimizer, task.batches())
    assert "optimizers have stepped that have no parameter of the model" in audit.notes[0]


def test_errors_of_the_loop_end_the_audit():
    task = Task()
    audit = sw.audit(task.model)
    batches = [*task.batches()[:2], (task.x, None)]
    with pytest.raises(TypeError, match="cross_entropy"), audit:
        train(task.model, task.optimizer, batches)
    assert audit.ok and len(audit.sums) == 2
