"""How the routers behave: expert load, dead experts, router entropy.

Shape suffixes: L MoE layers, E experts, T tokens, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from disagmoe.observability.metrics import DEAD_EXPERTS, ROUTER_ENTROPY, expert_load_key


class RoutingStatistics:
    """Sums over the micro-batches of a step, on one worker, for the MoE layers that it routes.

    `add` launches a few small kernels and never waits for the device. Call it once a micro-batch and layer, outside
    recomputed regions. Sums over workers are the caller's: all-reduce `tensors()`.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device | str = "cpu") -> None:
        self.counts_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        """Tokens routed to each expert."""
        self.entropy_sum_L = torch.zeros(num_layers, dtype=torch.float64, device=device)
        """Entropies of the tokens' routing probabilities, summed, in nats."""
        self.num_tokens_L = torch.zeros(num_layers, dtype=torch.int64, device=device)

    def add(self, layer: int, expert_ids_TK: Tensor, scores_TE: Tensor) -> None:
        """Count one micro-batch. `layer`: row of the sums, i.e. the layer's ordinal among the MoE layers."""
        ids_Q = expert_ids_TK.reshape(-1)
        self.counts_LE[layer].index_add_(0, ids_Q, torch.ones_like(ids_Q, dtype=torch.int64))
        self.entropy_sum_L[layer] += router_entropy_sum(scores_TE)
        self.num_tokens_L[layer] += scores_TE.shape[0]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What to sum over workers, in a fixed order."""
        return self.counts_LE, self.entropy_sum_L, self.num_tokens_L

    def reset(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()

    def metrics(self, layers: Sequence[int]) -> dict[str, float]:
        """The metrics of these sums. `layers`: the index in the unsplit model of each row."""
        loads = expert_load(self.counts_LE.cpu().numpy())
        result = {expert_load_key(layer): load for layer, load in zip(layers, loads, strict=True)}
        result[DEAD_EXPERTS] = dead_experts(self.counts_LE.cpu().numpy())
        num_tokens = int(self.num_tokens_L.sum())
        if num_tokens:
            result[ROUTER_ENTROPY] = float(self.entropy_sum_L.sum()) / num_tokens
        return result


def router_entropy_sum(scores_TE: Tensor) -> Tensor:
    """Entropies of the tokens' routing distributions, summed over tokens: float64 scalar, nats.

    Scores need not sum to one a token (sigmoid routers): they are normalised first. A token without any score counts
    as entropy 0.
    """
    scores_TE = scores_TE.detach().double()
    total_T1 = scores_TE.sum(-1, keepdim=True)
    probabilities_TE = scores_TE / torch.where(total_T1 > 0, total_T1, 1.0)
    return torch.special.entr(probabilities_TE).sum()


def entropy_of_mean(probability_sum_E: npt.ArrayLike) -> float:
    """Entropy in nats of the average routing distribution, from probabilities summed over tokens.

    Unlike the mean of the tokens' entropies it is high when tokens are routed surely but to different experts; the
    difference between the two is the information that routing carries about the token.

    >>> round(entropy_of_mean([2.0, 2.0]), 4)
    0.6931
    """
    sums_E = np.asarray(probability_sum_E, dtype=np.float64)
    total = sums_E.sum()
    if total <= 0:
        return 0.0
    probabilities_E = sums_E[sums_E > 0] / total
    return float(-(probabilities_E * np.log(probabilities_E)).sum())


def expert_load(counts_LE: npt.ArrayLike) -> list[float]:
    """Largest over mean number of tokens of a layer's experts: 1 is balanced, E is all on one; 0 without any tokens.

    >>> expert_load([[2, 2], [4, 0], [0, 0]])
    [1.0, 2.0, 0.0]
    """
    counts = np.asarray(counts_LE, dtype=np.float64)
    means_L = counts.mean(axis=1)
    return (counts.max(axis=1) / np.where(means_L > 0, means_L, 1.0)).tolist()


def dead_experts(counts_LE: npt.ArrayLike) -> int:
    """Experts without a token, over all layers.

    >>> dead_experts([[2, 2], [4, 0], [0, 0]])
    3
    """
    return int((np.asarray(counts_LE) == 0).sum())
