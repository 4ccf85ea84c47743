"""Klotski's choices: which experts are copied before the gate has chosen, and in which order the others follow."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def most_popular(counts: NDArray[Any], n: int) -> list[int]:
    """Return the n experts with the largest counts, the largest first; of equals the lower id first.

    Parameters
    ----------
    counts : ndarray, (n_experts,)
        How often each expert was used.
    n : int
        How many.

    Returns
    -------
    list of int
        Ids.

    Examples
    --------
    >>> most_popular(np.array([1, 0, 2, 2]), 3)
    [2, 3, 0]
    """
    return [int(expert) for expert in np.argsort(-np.asarray(counts, np.float64), kind="stable")[:n]]


def hot_experts(previous: NDArray[Any], table: NDArray[Any], n_hot: int, *, partners: int = 2) -> list[int]:
    """Choose the hot experts of a layer by what its rows used in the layer before.

    Each expert that a row used there has one vote for each of its ``partners``: the experts of this layer that it was used with
    most often.

    Parameters
    ----------
    previous : ndarray of int, (n_rows, top_k)
        Experts of the layer before that each row was routed to.
    table : ndarray, (n_experts, n_experts)
        Rows that used an expert of the layer before (first axis) and one of this layer (second axis).
    n_hot : int
        How many experts to choose.
    partners : int
        Experts that one vote is for.

    Returns
    -------
    list of int
        Ids, most votes first; of equals the lower id first, among partners too.

    References
    ----------
    Klotski (arXiv:2502.06888, ASPLOS 2025), as its released code for MindSpore chooses (``get_prefetch_expert_index``).

    Examples
    --------
    >>> table = np.array([[0, 0, 4, 3], [9, 8, 0, 0], [0, 0, 1, 2], [0, 0, 0, 0]])
    >>> hot_experts(np.array([[0, 1], [0, 2]]), table, 2)
    [2, 3]
    """
    voters = np.bincount(np.ravel(previous).astype(np.int64), minlength=len(table))
    who = np.flatnonzero(voters)
    chosen = np.argsort(-np.asarray(table[who], np.float64), axis=1, kind="stable")[:, :partners]
    votes = np.zeros(table.shape[1], np.int64)
    np.add.at(votes, chosen, voters[who, None])
    return most_popular(votes, n_hot)


def in_order_of_appearance(experts: NDArray[Any], without: Collection[int] = ()) -> list[int]:
    """Return the experts of a micro-batch, row by row and in rank order, each once.

    Parameters
    ----------
    experts : ndarray of int, (n_rows, top_k)
        Ids that the router chose.
    without : collection of int
        Ids to leave out: those that were asked for before.

    Returns
    -------
    list of int
        Ids in order of first appearance.

    Examples
    --------
    >>> in_order_of_appearance(np.array([[3, 1], [0, 3]]), without={1})
    [3, 0]
    """
    return [expert for expert in dict.fromkeys(np.ravel(experts).tolist()) if expert not in without]
