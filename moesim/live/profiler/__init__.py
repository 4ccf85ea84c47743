"""Measure a machine, and make a hardware profile of the samples."""
