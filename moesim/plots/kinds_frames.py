"""Kinds of figures that are drawn from steps, layers, records and traces.

What the functions of a kind take first is said by its `source`: ``"steps"`` and ``"layers"`` the frames of
`moesim.metrics.frames`, ``"trace"`` a `moesim.trace.Trace`, and ``"records"`` two things: records by policy, and the machine.
"""

from __future__ import annotations

from typing import Final

from moesim.plots.balance import balance_cdf, balance_cdf_caption, balance_cdf_data
from moesim.plots.gantt import gantt, gantt_caption, gantt_data
from moesim.plots.kinds import Kind
from moesim.plots.signals import (
    signal_accuracy,
    signal_accuracy_by_layer,
    signal_accuracy_by_layer_caption,
    signal_accuracy_by_layer_data,
    signal_accuracy_caption,
    signal_accuracy_data,
)
from moesim.plots.tokens import hit_rate_by_token, hit_rate_by_token_caption, hit_rate_by_token_data
from moesim.plots.trace_maps import (
    coactivation,
    coactivation_caption,
    coactivation_data,
    coactivation_ranks,
    coactivation_ranks_caption,
    coactivation_ranks_data,
    reuse_map,
    reuse_map_caption,
    reuse_map_data,
)

FRAME_KINDS: Final[dict[str, Kind]] = {
    "hit_rate_by_token": Kind(
        "hit rate of decoding by token index", "steps", hit_rate_by_token_data, hit_rate_by_token, hit_rate_by_token_caption
    ),
    "balance_cdf": Kind(
        "how evenly the experts of a layer occupy CPU and GPU: distribution over layer visits", "layers", balance_cdf_data,
        balance_cdf, balance_cdf_caption,
    ),
    "gantt": Kind("what devices and links did in a few layers", "records", gantt_data, gantt, gantt_caption),
    "signal_accuracy": Kind(
        "accuracy of recorded signals: heat maps, layers by token index", "trace", signal_accuracy_data, signal_accuracy,
        signal_accuracy_caption,
    ),
    "signal_accuracy_by_layer": Kind(
        "accuracy of recorded signals: a line a signal, by layer", "trace", signal_accuracy_by_layer_data,
        signal_accuracy_by_layer, signal_accuracy_by_layer_caption,
    ),
    "reuse_map": Kind(
        "reuse of experts: heat maps, layers by distance and by rank", "trace", reuse_map_data, reuse_map, reuse_map_caption
    ),
    "coactivation": Kind(
        "which experts of the next layer follow those of a layer: heat maps", "trace", coactivation_data, coactivation,
        coactivation_caption,
    ),
    "coactivation_ranks": Kind(
        "how far an expert tells those of the next layer: heat maps, layers by rank", "trace", coactivation_ranks_data,
        coactivation_ranks, coactivation_ranks_caption,
    ),
}  # fmt: skip
"""Name -> kind."""
