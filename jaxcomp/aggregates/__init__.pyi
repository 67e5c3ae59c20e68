from jaxcomp.aggregates.combining import (
    Combined as Combined,
    Total as Total,
    add as add,
    combine as combine,
    mean_of as mean_of,
    zero_total as zero_total,
)
from jaxcomp.aggregates.credible import Credible as Credible, CredibleState as CredibleState
from jaxcomp.aggregates.means import ClippedMean as ClippedMean, Mean as Mean
from jaxcomp.aggregates.ranked import (
    CoordinateMedian as CoordinateMedian,
    TrimmedMean as TrimmedMean,
)
