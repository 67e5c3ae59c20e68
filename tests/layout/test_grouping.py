"""Arrays are shared out to collectives."""

import itertools

from jaxcomp.layout import grouping


def test_runs_are_whole_and_about_even():
    for sizes in ([1] * 12, [5, 1, 1, 1, 8, 1, 1], [100], [0, 0], []):
        for count in (1, 2, 3, 5):
            runs = grouping.even_runs(list(range(len(sizes))), sizes, count)
            assert list(itertools.chain(*runs)) == list(range(len(sizes)))
            assert len(runs) <= count
            for run in runs:
                assert sum(sizes[i] for i in run) <= sum(sizes) / count + max(sizes)
