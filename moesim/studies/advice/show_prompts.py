"""What computing prompts on the GPU would change: the ranking is by decoding, so it does not say."""

from __future__ import annotations

from moesim.core.units import digits
from moesim.studies.advice.advice import Advice
from moesim.studies.advice.candidates import Candidate
from moesim.studies.advice.families import PREFILL
from moesim.studies.advice.search import speed


def sooner(advice: Advice, shown: Candidate) -> list[tuple[Candidate, str]]:
    """Give the placement that computes prompts on the GPU, if the one that is shown does not and has its first token later."""
    screened = advice.found.screened
    told = []
    for one in screened:
        if one.family.endswith(PREFILL) and one.policy["name"] == shown.policy["name"] and shown in screened:
            first, other = (float(screened[which]["ttft_mean_ns"]) / 1e9 for which in (one, shown))
            if "prefill_threshold" not in shown.policy and first < other:
                speeds = [digits(speed(screened[which])) for which in (one, shown)]
                times = [digits(value, 2) for value in (first, other)]
                words = f"first token {' instead of '.join(times)} s, {' instead of '.join(speeds)} tokens/s on the first request"
                told.append((one, f"{one.title}, prompts on the GPU: {words}"))
    return told
