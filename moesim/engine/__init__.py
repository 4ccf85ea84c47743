"""The engine: devices, links, memory and time. It knows no policy, no phase and no model by name.

The ten rules, each with an exact-timeline test in ``tests/test_engine_rules.py``:

1.  Time is integer nanoseconds; the same inputs give the same timeline on every machine.
2.  At one instant: completions, freed memory, Fetched and Ran, LayerEnd, LayerBegin, Routed, Predicted; starts come last.
    Within a kind, submission order. An expert that arrives at the instant of Routed is a hit. An event's actions are
    validated and applied before the next event is delivered, so that the view never contradicts a decision already
    taken. A charged decision time delays the effect of the actions returned at Routed, and is recorded.
3.  A layer: attention, then the rest of the dense part with the router, per micro-batch; Routed per micro-batch; shared
    experts before routed ones; the layer ends when every slot is settled, all its runs have finished and their outputs
    are back. Embedding, leading dense layers and the LM head are tasks of the step.
4.  A device lane runs one task at a time, first in first out, skipping tasks whose weights or inputs are not there yet.
5.  A link is directed, serial and non-preemptive; next is the smallest (urgency, submission) that can start. Chunks let
    a demand fetch in between; links of one medium are serial together; several hops are store-and-forward.
6.  Memory is reserved when a transfer starts and freed when a copy is dropped or evicted. A queued or running Run or
    copy pins what it reads there. The copies on backing devices stay for ever.
7.  Run never loads: the expert must be resident, or its fetch pending.
8.  Activations cross between devices once per group of runs and direction, for the union of their rows.
9.  While two named activities overlap, each proceeds at the rate measured for the pair; with several, at the smallest.
10. If nothing can happen and work remains, the run stops with an error that says who waits for what.
"""

from moesim.engine.entry import EngineOptions, simulate

__all__ = ["EngineOptions", "simulate"]
