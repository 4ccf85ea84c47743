"""``moesim schema``: the format of experiment files, for editors."""

from __future__ import annotations

import json

from moesim.experiment.config import json_schema
from moesim.policies.schema import policy_schema


def schema() -> None:
    """Print the JSON Schema of experiment files.

    Example: moesim schema
    """
    found = json.loads(json_schema())
    found["properties"]["policies"]["items"], parts = policy_schema()
    found["$defs"] |= parts
    print(json.dumps(found, indent=2, sort_keys=True))
