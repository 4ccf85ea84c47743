"""A run as Chrome trace events, for Perfetto."""

from moesim.metrics.timeline.events import (
    Event,
    check_timeline,
    timeline_events,
    timeline_json,
    write_timeline,
)
from moesim.metrics.timeline.several import Timeline

__all__ = [
    "Event",
    "Timeline",
    "check_timeline",
    "timeline_events",
    "timeline_json",
    "write_timeline",
]
