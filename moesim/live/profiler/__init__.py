"""Profiling: what to measure on a machine, measuring it, and making a hardware profile of the samples.

`fits` turns samples into curves, `show` and `compare` put profiles before a reader; none of them measures or needs PyTorch.
"""
