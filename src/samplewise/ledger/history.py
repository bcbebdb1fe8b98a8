"""Training dynamics of samples: statistics of the order and the spread of their visits, computed in chunks.

    variability        standard deviation of the confidence over the visits (divided by their number)
    correctness        share of the visits at which the label was predicted
    forgetting_events  number of times that a wrong prediction follows a right one
    learned_epoch      epoch of the first visit from which on all predictions are right; null if the last one is wrong
    aum                mean margin
    grand, early_el2n  mean norm, and mean EL2N, over the first epochs
    norm_trend         slope of the norm over the epochs, by least squares; null with visits in one epoch only

Each needs the columns in `NEEDS`. A visit counts where its value is finite; a prediction, where the sample has a label.

Rows are visits, or samples aggregated so far, in the form of `samplewise.ledger.aggregate`: "sum name" and "missing
name", or the "state" after the last visit. "spread x y" is the sum of (x - mean x)(y - mean y) over the visits of a
row, "sum name in k" that over the k-th stage of training. The stages end after e, 2 e, 4 e, ... epochs, e the number of
first epochs.
"""

from __future__ import annotations

from collections.abc import Container
from math import inf, log2
from typing import Any

from samplewise.ledger.files import load_pyarrow

EARLY_EPOCHS = 5
RANKED = ("margin", "loss", "el2n", "norm", "self_influence")  # scores, the one that finds most wrong labels first
CONCENTRATED = 0.3  # of `_concentration`: above it, classes are confused with one other class
STAGED = ("margin", "el2n", "confidence", "correct")  # columns that are summed in each stage; the norm in the first
NEEDS = {
    "confidence": ("confidence",),
    "variability": ("confidence",),
    "correctness": ("label", "prediction"),
    "forgetting_events": ("label", "prediction"),
    "learned_epoch": ("label", "prediction", "epoch"),
    "aum": ("margin",),
    "el2n": ("el2n",),
    "early_el2n": ("el2n", "epoch"),
    "grand": ("norm", "epoch"),
    "norm_trend": ("norm", "epoch"),
}


def finite_visits(rows: Any, name: str) -> Any:
    """Number of visits in the sum of a column."""
    pc = load_pyarrow().compute
    if f"missing {name}" not in rows.column_names:
        return rows["visits"]
    return pc.subtract(rows["visits"], pc.fill_null(rows[f"missing {name}"], 0))


def partial_history(sums: dict[str, Any], columns: dict[str, Any], early_epochs: int) -> dict[str, Any]:
    """Columns of visits that `with_history` completes, from their sums and other columns; those that these allow."""
    pa, pc = load_pyarrow(), load_pyarrow().compute
    zero = pa.repeat(0.0, len(sums["visits"]))
    partial = {"spread confidence confidence": zero} if "sum confidence" in sums else {}
    epochs = columns["epoch"].cast(pa.float64()) if "epoch" in columns else None
    correct = _correct(sums, columns)
    if correct is not None:
        partial |= {"sum correct": correct.cast(pa.float64()), "state correct": correct, "sum forgetting": zero}
        partial["state mistake"] = pc.if_else(correct, None, columns["prediction"])
        partial |= {} if epochs is None else {"state learned": epochs}
    if epochs is None:
        return partial
    if "sum norm" in sums:
        partial["sum epoch"] = pc.if_else(pc.is_valid(sums["sum norm"]), epochs, None)
        partial |= {"spread epoch norm": zero, "spread epoch epoch": zero}
    for stage in range(1 + _stage(pc.max(epochs).as_py(), early_epochs)):
        start = early_epochs * 2 ** (stage - 1) if stage else -inf
        in_stage = pc.and_(pc.greater_equal(epochs, start), pc.less(epochs, early_epochs * 2**stage))
        for name in STAGED if stage else (*STAGED, "norm"):
            values = (sums | partial).get(f"sum {name}")
            if values is not None:
                partial[f"sum {name} in {stage}"] = pc.if_else(in_stage, values, None)
    return partial


def _stage(epoch: float | None, early_epochs: int) -> int:
    """Number of the stage that an epoch belongs to."""
    return 0 if epoch is None or epoch < early_epochs else 1 + int(log2(epoch // early_epochs))


def _correct(sums: dict[str, Any], columns: dict[str, Any]) -> Any:
    """True at visits that predict the label, null without a label. None if the table does not say it."""
    pa, pc = load_pyarrow(), load_pyarrow().compute
    label, prediction = (columns.get(name) for name in ("label", "prediction"))
    if label is None or prediction is None:
        return None
    try:
        correct = pc.equal(label, prediction)
    except pa.ArrowNotImplementedError:  # a name and a number cannot be compared
        return None
    has_both = pc.and_(pc.equal(label, label), pc.equal(prediction, prediction))  # False for NaN
    if "sum margin" in sums:  # null if the criterion ignores the label
        has_both = pc.and_(has_both, pc.is_valid(sums["sum margin"]))
    return pc.if_else(has_both, correct, None)


def with_history(rows: Any) -> Any:
    """Rows whose sums over the rows of a sample are those of all its visits."""
    pc = load_pyarrow().compute
    spreads = [name.split()[1:] for name in rows.column_names if name.startswith("spread ")]
    deviations = {name: _deviations(rows, name) for name in {name for pair in spreads for name in pair}}
    for first, second in spreads:
        name = f"spread {first} {second}"
        between = pc.multiply(deviations[first], deviations[second])
        products = pc.fill_null(pc.multiply(between, finite_visits(rows, second)), 0.0)
        rows = _replaced(rows, name, pc.add(pc.fill_null(rows[name], 0.0), products))
    return _with_transitions(rows) if "state correct" in rows.column_names else rows


def _deviations(rows: Any, name: str) -> Any:
    """Mean of each row minus the mean of its sample: adding their squares to the spread within the rows (Chan et al.
    1979) is exact where a difference of sums of squares would cancel.
    """
    pa, pc = load_pyarrow(), load_pyarrow().compute
    total, visits = rows[f"sum {name}"], finite_visits(rows, name)
    table = pa.table({"sample": rows["sample"], "total": total, "visits": visits})
    groups = table.group_by("sample", use_threads=False).aggregate([("total", "sum"), ("visits", "sum")])
    groups = groups.sort_by("sample")  # row k is sample k
    means = pc.divide(groups["total_sum"], groups["visits_sum"])
    return pc.subtract(pc.divide(total, visits), means.take(rows["sample"]))


def _with_transitions(rows: Any) -> Any:
    """Count right predictions that a wrong one follows, and keep the epochs at which a series of right ones starts."""
    pc = load_pyarrow().compute
    correct = rows["state correct"].combine_chunks()
    order = pc.sort_indices(rows["sample"])  # stable: the rows of a sample stay in the order of training
    samples = rows["sample"].combine_chunks().take(order)
    # The last prediction before a row, and its sample: rows without a label have none.
    predictions = correct.take(order)
    before = _shifted(pc.fill_null_forward(predictions))
    sample_before = _shifted(pc.fill_null_forward(pc.if_else(pc.is_valid(predictions), samples, None)))
    right_before = pc.fill_null(pc.and_(before, pc.equal(sample_before, samples)), False)
    right_before = right_before.take(pc.sort_indices(order))  # in the order of the rows again
    right = pc.fill_null(correct, False)
    wrong = pc.fill_null(pc.invert(correct), False)
    forgetting = pc.and_(right_before, wrong).cast(load_pyarrow().float64())
    rows = _replaced(rows, "sum forgetting", pc.add(pc.fill_null(rows["sum forgetting"], 0.0), forgetting))
    if "state learned" not in rows.column_names:
        return rows
    starts = pc.and_not(right, right_before)  # also true for a sample aggregated so far whose last prediction is right
    return _replaced(rows, "state learned", pc.if_else(starts, rows["state learned"], None))


def _shifted(values: Any) -> Any:
    """Value of the row before; null in the first row."""
    pa = load_pyarrow()
    return pa.concat_arrays([pa.nulls(1, values.type), values.slice(0, len(values) - 1)])


def _replaced(rows: Any, name: str, values: Any) -> Any:
    return rows.set_column(rows.column_names.index(name), name, values)


def history_columns(totals: Any) -> dict[str, Any]:
    """Columns of aggregated samples, those that the table allows."""
    pa, pc = load_pyarrow(), load_pyarrow().compute
    names = totals.column_names
    columns = {}
    if "sum confidence" in names:
        variance = pc.divide(totals["spread confidence confidence"], finite_visits(totals, "confidence"))
        columns["variability"] = pc.sqrt(pc.if_else(pc.is_valid(totals["sum confidence"]), variance, None))
    if "state correct" in names:
        columns["correctness"] = pc.divide(totals["sum correct"], finite_visits(totals, "correct"))
        columns["forgetting_events"] = totals["sum forgetting"].cast(pa.int64())
    if "state learned" in names:
        columns["learned_epoch"] = pc.if_else(totals["state correct"], totals["state learned"], None)
    if "sum margin" in names:
        columns["aum"] = pc.divide(totals["sum margin"], finite_visits(totals, "margin"))
    for name, column in (("norm", "grand"), ("el2n", "early_el2n")):
        if f"sum {name} in 0" in names:
            columns[column] = pc.divide(totals[f"sum {name} in 0"], finite_visits(totals, f"{name} in 0"))
    if "spread epoch epoch" in names:
        spread = totals["spread epoch epoch"]
        columns["norm_trend"] = pc.divide(totals["spread epoch norm"], pc.if_else(pc.greater(spread, 0), spread, None))
    return columns


# --- ranking ----------------------------------------------------------------------------------------------------------


def wrong_label_score(totals: Any, scores: Container[str], early_epochs: int) -> tuple[str, str, Any] | None:
    """The one of the scores that finds most wrong labels, its description, and its means; these are None if they are
    those over all visits. None without scores.

    The mean over all of training loses wrong labels that are memorized; the mean over the first epochs, those of a
    network that learns slowly. The numbers of epochs are compared by `_contrast`. EL2N finds more if classes are
    confused with one other class, the margin if labels are random: `_concentration` says which. Both were chosen on the
    datasets of `benchmarks/dynamics.py --choose`.
    """
    pc = load_pyarrow().compute
    last = 0  # the stage that the run ends in
    while any(f"sum {name} in {last + 1}" in totals.column_names for name in STAGED):
        last += 1
    sums: dict[str, Any] = {}
    visits: dict[str, Any] = {}
    means: dict[str, Any] = {}
    largest = -inf
    chosen = 0
    for stage in range(last + 1):
        window = {}
        for name in (name for name in STAGED if f"sum {name} in {stage}" in totals.column_names):
            total = pc.fill_null(totals[f"sum {name} in {stage}"], 0.0)
            count = finite_visits(totals, f"{name} in {stage}")
            sums[name] = pc.add(sums[name], total) if name in sums else total
            visits[name] = pc.add(visits[name], count) if name in visits else count
            window[name] = pc.divide(sums[name], pc.if_else(pc.greater(visits[name], 0), visits[name], None))
        # Without confidences and predictions, the mean over all of training is used.
        contrast = _contrast(window) if {"confidence", "correct"} <= window.keys() else stage
        if contrast >= largest:
            largest, means, chosen = contrast, window, stage
    names = [name for name in RANKED if name in scores]
    if not names:
        return None
    is_confused = {"margin", "el2n"} <= set(names) and "correct" in means
    is_confused = is_confused and _concentration(totals, means["correct"]) > CONCENTRATED
    name = "el2n" if is_confused else names[0]
    if name not in means or chosen == last:
        return name, f"mean {name} over all visits", None
    return name, f"mean {name} over the first {early_epochs * 2**chosen} epochs", means[name]


def _contrast(means: dict[str, Any]) -> float:
    """Variance of the mean confidences of samples, times the square of the share of the variance of correct predictions
    that lies between samples, not between the visits of one: small before samples are learned, and if they change
    sides.
    """
    pc = load_pyarrow().compute
    variance = pc.variance(means["confidence"]).as_py() or 0.0
    right = pc.mean(means["correct"]).as_py() or 0.0
    between = (pc.variance(means["correct"]).as_py() or 0.0) / max(right * (1 - right), 1e-12)
    return variance * between**2


def _concentration(totals: Any, correct: Any) -> float:
    """Share of the most frequent mistake of each class among samples that are mostly predicted wrongly: from 0, if all
    other classes are equally frequent, to 1; 0 for two classes.
    """
    pa, pc = load_pyarrow(), load_pyarrow().compute
    classes = pc.count_distinct(totals["last label"]).as_py()
    mistakes = pa.table({"label": totals["last label"], "mistake": totals["state mistake"]})
    mistakes = mistakes.filter(pc.and_(pc.less(correct, 0.5), pc.is_valid(totals["state mistake"])))
    if classes < 3 or not len(mistakes):
        return 0.0
    counts = mistakes.group_by(["label", "mistake"]).aggregate([([], "count_all")])
    largest = counts.group_by("label").aggregate([("count_all", "max")])["count_all_max"]
    share = pc.sum(largest).as_py() / len(mistakes)
    return (share - 1 / (classes - 1)) / (1 - 1 / (classes - 1))
