"""Flower's names, or an error that names the extra which installs it."""

from typing import Any

Array: Any
ArrayRecord: Any
ClientApp: Any
ConfigRecord: Any
FedAvg: Any
FitIns: Any
LegacyFedAvg: Any
Message: Any
MetricRecord: Any
RecordDict: Any
ndarrays_to_parameters: Any
parameters_to_ndarrays: Any

_missing: ImportError | None = None
try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server.strategy import FedAvg as LegacyFedAvg
    from flwr.serverapp.strategy import FedAvg
except ImportError as error:
    _missing = error
    Array = ArrayRecord = ClientApp = ConfigRecord = Message = MetricRecord = RecordDict = None
    FitIns = ndarrays_to_parameters = parameters_to_ndarrays = None
    FedAvg = LegacyFedAvg = object


def require() -> None:
    """Raises an `ImportError` that says how to install Flower, if it is not installed."""
    if _missing is not None:
        raise ImportError(
            "jaxcomp.adapters.flower needs Flower, flwr>=1.31,<2: in a clone, "
            "pip install '.[flower]'"
        ) from _missing
