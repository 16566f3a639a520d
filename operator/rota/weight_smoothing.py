"""Former name of `weight_noise`, until the pipeline imports that."""

from rota.weight_noise import Weights, filter_noise

__all__ = ["Weights", "filter_noise"]
