"""Losses by which a discrete flow is pretrained.

x1 is data, x ~ p_t(. | x1) its noisy version, p = p(x1 | x) what the network says. For a mixture path
with rate r = kappa' / (1 - kappa),

    cross_entropy     -log p(x1), at the positions that are not known already
    generalized_kl    r (1[x = x1] - p(x) - 1[x != x1] log p(x1))

The second is the Bregman divergence of the rates, a bound of the likelihood. On a masked path it is r times
the first at masks and 0 at known tokens. Both are lowest where p is the true posterior.

Source: arXiv 2412.03487 (generalised KL), 2407.15595 (cross-entropy).
Shapes: B rows, L positions, S states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.mdp.token_paths import MixturePath


def cross_entropy(log_posterior: Tensor, x1: Tensor) -> Tensor:
    """The mean over positions that are not known, a scalar in nats.

    Args:
        log_posterior: (B, L, S), of x1.
        x1: (B, L) the data.
    """
    unknown = torch.isfinite(log_posterior.detach()).sum(-1) > 1
    values = -log_posterior.gather(-1, x1[..., None])[..., 0]
    return torch.where(unknown, values, 0.0).sum() / unknown.sum().clamp(min=1)


def generalized_kl(path: MixturePath, log_posterior: Tensor, x: Tensor, x1: Tensor, t: Tensor) -> Tensor:
    """The loss of each position (B, L), never below 0.

    Args:
        path: a mixture path.
        log_posterior: (B, L, S), of x1.
        x, x1: (B, L) noisy tokens and the data.
        t: (B,) times in (0, 1); 0 too unless kappa_power is below 1.
    """
    rate = torch.tensor([path.kappa_dot(float(v)) / (1 - path.kappa(float(v))) for v in t]).to(log_posterior)
    here = log_posterior.gather(-1, x[..., None])[..., 0].exp()
    same = (x == x1).to(here)
    # not same * log p: 0 times -inf is NaN where a token is known
    wrong = torch.where(x == x1, 0.0, log_posterior.gather(-1, x1[..., None])[..., 0])
    return rate[:, None] * (same - here - wrong)
