"""OD-MoE's shadow: a quantised copy of the model on GPUs of its own, which is handed tokens and KV cache and predicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from moesim.model.spec import SHADOW_BITS, ModelSpec, bits_to_bytes
from moesim.policies.algorithms.od_moe import is_due
from moesim.policy import Action, Predict, Predicted, Send, Sent, StepBegin


class Alignment(NamedTuple):
    """What the shadow is handed: tokens and KV cache every so many tokens (None: never), with the prompt's KV or without."""

    token_period: int | None
    kv_period: int | None
    prompt_sent: bool


class Shadow:
    """Decodes beside the main node, a share of consecutive layers on each of its GPUs."""

    def __init__(self, source: str, main: str, gpus: Sequence[str], alignment: Alignment, model: ModelSpec) -> None:
        self._source, self._main, self._gpus, self._alignment, self._model = source, main, gpus, alignment, model
        each = -(-model.n_layers // len(gpus))
        self._shares = [range(i * each, min((i + 1) * each, model.n_layers)) for i in range(len(gpus))]
        self._aligned: dict[int, tuple[int, int, int]] = {}  # request -> tokens decoded, in the main node's KV cache, sent of it
        self._awaited: dict[str, tuple[int, int]] = {}  # message -> step, share of the shadow that it sets going
        self._step = -1
        self._rows = 0

    def weights(self, precision: str) -> dict[str, int]:
        """Return the bytes on each of its GPUs; embedding, norms, routers and LM head keep their precision."""
        model = self._model
        layer = model.attention_params + model.shared_params + model.n_experts * model.expert_params
        layer_bytes = bits_to_bytes(layer, SHADOW_BITS[precision]) + model.dense_bytes()
        held = {gpu: len(share) * layer_bytes for gpu, share in zip(self._gpus, self._shares, strict=True)}
        held[self._gpus[0]] += model.embedding_bytes + model.leading_bytes
        held[self._gpus[-1]] += model.head_bytes
        return held

    def begin(self, event: StepBegin) -> list[Action]:
        """Begin a decode step at once, or once the main node's token and KV have come; in prefill only take note."""
        self._step, self._rows = event.step, len(event.requests)
        prefill = event.phase == "prefill"
        n_bytes = self._aligned_bytes(Counter(event.requests.tolist()), prefill)
        if prefill:
            return []
        return [self._message(n_bytes, self._main, 0)] if n_bytes else self._predict(0)

    def sent(self, event: Sent) -> list[Action]:
        """Let a share compute once its message has arrived, unless its step is over."""
        step, share = self._awaited.pop(event.tag)
        return self._predict(share) if step == self._step else []

    def predicted(self, event: Predicted) -> list[Action]:
        """Hand the state on where a share has computed its last layer."""
        share = event.layer // len(self._shares[0])
        if event.mb or event.layer != self._shares[share][-1] or event.layer == self._model.n_layers - 1:
            return []
        return [self._message(self._model.activation_bytes(self._rows), self._gpus[share], share + 1)]

    def _aligned_bytes(self, requests: Counter[int], prefill: bool) -> int:
        """Count the rows of a step, and return the bytes that the shadow gets before it: tokens as embeddings, and KV."""
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
        """Let a share compute its layers, one after the other."""
        return [Predict(self._step, layer, self._source, self._gpus[share]) for layer in self._shares[share]]
