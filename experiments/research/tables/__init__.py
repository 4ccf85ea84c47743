"""Tables of the project's pages: run from a checkout, as ``python -m experiments.research.tables.NAME``."""
