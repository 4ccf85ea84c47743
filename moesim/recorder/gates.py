"""Record what the routers of a model choose while it generates, without changing the model.

Forward hooks on the routers see each router's input and output. Nothing is replaced, so the tokens are the
ones that the model generates without a recorder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


@dataclass(frozen=True)
class Recording:
    """Routing of one request; row i is token i, the prompt first.

    Attributes
    ----------
    experts : (n_rows, n_layers, top_k) int64
        Ids in rank order, as the router returned them.
    weights : (n_rows, n_layers, top_k) float32
        As the model uses them.
    scores : (n_rows, n_layers, n_experts) float32
        Softmax of the router's logits.
    inputs : (n_rows, n_layers, hidden) float32
        What each router read.
    tokens : (n_rows,) int64
        Token ids fed to the model.
    n_prompt : int
        Rows of the prompt.
    """

    experts: NDArray[np.int64]
    weights: NDArray[np.float32]
    scores: NDArray[np.float32]
    inputs: NDArray[np.float32]
    tokens: NDArray[np.int64]
    n_prompt: int


class GateHooks:
    """Context manager that keeps what every router reads and returns, one forward pass after another.

    Parameters
    ----------
    gates : sequence of nn.Module
        The routers in layer order. Each returns (logits, weights, ids) of shape (n_tokens, ...).
    """

    def __init__(self, gates: Sequence[nn.Module]) -> None:
        self._gates = list(gates)
        self._handles: list[Any] = []
        self._seen: list[list[tuple[Tensor, ...]]] = [[] for _ in self._gates]

    def __enter__(self) -> GateHooks:
        for gate, seen in zip(self._gates, self._seen, strict=True):
            self._handles.append(gate.register_forward_hook(_keeper(seen)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def stacked(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All rows so far: inputs, logits, weights and ids, each (n_rows, n_layers, ...)."""
        inputs, logits, weights, ids = (
            torch.stack([torch.cat([call[i] for call in seen]) for seen in self._seen], dim=1) for i in range(4)
        )
        return inputs, logits, weights, ids


def _keeper(seen: list[tuple[Tensor, ...]]) -> Any:
    def keep(_module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
        # Copies: the model may go on writing into what it passed.
        seen.append((rows.clone(), *(output.detach().clone() for output in outputs)))

    return keep


def routers(model: Any) -> list[nn.Module]:
    """Find the routers of a Mixtral-like model, in layer order; dense layers have none."""
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def generate(
    model: Any,
    prompt: Sequence[int],
    n_decode: int,
    *,
    temperature: float,
    seed: int,
    banned: Sequence[int] = (),
) -> list[int]:
    """Generate token by token with a KV cache, one request at a time.

    Parameters
    ----------
    model : transformers causal language model
    prompt : sequence of int
        Token ids.
    n_decode : int
        Tokens to generate *and feed back*, so that each has a row of routing.
    temperature : float
        0: greedy.
    seed : int
        Of the sampling.
    banned : sequence of int
        Tokens that are never sampled, such as the end of the text.

    Returns
    -------
    list of int
        Prompt and generated tokens, all of which went through the model.
    """
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        output = model(input_ids=torch.tensor([tokens]), use_cache=True)
        for _ in range(n_decode):
            logits = output.logits[0, -1].float()
            logits[list(banned)] = -torch.inf
            if temperature > 0:
                token = int(torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator))
            else:
                token = int(logits.argmax())
            tokens.append(token)
            output = model(input_ids=torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
        return tokens


def record(
    model: Any,
    prompt: Sequence[int],
    n_decode: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    banned: Sequence[int] = (),
) -> Recording:
    """Generate as `generate` does, and record the routing of every token.

    Returns
    -------
    Recording
        Of ``len(prompt) + n_decode`` rows.
    """
    with GateHooks(routers(model)) as hooks:
        tokens = generate(model, prompt, n_decode, temperature=temperature, seed=seed, banned=banned)
    inputs, logits, weights, ids = hooks.stacked()
    return Recording(
        experts=ids.numpy(),
        weights=weights.float().numpy(),
        scores=logits.float().softmax(dim=-1).numpy(),
        inputs=inputs.float().numpy(),
        tokens=np.asarray(tokens, np.int64),
        n_prompt=len(prompt),
    )


def gate_weights(model: Any) -> NDArray[np.float32]:
    """Router weights, (n_layers, n_experts, hidden) float32."""
    stacked = torch.stack([gate.get_parameter("weight").detach().float() for gate in routers(model)])
    return np.asarray(stacked.numpy(), np.float32)


def gate_reuse(inputs: NDArray[np.float32], gates: NDArray[np.float32], lookahead: int) -> NDArray[np.float32]:
    """Read an earlier layer's state with each layer's own router.

    Parameters
    ----------
    inputs : (n_rows, n_layers, hidden) float32
        Router inputs.
    gates : (n_layers, n_experts, hidden) float32
        Router weights.
    lookahead : int
        Layers between the state and the router.

    Returns
    -------
    (n_rows, n_layers, n_experts) float32
        ``[:, l]`` is the softmax of router l applied to the input of router ``l - lookahead``; zeros where
        there is none.
    """
    scores = np.zeros((*inputs.shape[:2], gates.shape[1]), np.float32)
    source = inputs[:, : inputs.shape[1] - lookahead]
    logits = np.einsum("nlh,leh->nle", source, gates[lookahead:], optimize=True)
    scores[:, lookahead:] = torch.from_numpy(logits).softmax(dim=-1).numpy()
    return scores


def residual_vectors(recordings: Sequence[Recording]) -> NDArray[np.float16]:
    """Mean step of the router input from each layer to the next, over the tokens of some requests.

    Returns
    -------
    (n_layers, hidden) float16
        ``[l]`` is the mean of input l + 1 minus input l; zeros for the last layer.
    """
    n_rows = sum(len(r.inputs) for r in recordings)
    total = np.sum([np.diff(r.inputs, axis=1).sum(axis=0, dtype=np.float64) for r in recordings], axis=0)
    mean = total / n_rows
    return np.concatenate([mean, np.zeros_like(mean[:1])]).astype(np.float16)


def residual_reuse(inputs: NDArray[np.float32], gates: NDArray[np.float32], residual: NDArray[np.float16]) -> NDArray[np.float32]:
    """As `gate_reuse` with lookahead 1, after adding the mean step of the source layer.

    Parameters
    ----------
    inputs : (n_rows, n_layers, hidden) float32
    gates : (n_layers, n_experts, hidden) float32
    residual : (n_layers, hidden) float16
        As stored in the trace, so that anybody gets the same scores from it.

    Returns
    -------
    (n_rows, n_layers, n_experts) float32
    """
    return gate_reuse(inputs + residual.astype(np.float32), gates, 1)
