"""Statistics of a stream: running quantiles, the test for drift, and memory that does not grow."""

import gc
import math
import random
import tracemalloc

import pytest
import torch
from test_online_learning import make, net
from torch import nn

from samplewise.core.quantiles import PERIOD, RunningQuantiles, bucket_of, middle_of
from samplewise.online.drift import DriftTest, smallest_limit


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_running_quantiles_are_within_one_percent(scale):
    generator = random.Random(0)
    values = [scale * generator.lognormvariate(0, 2) * generator.choice((1, 1, 1, -1)) for _ in range(9000)]
    running = RunningQuantiles()
    for value in values:
        running.add(bucket_of(value))
    for level in (0.01, 0.1, 0.5, 0.9, 0.99, 1.0):
        exact = sorted(values)[max(1, math.ceil(level * len(values))) - 1]
        assert running.quantile(level) == pytest.approx(exact, rel=0.01)


def test_running_quantiles_forget_and_stay_small():
    running = RunningQuantiles()
    assert math.isnan(running.quantile(0.5)) and len(running) == 0
    for k in range(3 * PERIOD):
        running.add(bucket_of(1.0 if k < PERIOD else 5.0))
    assert PERIOD <= len(running) <= 2 * PERIOD
    assert running.quantile(0.001) == pytest.approx(5.0, rel=0.01)
    assert bucket_of(0.0) == bucket_of(1e-300) == 0 and middle_of(0) == 0
    assert bucket_of(1e300) == bucket_of(1e12) == -bucket_of(-1e300) < 2800


def test_the_limit_is_the_smallest_with_at_most_the_rate():
    """Compared with the probability from a sum over the order of the losses: which of them are the largest."""

    def probability(losses, larger, block, count):
        # All orders of the losses are equally likely. Exceedances are the losses of the block above the earlier loss
        # that has exactly `larger` larger earlier ones.
        return sum(
            math.comb(c + larger, larger) * math.comb(block - c + losses - larger - 1, losses - larger - 1)
            for c in range(count, block + 1)
        ) / math.comb(losses + block, losses)

    for losses, block, rate in [(20, 10, 0.05), (200, 100, 1e-4), (5000, 100, 1e-4)]:
        larger = losses // 10
        limit = smallest_limit(losses, larger, block, rate)
        assert probability(losses, larger, block, limit) <= rate < probability(losses, larger, block, limit - 1)


def test_false_alarms_are_as_rare_as_stated():
    """With a rate of 0.01 in a block, 200,000 independent losses have 20 alarms on average."""

    class Often(DriftTest):
        RATE = 0.01

    generator = random.Random(0)
    detector = Often()
    alarms = 0
    for _ in range(200_000):
        detector.update(generator.expovariate(1.0))
        alarms += detector.drift_detected
    assert alarms <= 20 + 3 * math.sqrt(20)


def test_larger_losses_raise_an_alarm_and_smaller_ones_do_not():
    generator = random.Random(0)
    detector = DriftTest()

    def alarms(mean, count):
        result = []
        for k in range(count):
            detector.update(generator.expovariate(1 / mean))
            if detector.drift_detected:
                result.append(k)
        return result

    assert not alarms(1.0, 3000) and not alarms(0.2, 1000)
    (first, *rest) = alarms(5.0, 1000)
    assert first < 100 and not rest  # the test begins again with the losses after the alarm
    detector.update(math.nan)
    assert not detector.drift_detected


def test_online_reports_drift_and_quantiles():
    online = make(net(outputs=1), criterion=nn.MSELoss())
    assert math.isnan(online.quantiles()["loss"][0.5]) and online.drift is False
    x = torch.randn(1200, 4, dtype=torch.float64)
    updates = [online.learn_one(row, row.sum().item() + (20 if k > 1000 else 0)) for k, row in enumerate(x)]
    alarms = [k for k, update in enumerate(updates) if update.drift]
    assert len(alarms) == 1 and 1000 < alarms[0] < 1150
    losses = sorted(update.loss for update in updates)
    assert online.quantiles()["loss"][0.9] == pytest.approx(losses[math.ceil(0.9 * 1200) - 1], rel=0.01)
    norms = sorted(update.norm for update in updates)
    assert online.quantiles()["norm"][0.5] == pytest.approx(norms[599], rel=0.01)


def learn(online, samples):
    rows = torch.randn(64, 4, dtype=torch.float64)
    features = [dict(zip("abcd", row, strict=True)) for row in rows.tolist()]
    for k in range(samples):
        online.predict_one(features[k % 64])
        online.learn_one(features[k % 64], k % 3)


def test_memory_does_not_grow():
    online = make(net(), clip=1.0)
    online.step.optimizer.param_groups[0]["lr"] = 0.0  # losses repeat, so that quantiles need no new buckets
    learn(online, 1500)
    sizes = []
    tracemalloc.start()
    try:
        for _ in range(4):
            learn(online, 300)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # Less than 34 bytes per sample; objects that torch reuses need some, most of them in the first 300 samples.
    assert sizes[-1] - sizes[1] < 20_000


@pytest.mark.slow
def test_memory_does_not_grow_over_a_million_updates():
    import resource

    online = make(net(), clip=1.0, compile=True)
    learn(online, 50_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    learn(online, 1_000_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000  # kilobytes
    assert online.samples == 1_050_000
