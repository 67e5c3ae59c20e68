"""The nouns of the library as abstract classes, with a default for every hook.

Settings are frozen dataclasses that are hashable by value; everything traced is a `NamedTuple` of
arrays. A caller calls a hook and never asks whether a part has it.
"""

from jaxcomp.base.aggregate import Aggregate as Aggregate
from jaxcomp.base.codec import (
    Codec as Codec,
    Facts as Facts,
    Hints as Hints,
    WrappedCodec as WrappedCodec,
    changed as changed,
    not_summable as not_summable,
)
from jaxcomp.base.feedback import (
    Feedback as Feedback,
    FeedbackFacts as FeedbackFacts,
    Mirrored as Mirrored,
    WrappedFeedback as WrappedFeedback,
    sent_later as sent_later,
)
from jaxcomp.base.gate import Gate as Gate, Opened as Opened
from jaxcomp.base.graph import Graph as Graph
from jaxcomp.base.leg import (
    Combine as Combine,
    Heard as Heard,
    Leg as Leg,
    Move as Move,
    Outcome as Outcome,
)
from jaxcomp.base.period import Period as Period
from jaxcomp.base.reducer import (
    Costs as Costs,
    Reducer as Reducer,
    ReducerFacts as ReducerFacts,
    WrappedReducer as WrappedReducer,
)
