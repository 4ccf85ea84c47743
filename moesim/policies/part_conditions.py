"""What is asked of parts to know whether an option can matter beside them; see `moesim.policies.moot`."""

from __future__ import annotations

from typing import Annotated

from moesim.policies.fixed_threshold import FixedThreshold
from moesim.policies.moot import InPolicy, MootIf, Where
from moesim.policies.no_prefetch import NoPrefetch
from moesim.policies.parts.assignment import AllCpu, AllGpu, Resident, ResidentInDecode
from moesim.policies.parts.placement import Empty, HighestIds, LowestIds
from moesim.policies.visit import Victims

NAMED = Where("any part by name", lambda part: part is not None, as_written=True)
COLD = Where("none", lambda part: isinstance(part, Empty))
DEALT_OUT = Where("none, lowest-ids or highest-ids", lambda part: isinstance(part, Empty | LowestIds | HighestIds))
ALL_CPU = Where("all-cpu", lambda part: isinstance(part, AllCpu))
RESIDENT = Where("resident", lambda part: _splits(part))
LOADS_NOTHING = Where("all-cpu or resident", lambda part: isinstance(part, AllCpu) or _splits(part))
ALL_GPU = Where("all-gpu", lambda part: isinstance(part, AllGpu))
ONE_DEVICE = Where("all-cpu or all-gpu", lambda part: isinstance(part, AllCpu | AllGpu))
ASKS_WHETHER = Where("fixed-threshold", lambda part: isinstance(part, FixedThreshold))
ADMITS = Where("any but static or workload-aware", lambda part: part.admits)
STAGES = Where("static or workload-aware", lambda part: not part.admits)
ONLY_EVICTS = Where("lru or another that only evicts", lambda part: part.admits and not getattr(part, "swaps", True))
SWAPS_NOTHING = Where("any but workload-aware", lambda part: not getattr(part, "swaps", True))
NO_PREFETCH = Where("none", lambda part: isinstance(part, NoPrefetch))
FILLS_NO_CACHE = Where("none or transient", lambda part: isinstance(part, NoPrefetch) or part.transient)
NOT_TRANSIENT = Where("none or into the cache", lambda part: not part.transient)


def _splits(part: object) -> bool:
    """Whether it never moves an expert, in any phase."""
    return isinstance(part, Resident) and not isinstance(part, ResidentInDecode)


NEVER_FILLED = MootIf(placement=COLD, replacement=STAGES)
"""A cache that starts empty and that nothing enters."""
COLD_STATIC = InPolicy(MootIf(placement=COLD))
"""A cache that starts empty, of a replacement that only lets in as many as it puts out."""
NO_LOADS = MootIf(assignment=LOADS_NOTHING, prefetch=FILLS_NO_CACHE)
NOTHING_EVICTED = MootIf(assignment=LOADS_NOTHING, prefetch=FILLS_NO_CACHE, replacement=ONLY_EVICTS)
"""A cache that nothing enters, so that nothing is ever evicted."""
NO_COPIES = MootIf(assignment=LOADS_NOTHING, prefetch=NO_PREFETCH)
"""Nothing is on the GPU but the cache."""
STAGED_ALIKE = MootIf(replacement=STAGES, placement=DEALT_OUT)
"""One pool for all layers that holds what pools of the layers would hold, as nothing but its layer's takes a place."""
ONE_DEVICE_PLANNED = MootIf(assignment=ONE_DEVICE)
NONE_BUT_CACHED = MootIf(assignment=RESIDENT, prefetch=NOT_TRANSIENT)
LOADED_ARE_CACHED = MootIf(assignment=ASKS_WHETHER, prefetch=NOT_TRANSIENT, replacement=ADMITS)
"""No expert is on the GPU, or on its way there, beside those in the cache."""
NAMED_AHEAD = InPolicy(MootIf(victims_named="at issue", assignment=LOADS_NOTHING))
"""What leaves is named for a copy to a later layer, whose experts the present visit does not use."""
VictimsOption = Annotated[Victims, NAMED_AHEAD]
