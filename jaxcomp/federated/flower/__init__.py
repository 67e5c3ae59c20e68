"""Federated training over Flower: its transport, our bytes, the simulation's bits.

Needs `pip install 'jaxcomp[flower]'`.
"""

from jaxcomp.federated.flower.client import (
    ELSEWHERE as ELSEWHERE,
    client_app as client_app,
    compress_mod as compress_mod,
)
from jaxcomp.federated.flower.records import arrays_of as arrays_of, params_of as params_of
from jaxcomp.federated.flower.strategy import CompressedFedAvg as CompressedFedAvg
