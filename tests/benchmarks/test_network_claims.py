"""Verdicts about training networks follow the numbers."""

import numpy as np
import pytest
from helpers.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
GOOD, BAD = [96.0, 96.2, 96.4, 96.1, 96.3], [90.0, 90.2, 90.4, 90.1, 90.3]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(BENCHMARKS)


def results(better=1, **methods):
    """Numbers as `networks.compare` returns them; scores by method, or whole records."""
    found = {
        name: each if isinstance(each, dict) else {"score": each} for name, each in methods.items()
    }
    return {"better": better, "unit": "%", "methods": found}


def test_comparisons_know_which_score_is_better():
    from claims import scores

    found = results(one=GOOD, other=BAD)
    assert scores.gain(found, "one", "other") == pytest.approx(6)
    assert scores.wins(found, "one", "other") == 5
    assert scores.equal(found, "one", "other")
    assert scores.better(found, "one", "other")
    assert not scores.equal(found, "other", "one")
    assert scores.equal(results(-1, one=GOOD, other=BAD), "other", "one")
    assert "96.2 % (96.0 to 96.4)" in scores.told(found, "one")


def test_paired_differences_are_those_of_scipy():
    from claims import scores
    from scipy import stats

    draw = np.random.default_rng(0)
    theirs = draw.normal(90, 2, 12)
    ours = theirs + draw.normal(0.1, 0.3, 12)
    found = scores.paired(results(ours=list(ours), theirs=list(theirs)), "ours", "theirs")
    interval = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    np.testing.assert_allclose((found.low, found.high), interval)
    # Seeds that differ by far more than methods do not hide which one is better.
    shifted = results(ours=list(theirs + 0.2), theirs=list(theirs))
    assert scores.better(shifted, "ours", "theirs")
    assert not scores.better(shifted, "theirs", "ours")
    # A mean that is as good is not enough if the seeds say little.
    wild = results(ours=[80.0, 100.0], theirs=[90.0, 90.0])
    assert not scores.equal(wild, "ours", "theirs")
    failed = results(ours=[float("nan"), 90.0], theirs=[90.0, 90.0])
    assert not scores.equal(failed, "ours", "theirs")
    assert scores.words(scores.paired(failed, "ours", "theirs")) == "failed"


@pytest.mark.full
def test_each_seed_tests_on_other_images(monkeypatch):
    """The split of a seed has all images once, and that of another seed has others."""
    import images
    from claims import networks

    fake = images.Images(np.arange(5000.0)[:, None] * np.ones((1, 196)), np.zeros(5000, np.int32))
    monkeypatch.setattr(images, "load", lambda: fake)
    task = networks.cnn.__wrapped__()
    parts = [task.split(task.data, seed) for seed in range(2)]
    for train, validation, test in parts:
        numbers = np.concatenate([part[0][:, 0] for part in (train, validation, test)])
        assert [len(part[0]) for part in (train, validation, test)] == [3600, 400, 1000]
        assert sorted(numbers) == list(range(5000))
    first, second = (set(np.asarray(part[2][0][:, 0])) for part in parts)
    assert len(first & second) < 400


def test_quantizers_that_train_worse_lose_their_verdicts():
    from claims import trained_quantizers as claims

    def nuqsgd(ours, inf, plain):
        methods = {"dense": GOOD, "NUQSGD": ours, "QSGDinf": inf, "QSGD": plain}
        return claims._nuqsgd_judged({"CNN": results(**methods)})[1]

    assert nuqsgd(GOOD, GOOD, BAD) == "holds"
    assert nuqsgd(BAD, GOOD, BAD) == "does not hold here"
    assert nuqsgd(GOOD, GOOD, GOOD) == "holds in part"

    def natural(scores, bits):
        one = {"score": scores, "bits": bits}
        methods = {"dense": GOOD, "natural, 9 bits": one, "natural, 8 bits": one}
        return claims._natural_judged({"CNN": results(**methods), "GRU": results(**methods)})[1]

    assert natural(GOOD, 9.0) == "holds"
    assert natural(GOOD, 20.0) == natural(BAD, 9.0) == "does not hold here"


def test_adam_needs_its_ratio_and_its_score():
    from claims import momenta

    def verdict(scores, bits):
        found = results(**{"Adam": GOOD, "1-bit Adam": {"score": scores, "bits": bits}})
        return momenta._adam_judged("1-bit Adam", 4.0)(found)[1]

    assert verdict(GOOD, 7.0) == "holds"
    assert verdict(GOOD, 16.0) == "holds in part"
    assert verdict(BAD, 7.0) == "does not hold here"


@pytest.mark.full
def test_ternary_gradients_scale_by_the_model():
    from claims import ternary

    found = ternary._scale()["numbers"]
    assert ternary._scale_judged(found)[1].startswith("holds")
    found["models"]["AlexNet, 1 Gbit/s"]["speedup"] = [1.0] * len(found["workers"])
    assert ternary._scale_judged(found)[1] == "does not hold here"


def test_a_selection_that_takes_longer_does_not_hold():
    from claims import sparse

    def numbers(sidco, fastsgd):
        seconds = {"lax.top_k": 4.0, "top-k": 2.0, "DGC": 2.0, "SIDCo": sidco, "FastSGD": fastsgd}
        return {"seconds": {name: [x, x, x] for name, x in seconds.items()}}

    for judge, names in ((sparse._sidco_time_judged, 0), (sparse._fastsgd_time_judged, 1)):
        found = [
            judge(numbers(*(x if i == names else 1.0 for i in range(2))))[1] for x in (1, 3, 9)
        ]
        assert found == ["holds", "holds in part", "does not hold here"]


def test_adaptive_periods_are_compared_at_equal_exchanges():
    from claims import periods

    def one(scores, exchanges, variance):
        return {"score": scores, "exchanges": [exchanges] * 5, "variance": [variance] * 5}

    def verdict(scores):
        found = results(**{
            "rounds of 1": one(GOOD, 320, 0.0),
            "rounds of 8": one(GOOD, 40, 2.0),
            "ADPSGD from 4": one(scores, 36, 3.0),
            "ADPSGD from 8": one(scores, 36, 3.0),
        })  # fmt: skip
        assert periods._at_equal_exchanges(found, "ADPSGD from 4") == "rounds of 8"
        return periods._adpsgd_judged(found)[1]

    assert verdict([x + 1 for x in GOOD]) == "holds"
    assert verdict(BAD) == "does not hold here"


def test_large_batches_must_keep_the_accuracy():
    from claims import large_batches

    def verdict(large):
        names = [
            f"{name} ×{times}, {way}"
            for name in large_batches.OPTIMIZERS
            for times in large_batches.TIMES
            for way in large_batches.MEANS
        ]
        found = results(**{name: large if "×16" in name else GOOD for name in names})
        sgd = found["methods"]
        sgd["SGD ×16, dense"] = sgd["SGD ×16, 4 bits"] = {"score": BAD}
        return large_batches._judged(found)[1]

    assert verdict(GOOD) == "holds"
    assert verdict(BAD) == "does not hold here"  # Though four bits are as good as dense means.
