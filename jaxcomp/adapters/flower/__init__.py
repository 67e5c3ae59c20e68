"""Federated training over Flower: its transport, our bytes, the simulation's bits.

Needs Flower: `pip install '.[flower]'` in a clone.
"""

from jaxcomp.adapters.flower.client import (
    ELSEWHERE as ELSEWHERE,
    client_app as client_app,
    compress_mod as compress_mod,
)
from jaxcomp.adapters.flower.closing import Quorum as Quorum
from jaxcomp.adapters.flower.masks import (
    MaskedFedAvg as MaskedFedAvg,
    masked_integers as masked_integers,
    masked_mod as masked_mod,
)
from jaxcomp.adapters.flower.records import arrays_of as arrays_of, params_of as params_of
from jaxcomp.adapters.flower.site import Placed as Placed, Site as Site
from jaxcomp.adapters.flower.strategy import CompressedFedAvg as CompressedFedAvg
