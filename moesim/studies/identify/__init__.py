"""A machine from a few speeds: the constants of a profile that observations identify; see ``docs/guide/calibrate.md``."""
