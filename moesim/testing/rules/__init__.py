"""Stated rules next to the records of a run: what a policy decides inside the engine, judged by what papers and code say.

The rules are transcribed from papers and from what is known of released code, and share no code with the policies.
"""

from moesim.testing.rules.judging import RuleCheck, examine_rules

__all__ = ["RuleCheck", "examine_rules"]
