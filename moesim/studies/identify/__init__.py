"""A machine from a few speeds; see ``docs/guide/calibrate.md``."""
