"""Number formats: what the weights are stored in, what the forward pass computes in, and how gradients are scaled."""

from trainer.precision.plugins import MixedPrecision, Precision, TruePrecision

__all__ = ["MixedPrecision", "Precision", "TruePrecision"]
