"""The simulator against measurements."""
