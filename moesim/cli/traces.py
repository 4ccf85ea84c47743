"""``moesim trace``: record, import, describe and make traces."""

from __future__ import annotations

from moesim.cli import (
    trace_caches,
    trace_catalogue,
    trace_export,
    trace_import,
    trace_learn,
    trace_lookahead,
    trace_record,
    trace_split,
    trace_stats,
    trace_synthesize,
)
from moesim.cli.help import Commands

app = Commands(help="Record, import, describe and make traces.")
app.command("record")(trace_record.trace_record)
app.command("learn")(trace_learn.trace_learn)
app.command("import")(trace_import.trace_import)
app.command("catalogue")(trace_catalogue.trace_catalogue)
app.command("calibrate")(trace_import.trace_calibrate)
app.command("split")(trace_split.trace_split)
app.command("export")(trace_export.trace_export)
app.command("stats")(trace_stats.trace_stats)
app.command("caches")(trace_caches.trace_caches)
app.command("lookahead")(trace_lookahead.trace_lookahead)
app.command("synthesize")(trace_synthesize.synthesize)
app.command("fit")(trace_synthesize.fit)
