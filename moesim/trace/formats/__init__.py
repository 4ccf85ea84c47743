"""Routing recorded by others, as a trace, and traces as files of others.

A new format is one module with a `Format`, and its entry in ``importing.formats``.
"""
