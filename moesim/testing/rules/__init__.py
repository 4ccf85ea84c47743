"""Stated rules, by which the recorded decisions of a policy are judged.

The rules are transcribed from papers and from what is known of released code, and share no code with the policies.
"""

from moesim.testing.rules.judging import RuleCheck, examine_rules

__all__ = ["RuleCheck", "examine_rules"]
