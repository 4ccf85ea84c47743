"""What-if: one number of a machine or an experiment changes; name what limits the run."""

from moesim.studies.whatif.study import whatif

__all__ = ["whatif"]
