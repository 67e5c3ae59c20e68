from jaxcomp.weights.forecasting import Forecast as Forecast, Sent as Sent, forecast as forecast
from jaxcomp.weights.publisher import Publisher as Publisher
