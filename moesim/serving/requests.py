"""Requests that arrive, and the rows of a trace that they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class RequestRecord(NamedTuple):
    """One request of a served workload, from its arrival on; -1: it was not so far when the run ended."""

    request: int
    user: int  # of a closed workload; -1: of an open one
    arrival: int  # ns
    start: int  # begin of the first step with a row of it
    first: int  # end of the step with its first token
    end: int  # end of the step with its last token
    prompt: int  # tokens
    answer: int  # tokens asked for, the first of which comes with the prompt's last row
    generated: int  # tokens of the answer that came
    cached: int  # tokens of the prompt that were there from others
    preempted: int  # times that its cache was given up
    refused: int  # 1: it can never fit


class Routing(NamedTuple):
    """Rows of a trace that a request reads; both parts are read round and round."""

    first_prompt: int
    n_prompt: int
    shift_prompt: int
    first_decode: int
    n_decode: int
    shift_decode: int


@dataclass(slots=True, eq=False)
class Request:
    """A request and how far it is."""

    number: int
    arrival_ns: int
    prompt: int  # tokens
    answer: int  # tokens, the first of which comes with the prompt's last row
    routing: Routing
    user: int = -1
    blocks: tuple[int, ...] = ()  # numbers of the blocks of its prompt, of which each stands for all before it too
    block_tokens: int = 0  # of each of these blocks, if there are any; the last may have fewer
    follows: int = 0  # tokens of its answer that these blocks cover, too
    # how far it is
    computed: int = 0  # tokens whose KV cache is there
    generated: int = 0
    drafts: int = 0  # proposed after its newest token
    draft_runs: int = 0  # of the drafter, for these: one more where it stopped by itself
    cached: int = 0
    preempted: int = 0
    refused: int = 0
    given_up: int = 0  # tokens that were computed, and whose KV cache was given up: preemptions, drafts that were refused
    rows_run: int = 0  # rows that steps had of it
    start_ns: int = -1
    first_ns: int = -1
    last_ns: int = -1  # of its latest token

    @property
    def known(self) -> int:
        """Tokens that can be computed: the prompt, the answer so far, and what is proposed to follow."""
        return self.prompt + self.generated + self.drafts

    @property
    def content(self) -> int:
        """Tokens whose content its blocks may say."""
        return self.prompt + self.follows

    @property
    def decodes(self) -> bool:
        """Whether all but the newest token is computed."""
        return self.generated > 0 and self.computed == self.prompt + self.generated - 1

    @property
    def over(self) -> bool:
        return self.generated >= self.answer

    @property
    def window(self) -> int:
        """Rows of its next step once it decodes: its newest token and its drafts."""
        return 1 + self.drafts

    def cut(self, rows: int) -> int:
        """Return so many of its next rows; drafts that do not fit are dropped."""
        n = min(rows, self.known - self.computed)
        if self.decodes and n < self.window:
            self.limit_drafts(n - 1)
        return n

    def limit_drafts(self, most: int) -> None:
        """Let the drafter propose no more than so many tokens."""
        self.drafts, self.draft_runs = min(self.drafts, most), min(self.draft_runs, most)

    def take(self, tokens: int) -> None:
        """Take so many tokens after a step; the KV cache of drafts that were refused is given up."""
        self.generated += tokens
        kept = self.prompt + self.generated - 1
        self.given_up += self.computed - kept
        self.computed, self.drafts, self.draft_runs = kept, 0, 0

    def find(self, tokens: int) -> None:
        """Take so many tokens as computed, whose KV cache is there when it is admitted."""
        self.computed = tokens
        if self.preempted:
            self.given_up -= tokens
        else:
            self.cached = tokens

    def give_up(self) -> None:
        """Forget what was computed, to begin again later."""
        self.given_up += self.computed
        self.preempted += 1
        self.computed = self.drafts = self.draft_runs = 0

    def prefix(self, other: Request) -> int:
        """Count the tokens with which its prompt and a former one's context begin alike, as far as their blocks say."""
        same = 0
        for mine, its in zip(self.blocks, other.blocks, strict=False):
            if mine != its:
                break
            same += 1
        return min(same * self.block_tokens, self.prompt, max(other.prompt, min(other.content, other.computed)))

    def rows(self, n: int) -> Sequence[int] | NDArray[Any]:
        """Return the rows of the trace of the next n tokens."""
        r, begin, end = self.routing, self.computed, self.computed + n
        if begin >= self.prompt:
            at = begin - self.prompt + r.shift_decode
            return [r.first_decode + (at + i) % r.n_decode for i in range(n)]
        split = min(end, self.prompt)
        found = r.first_prompt + (np.arange(begin, split) + r.shift_prompt) % r.n_prompt
        if split == end:
            return found
        rest = r.first_decode + (np.arange(end - split) + r.shift_decode) % r.n_decode
        return np.concatenate([found, rest])

    def record(self) -> RequestRecord:
        end = self.last_ns if self.over else -1
        return RequestRecord(
            self.number, self.user, self.arrival_ns, self.start_ns, self.first_ns, end, self.prompt, self.answer,
            self.generated, self.cached, self.preempted, self.refused,
        )  # fmt: skip
