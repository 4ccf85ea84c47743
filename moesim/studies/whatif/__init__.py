"""What-if: one number of a machine or an experiment changes, and what limits the run is named."""

from moesim.studies.whatif.study import whatif

__all__ = ["whatif"]
