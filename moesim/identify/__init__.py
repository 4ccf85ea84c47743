"""A machine from a few speeds: the constants of a profile that observations identify, with intervals; see ``docs/calibrate.md``."""
