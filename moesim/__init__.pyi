from moesim import profile as profile
from moesim import trace
from moesim.api.answers import calibrate, recommend
from moesim.api.figures import plot
from moesim.api.machine import replay, validate
from moesim.api.result import Result
from moesim.api.run import compare, load, load_trace, run
from moesim.api.studies import capacity, diff, league, papers, regret, report, whatif
from moesim.api.traces import stats
from moesim.hardware import HardwareProfile as Hardware
from moesim.hardware import load_hardware
from moesim.model import load_model
from moesim.trace import Trace

__all__ = [
    "Hardware", "Result", "Trace", "__version__", "calibrate", "capacity", "compare", "diff", "league", "load",
    "load_hardware", "load_model", "load_trace", "papers", "plot", "profile", "recommend", "regret", "replay", "report", "run",
    "stats", "trace", "validate", "whatif",
]  # fmt: skip
__version__: str
