"""OD-MoE: a cluster of workers loads experts on demand, as a shadow model predicts them.

"OD-MoE: on-demand expert loading for cacheless edge-distributed MoE inference", arXiv, 2025. No code is released.

Idea: workers with a PCIe link each take turns. A main node computes all but the experts; groups of workers load the next layers'
experts, one each, and forget them once computed. A quantised copy of the model, on a node of its own, decodes ahead and predicts
them; every so often it is handed the main node's token and KV cache.

| point | paper says | released code does | we do |
|---|---|---|---|
| roles | main, shadow and worker nodes | none | GPUs by the beginning of their names: ``main``, ``shadow``, ``workers``; several shadows hold consecutive layers each |
| groups | N_W / G groups of G = k workers, layer l to group l mod n_g | none | the same; ``group_size``; workers that fill no group load in prefill only |
| eq. 1 | G dense and G - 1 expert parts, G the group's size | none | the number of groups (`longest_hidden_load`), as in its example |
| N_W - k loaders | printed | none | k is the group's size |
| which worker loads which expert | not stated | none | by predicted rank, then id |
| random predictions | its ablation's case 5, without a shadow | none | ``prediction_source: random``: top_k experts a row drawn for every layer as a decode step begins, loaded as workers get free; at no cost |
| wrong prediction | the worker that holds the wrong expert loads again | none | the lowest worker whose expert is not needed; a load under way ends first |
| part-right prediction | not stated | none | only the wrong one is loaded; the layer waits for both |
| eviction | once computed | none | once the layer's last expert is (``release: group``), or each worker on its own (``worker``) |
| shadow | decodes alongside, token aligned every T_i, KV every KV_j tokens | none | ``precision``, ``token_period``, ``kv_period``; layer after layer, at the cost of whole layers |
| its start | late departure: once it has been handed token (and KV) | none | the same in aligned tokens; with the main node in others |
| a token ahead | not stated | none | no |
| prompt's KV | an alignment sends that of the new token, 256 KB | none | the shadow keeps its own; ``prompt_kv: sent`` sends the main node's first, as recorded signals assume |
| prompt: the shadow | not stated | none | no time: its INT8 pass ends long before the main node's (0.4 s printed for FP32 on GPUs that hold all) |
| prompt: who loads what | no prediction; the eight experts of each layer on eight workers, in parallel | none | the same, active or not; more experts than workers go in rounds |
| prompt: when | not stated; printed before "once loaded" | none | ``prefill_load``: as the ``layer`` begins, or ``ahead``, as workers get free |
| prompt: hidden states | "once loaded", grouped by expert | none | sent when all workers have loaded |
| prompt: mini-batches | Fig. 7b: four, the next is sent while a worker computes; the experiments' number is not stated | none | ``mini_batches``: 4, each to all workers, outputs back once computed; 1 is Fig. 7a |
| prompt: what stays | nothing | none | the same; ``release`` as in decode |
| memory of a worker | one expert | none | the same |
| batch | no batching in decode | none | more experts than workers: one after the other, each worker at its own pace |
| network | t^M and t^W include it | none | hidden states hop by hop; tokens and KV as one message each time |

Its ablation has six cases: token and KV aligned at every token (the default); the token only (``kv_period: null``); the KV
cache only (``token_period: null``); neither; no shadow, random experts (``prediction_source: random``); no shadow, loaded once
routed (``prediction_source: none``).

A prompt's first token, ms a layer of FP32 Mixtral on its cluster: an expert over PCIe 29.6 (704.6 MB at 23.8 GB/s); hidden
states to the workers 4.5 with 16 tokens, 35.6 with 128 (two experts a token, 16 KB each, 117.7 MB/s), and as much back; an
expert 0.9; the main node 0.5; 16 latencies 0.8. That is 40.7 and 103.0 in sequence; 42.0 and 98.2 are printed (1345 and 3144 ms
over 32 layers), so nothing seems to overlap. But a full-duplex port carries rows out and back at once: 1171 and 2250 ms here,
or 1153 and 2173 with ``prefill_load: ahead``; with one direction at a time 1299 and 3333 ms, without mini-batches 1260 and 3258
(``odmoe/one-way.yaml``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, cast

from moesim.errors import ConfigError, HardwareError
from moesim.model.parts import bits_to_bytes
from moesim.model.spec import SHADOW_BITS, ModelSpec
from moesim.policies.base import STAGING, PolicyBase, sample, slot_bytes
from moesim.policies.options import option
from moesim.policies.parts import source_needs
from moesim.policy import (
    DEMAND,
    LAYER_PARTS,
    PREFETCH,
    STEP_PARTS,
    Action,
    Drop,
    Fetch,
    Fetched,
    LayerBegin,
    Placement,
    Pool,
    Predict,
    Predicted,
    Ran,
    Routed,
    Run,
    Send,
    Sent,
    StepBegin,
    View,
)


def by_rank(ids: Sequence[Sequence[int]]) -> list[int]:
    """Order the experts of some rows: by the best rank that any row gives them, then by id.

    >>> by_rank([[5, 2]]), by_rank([[5, 2], [2, 7], [3, 5]])
    ([5, 2], [2, 3, 5, 7])
    """
    best: dict[int, int] = {}
    for row in ids:
        for rank, expert in enumerate(row):
            best[expert] = min(rank, best.get(expert, rank))
    return sorted(best, key=lambda expert: (best[expert], expert))


class Loads(NamedTuple):
    """Experts that the workers of a layer hold."""

    queues: list[list[int]]  # of each worker, what it holds or is to load, in load order
    dropped: list[tuple[int, int]]  # (worker, expert) that are not needed after all


def assign_loads(queues: Sequence[Sequence[int]], wanted: Sequence[int], *, final: bool = True) -> Loads:
    """Assign to workers what is predicted or, once routed (``final``), what is missing.

    Each missing expert goes to the worker with the fewest left, the lowest first; unless ``final``, nothing is dropped.

    Experts 5 and 2 are predicted, in this order; the router says 2 and 7, so worker 0 alone loads again:

    >>> assign_loads([[], []], [5, 2], final=False).queues
    [[5], [2]]
    >>> assign_loads([[5], [2]], [2, 7])
    Loads(queues=[[7], [2]], dropped=[(0, 5)])

    More experts than workers:

    >>> assign_loads([[], []], [3, 1, 6], final=False).queues
    [[3, 6], [1]]
    """
    needed = set(wanted)
    kept = [[expert for expert in queue if expert in needed or not final] for queue in queues]
    dropped = [(w, expert) for w, queue in enumerate(queues) for expert in queue if final and expert not in needed]
    there = {expert for queue in kept for expert in queue}
    for expert in wanted:
        if expert not in there:
            min(kept, key=len).append(expert)
    return Loads(kept, dropped)


def mini_batches(ids: Sequence[Sequence[int]], n_parts: int) -> list[dict[int, list[int]]]:
    """Split the rows of a prefill step evenly (Fig. 7b); return each part's rows by expert.

    >>> mini_batches([[5, 2], [2, 7], [3, 5]], 2)
    [{5: [0], 2: [0]}, {2: [1], 7: [1], 3: [2], 5: [2]}]
    """
    n_rows, n_parts = len(ids), min(n_parts, len(ids))
    parts: list[dict[int, list[int]]] = []
    for part in range(n_parts):
        rows: dict[int, list[int]] = {}
        for row in range(part * n_rows // n_parts, (part + 1) * n_rows // n_parts):
            for expert in ids[row]:
                rows.setdefault(expert, []).append(row)
        parts.append(rows)
    return parts


def is_due(token: int, period: int | None) -> bool:
    """Whether the shadow is aligned before a decoded token (from 0); a period of None: never.

    >>> [(is_due(i, 2), is_due(i, 4)) for i in range(5)]
    [(True, True), (False, False), (True, False), (False, False), (True, True)]
    """
    return period is not None and token % period == 0


class Alignment(NamedTuple):
    """Period of the shadow's alignment by tokens and KV cache, and whether prompts have one."""

    token_period: int | None
    kv_period: int | None
    prompt_sent: bool


class Shadow:
    """Decodes next to the main node, a share of consecutive layers on each of its GPUs."""

    def __init__(self, source: str, main: str, gpus: Sequence[str], alignment: Alignment, model: ModelSpec) -> None:
        self._source, self._main, self._gpus, self._alignment, self._model = source, main, gpus, alignment, model
        each = -(-model.n_layers // len(gpus))
        self._shares = [range(i * each, min((i + 1) * each, model.n_layers)) for i in range(len(gpus))]
        self._aligned: dict[int, tuple[int, int, int]] = {}  # request -> tokens decoded, in the main node's KV cache, sent of it
        self._awaited: dict[str, tuple[int, int]] = {}  # message -> step, share of the shadow that it sets going
        self._step = -1
        self._rows = 0

    def weights(self, precision: str) -> dict[str, int]:
        """Return the bytes on each GPU; embedding, norms, routers and LM head keep their precision."""
        model = self._model
        layer = model.attention_params + model.shared_params + model.n_experts * model.expert_params
        layer_bytes = bits_to_bytes(layer, SHADOW_BITS[precision]) + model.dense_bytes()
        held = {gpu: len(share) * layer_bytes for gpu, share in zip(self._gpus, self._shares, strict=True)}
        held[self._gpus[0]] += model.embedding_bytes + model.leading_bytes
        held[self._gpus[-1]] += model.head_bytes
        return held

    def begin(self, event: StepBegin) -> list[Action]:
        """Begin a decode step at once, or once token and KV have come; in prefill take note."""
        self._step, self._rows = event.step, len(event.requests)
        prefill = event.phase == "prefill"
        n_bytes = self._aligned_bytes(Counter(event.requests.tolist()), prefill)
        if prefill:
            return []
        return [self._message(n_bytes, self._main, 0)] if n_bytes else self._predict(0)

    def sent(self, event: Sent) -> list[Action]:
        """Compute a share once its message has arrived, unless its step is over."""
        step, share = self._awaited.pop(event.tag)
        return self._predict(share) if step == self._step else []

    def predicted(self, event: Predicted) -> list[Action]:
        """Send the state on where a share has computed its last layer."""
        share = event.layer // len(self._shares[0])
        if event.mb or event.layer != self._shares[share][-1] or event.layer == self._model.n_layers - 1:
            return []
        return [self._message(self._model.activation_bytes(self._rows), self._gpus[share], share + 1)]

    def _aligned_bytes(self, requests: Counter[int], prefill: bool) -> int:
        """Count a step's rows; return the bytes the shadow gets before it: embeddings and KV."""
        token_period, kv_period, prompt_sent = self._alignment
        tokens = kv = 0
        for request, rows in requests.items():
            decoded, known, aligned = self._aligned.get(request, (0, 0, 0))
            if prefill:
                if decoded:  # served again
                    decoded = known = aligned = 0
                if not prompt_sent:
                    aligned += rows
            else:
                if is_due(decoded, token_period):
                    tokens += rows
                if is_due(decoded, kv_period):
                    kv, aligned = kv + known - aligned, known
                decoded += 1
            self._aligned[request] = decoded, known + rows, aligned
        return self._model.activation_bytes(tokens) + kv * self._model.kv_bytes_per_token

    def _message(self, n_bytes: int, src: str, share: int) -> Send:
        """Send what a share of the shadow waits for."""
        tag = f"step {self._step}, shadow {share}"
        self._awaited[tag] = self._step, share
        return Send(n_bytes, src, self._gpus[share], tag)

    def _predict(self, share: int) -> list[Action]:
        return [Predict(self._step, layer, self._source, self._gpus[share]) for layer in self._shares[share]]


NO_PREDICTION = "none"
RANDOM = "random"


class Prompt(NamedTuple):
    """Rows of a layer in prefill that are still to be sent."""

    layer: int
    mini_batches: list[dict[int, list[int]]]  # of each, the rows of every expert
    rounds: list[list[list[int]]]  # what each worker holds at a time, in turn


class OdMoE(PolicyBase):
    """Experts loaded by groups of workers, as a quantised shadow predicts them (OD-MoE, 2025).

    Every result is of a machine with a link for each worker; it does not compare with systems on one link.
    """

    paper = "OD-MoE (arXiv, 2025)"
    missing = (
        "the time of the shadow's prompt pass, which is shorter than the main node's, of its embedding and LM head, and the memory of its "
        "KV cache",
        "the messages that tell workers which expert to load: a prediction or a correction is known to them at once",
    )
    profile = "odmoe-10x3090"

    token_period: int | None = option(
        1,
        "Decoded tokens from one alignment of the shadow's token to the next, the first at the first decoded token; None: never.",
        ge=1,
    )
    kv_period: int | None = option(1, "The same for its KV cache.", ge=1)
    precision: Literal["int8", "nf4", "fp16"] = option(
        "int8", "Of the shadow; with the periods it names the recorded signal, ``shadow-int8:T1:KV1`` and so on (0 for never)."
    )
    prediction_source: str | None = option(
        None,
        'Another source of predictions. ``"synthetic:0.97"`` and ``"oracle"`` are paid for as the shadow and '
        "need no state of the model, like it, and the messages of the alignment stay. Without a shadow, "
        'alignment or cost: ``"random"``, where experts are drawn (``"random:3"``: from another seed than 0), '
        'and ``"none"``, where they are loaded once routed.',
    )
    prompt_kv: Literal["sent", "own"] = option("own", "Whether the first alignment of the KV cache brings the prompt's, too.")
    release: Literal["group", "worker"] = option(
        "group",
        "Whether the workers of a layer are free once all its experts are computed, or each once its own is; in prefill too.",
    )
    mini_batches: int = option(
        4,
        "Parts of a prefill step's rows that the main node sends one after the other, while workers compute the part before.",
        ge=1,
    )
    prefill_load: Literal["layer", "ahead"] = option(
        "layer", "Whether workers load the experts of a layer in prefill as the layer begins, or as soon as they are free."
    )
    group_size: int | None = option(None, "Workers that serve a layer in decode; None: the model's top_k.", ge=1)
    main: str = option("main", "How the name of the GPU begins that runs all but the experts.")
    shadow: str = option("shadow", "How the names of the GPUs begin that run the shadow.")
    workers: str = option("worker", "How the names of the GPUs begin that run experts.")

    @property
    def source(self) -> str:
        """The name under which predictions are asked for; of others, the option."""
        given = self.prediction_source
        if given is None:
            return f"signal:shadow-{self.precision}:T{self.token_period or 0}:KV{self.kv_period or 0}"
        return f"shadow-{self.precision}:{given}" if given.startswith(("synthetic:", "oracle")) else given

    @property
    def has_shadow(self) -> bool:
        """Whether predictions are a shadow's, or paid for as if they were."""
        return _kind(self.source) != NO_PREDICTION and self._seed is None

    @property
    def _seed(self) -> int | None:
        if _kind(self.prediction_source) != RANDOM:
            return None
        _, _, seed = str(self.prediction_source).partition(":")
        if seed and not seed.isdecimal():
            what = f"policy od-moe: prediction_source '{self.prediction_source}'"
            raise ConfigError(f"{what}: expected a seed from 0 on, such as {RANDOM}:3, got '{seed}'")
        return int(seed or 0)

    @property
    def listens(self) -> frozenset[type]:
        wanted: set[type] = {StepBegin, LayerBegin, Routed, Fetched}
        if self.has_shadow:
            wanted |= {Predicted, Sent}
        if self.release == "group":
            wanted.add(Ran)
        return frozenset(wanted)

    @property
    def needs(self) -> frozenset[str]:
        return source_needs(self.source) if self.has_shadow else frozenset()

    def place(self, view: View) -> Placement:
        """Assign the roles: workers empty, all else on the main node, the shadow on its own."""
        model = view.model
        self._main = _named(view, "main", self.main)[0]
        shadows = _named(view, "shadow", self.shadow, (self._main,)) if self.has_shadow else []
        alignment = Alignment(self.token_period, self.kv_period, self.prompt_kv == "sent")
        self._shadow = Shadow(self.source, self._main, shadows, alignment, model) if shadows else None
        self._workers = _named(view, "workers", self.workers, (self._main, *shadows))
        self._size = self.group_size or model.top_k
        if len(self._workers) < self._size:
            raise HardwareError(
                f"policy od-moe: expected at least {self._size} GPUs '{self.workers}*', a group of workers, got "
                f"{len(self._workers)}; choose another profile or a smaller group_size"
            )
        self._n_groups = len(self._workers) // self._size
        self._n_experts = model.n_experts
        self._last = model.n_layers - 1
        self._step = -1
        self._rows = 0
        self._prefill = False
        self._queues: dict[int, list[list[int]]] = {}  # layer -> what each of its workers holds or loads, in order
        self._used: dict[int, list[int]] = {}  # layer -> experts that its routed rows need
        self._running: dict[int, int] = {}  # layer -> Runs that have not ended
        self._releases: dict[int, list[Action]] = {}  # layer -> what to do when none is left
        self._ids: list[list[int]] = []  # of the present layer in prefill: the experts of each row that is routed
        self._prompt = Prompt(-1, [], [])
        n_bytes = slot_bytes(view)
        elsewhere = self._main != view.compute
        parts = {(part, layer): self._main for part in LAYER_PARTS for layer in range(model.n_layers)}
        parts |= {(part, -1): self._main for part in STEP_PARTS}
        return Placement(
            pools=[Pool(worker, STAGING, n_bytes) for worker in self._workers],
            parts=parts if elsewhere else {},
            reserved=self._shadow.weights(self.precision) if self._shadow else {},
        )

    def on_layer_begin(self, event: LayerBegin, view: View) -> Iterable[Action]:
        return self._load_all(event.layer) if self._prefill else ()

    def on_fetched(self, event: Fetched, view: View) -> Iterable[Action]:
        return self._send_rows(view) if event.layer == self._prompt.layer else ()

    def on_sent(self, event: Sent, view: View) -> Iterable[Action]:
        return self._shadow.sent(event) if self._shadow else ()

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        """Let the shadow depart at once, or once the main node's token and KV have come."""
        self._step, self._rows, self._prefill = event.step, len(event.requests), event.phase == "prefill"
        self._queues, self._used, self._running, self._releases = {}, {}, {}, {}
        if self._shadow:
            return self._shadow.begin(event)
        return () if self._prefill or self._seed is None else self._load_random(self._seed, view.model.top_k)

    def on_predicted(self, event: Predicted, view: View) -> list[Action]:
        """Load what was predicted on the workers whose turn it is; hand the shadow's state on."""
        layer = event.layer
        actions = self._shadow.predicted(event) if self._shadow else []
        if layer not in self._used:  # else too late: the layer is routed
            self._assign(layer, by_rank(event.ids.tolist()), final=False)
            actions += self._fetches(layer, self._queues[layer], PREFETCH)
        return actions

    def _load_random(self, seed: int, top_k: int) -> list[Action]:
        """Load experts drawn for each row of every layer, as workers get free."""
        actions: list[Action] = []
        for layer in range(self._last + 1):
            first = (self._step * (self._last + 1) + layer) * self._rows
            drawn = [sample(self._n_experts, top_k, seed, first + row) for row in range(self._rows)]
            self._assign(layer, by_rank(drawn), final=False)
            actions += self._fetches(layer, self._queues[layer], PREFETCH)
        return actions

    def _load_all(self, layer: int) -> list[Action]:
        """Load all experts of this layer, or of the next, too, as workers get free."""
        actions: list[Action] = []
        ahead = 1 if self.prefill_load == "ahead" else 0
        for at in range(layer, min(layer + ahead, self._last) + 1):
            if at not in self._queues:
                self._assign(at, range(self._n_experts), final=False)
                actions += self._fetches(at, self._queues[at], PREFETCH)
        return actions

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Correct what was loaded, run what is needed, and evict it once it is computed."""
        layer, team = event.layer, self._team(event.layer)
        final = event.first_row + len(event.experts) == self._rows
        used = self._used.setdefault(layer, [])
        needed = event.active if self._prefill else by_rank(event.experts.tolist())
        used += [expert for expert in needed if expert not in used]

        def is_there(worker: int, expert: int) -> bool:  # or on its way; `evict` may have taken it for another layer
            return view.is_resident(layer, expert, team[worker]) or view.is_pending(layer, expert, team[worker])

        before = self._queues.get(layer, [() for _ in team])
        wrong = [(worker, expert) for worker, expert in self._assign(layer, used, final=final) if is_there(worker, expert)]
        actions: list[Action] = [Drop(layer, (expert,), team[worker]) for worker, expert in wrong]
        queues = self._queues[layer]
        active = set(used if self._prefill else event.active)
        mine = [[expert for expert in queue if expert in active] for queue in queues]
        lacking = [[e for e in mine[w] if e not in before[w] or not is_there(w, e)] for w in range(len(team))]
        actions += self._fetches(layer, lacking, DEMAND)
        if self._prefill:
            self._ids = event.experts.tolist() if event.first_row == 0 else self._ids + event.experts.tolist()
            if final:
                rounds = [[queue[at : at + 1] for queue in mine] for at in range(max(map(len, mine)))]
                self._prompt = Prompt(layer, mini_batches(self._ids, self.mini_batches), rounds)
                actions += self._send_rows(view)
            return actions
        actions += [Run(layer, experts, worker) for experts, worker in zip(mine, team, strict=True) if experts]
        self._running[layer] = self._running.get(layer, 0) + len(active)
        if final:
            drops: list[Action] = [Drop(layer, queue, worker) for queue, worker in zip(queues, team, strict=True) if queue]
            one_go = max(len(queue) for queue in queues) <= 1
            if self.release == "group" and one_go:
                self._releases[layer] = drops
            else:
                actions += drops
        return actions

    def _send_rows(self, view: View) -> list[Action]:
        """Send the rows in mini-batches once all workers have loaded what they hold together."""
        layer, parts, rounds = self._prompt
        actions: list[Action] = []
        while rounds:
            held = [(worker, queue) for worker, queue in zip(self._workers, rounds[0], strict=True) if queue]
            if not all(view.is_resident(layer, expert, worker) for worker, queue in held for expert in queue):
                break
            del rounds[0]
            runs = [
                Run(layer, (expert,), worker, rows[expert], part=part)
                for part, rows in enumerate(parts) for worker, queue in held for expert in queue if expert in rows
            ]  # fmt: skip
            drops = [Drop(layer, queue, worker) for worker, queue in held]
            self._running[layer] = self._running.get(layer, 0) + len(runs)
            actions += runs
            if self.release == "group":
                self._releases[layer] = list(drops)
            else:
                actions += drops
        return actions

    def on_ran(self, event: Ran, view: View) -> Sequence[Action]:
        """Free a group once it has computed all that its layer needs."""
        self._running[event.layer] -= len(event.experts)
        return self._releases.pop(event.layer, ()) if not self._running[event.layer] else ()

    def evict(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        """Return on demand an idle expert of the latest layer after its own; else wait."""
        if fetch.urgency != DEMAND:
            return None
        for unit in reversed(cast("list[tuple[int, int]]", view.residents(fetch.device, STAGING))):
            if unit[0] <= fetch.layer:
                return None
            if not view.is_in_use(*unit, fetch.device):
                return unit
        return None

    def _team(self, layer: int) -> Sequence[str]:
        """Return the workers that serve a layer: all in prefill, its group in decode."""
        first = layer % self._n_groups * self._size
        return self._workers if self._prefill else self._workers[first : first + self._size]

    def _assign(self, layer: int, wanted: Sequence[int], *, final: bool) -> list[tuple[int, int]]:
        """Update what a layer's workers hold or load; return (worker, expert) not needed."""
        before = self._queues.get(layer) or [[] for _ in self._team(layer)]
        self._queues[layer], dropped = assign_loads(before, wanted, final=final)
        return dropped

    def _fetches(self, layer: int, queues: Sequence[Sequence[int]], urgency: int) -> list[Action]:
        pairs = zip(queues, self._team(layer), strict=True)
        return [Fetch(layer, queue, worker, urgency, STAGING) for queue, worker in pairs if queue]


def _kind(source: str | None) -> str:
    return (source or "").partition(":")[0]


def _named(view: View, option: str, prefix: str, taken: Sequence[str] = ()) -> list[str]:
    found = [gpu for gpu in view.gpus if gpu.startswith(prefix) and gpu not in taken]
    if not found:
        raise HardwareError(
            f"policy od-moe: option {option}: expected GPUs whose names begin with '{prefix}', got {', '.join(view.gpus) or 'none'}; "
            f"choose a profile such as {OdMoE.profile}, or name the roles"
        )
    return found
