"""A run as Chrome trace events, for Perfetto."""

from moesim.metrics.timeline.events import (
    Event,
    check_timeline,
    timeline_events,
    timeline_json,
    write_timeline,
)

__all__ = [
    "Event",
    "check_timeline",
    "timeline_events",
    "timeline_json",
    "write_timeline",
]
