"""The engine: devices, links, memory and time. It knows no policy, no phase and no model by name.

The ten rules, each with an exact-timeline test in ``tests/engine/test_rules_*.py``:

1.  All times are whole nanoseconds, and equal inputs give equal timelines wherever they are run.
2.  What falls on one instant is told in this order: what has ended and what memory that frees; Fetched and Ran; the end of a
    layer, the begin of the next; Routed; Predicted. Nothing starts before all of it has been told, and equals go by
    submission. So an expert whose copy ends as its layer is routed is a hit. What a policy answers to one event takes effect
    before it hears the next, and the view never contradicts what it has decided. If decisions cost time, their effect comes
    that much later, one decision after another, and a record says so.
3.  In a layer each micro-batch passes attention, the dense rest and the router, and is then told as Routed; its shared experts
    go before its routed ones. The layer is over once no slot is open, no run is unfinished and no output is missing. What
    comes before the first layer and after the last one belongs to the step.
4.  A lane of a device does one task at a time, in order of submission; what still lacks weights or inputs is passed over.
5.  A link has one direction, one transfer at a time, and never interrupts it. Of those that could start the most urgent goes
    first, then the oldest. Chunks let a demand in between; the links of a medium take turns; every hop stores before it forwards.
6.  A transfer takes its memory when it begins; dropping or evicting gives it back. What a Run or a
    copy reads on a device, waiting or under way, is in use and stays. Copies on backing devices never go.
7.  A Run brings no weights: they are there, or a fetch of them is under way.
8.  The rows of a group of runs cross to a device together, each once, and so do their outputs.
9.  Named activities that overlap slow each other down to the rates measured for the pair, the smallest of several.
10. When nothing can happen though work is left, the run ends with an error that says who waits for what.
"""

from moesim.engine.entry import empty_view, simulate
from moesim.engine.state import EngineOptions

__all__ = ["EngineOptions", "empty_view", "simulate"]
