"""Routing recorded by others becomes a trace, and a trace becomes files that others read.

A new format is one module with a `Format`, and its entry in ``importing.formats``; ``docs/guide/importing.md`` shows how.
"""
