"""Matplotlib figures from frames of result rows, made without pyplot and its global state.

A frame has one row a run, with the keys of `moesim.metrics.summarise` and the columns ``policy``, ``model``,
``hardware``, ``trace``, ``routing`` (``recorded``, ``miniature`` or ``synthetic``), ``source_label`` (the
weakest), and ``cache_ratio`` or ``batch_size``. `moesim.plots.catalogue` lists all kinds of figures.
"""

from moesim.plots.bars import decode_speed
from moesim.plots.captions import corner_label
from moesim.plots.gantt import gantt
from moesim.plots.lines import hit_rate
from moesim.plots.stacks import breakdown
from moesim.plots.style import save

__all__ = ["breakdown", "corner_label", "decode_speed", "gantt", "hit_rate", "save"]
