"""Experiments from Python, on the same parts as the commands."""
