"""Simulate offloaded inference of Mixture-of-Experts models, to the nanosecond and without the hardware."""

__version__ = "0.1.0"
