"""Flower's names, or an error that names the extra which installs it."""

from typing import Any

Array: Any
ArrayRecord: Any
ClientApp: Any
ConfigRecord: Any
FedAvg: Any
Message: Any
MetricRecord: Any
RecordDict: Any

_missing: ImportError | None = None
try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg
except ImportError as error:
    _missing = error
    Array = ArrayRecord = ClientApp = ConfigRecord = Message = MetricRecord = RecordDict = None
    FedAvg = object


def require() -> None:
    """Raises an `ImportError` that says how to install Flower, if it is not installed."""
    if _missing is not None:
        raise ImportError(
            "jaxcomp.adapters.flower needs Flower, flwr>=1.31,<2: in a clone, "
            "pip install '.[flower]'"
        ) from _missing
