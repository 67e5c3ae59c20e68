"""The committed results of the benchmarks meet the bounds that the documentation states."""

import pathlib

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


def test_committed_results_hold(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import check

    assert check.failures() == []
