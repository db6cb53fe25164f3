"""What a transition kernel is; the kernels themselves live in flowrl/kernels, one file a law.

Convention: sigma in [0, 1], 1 = noise, descending; x_sigma = (1 - sigma) x0 + sigma eps; the network
predicts the velocity v = eps - x0, so x0 = x - sigma v and eps = x + (1 - sigma) v.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from flowrl.mdp.transitions import Transition


class Kernel(Protocol):
    """The contract of a kernel (register one with ``@register("kernel", name)``).

    Pure and stateless: a function of its arguments only.

    Class attributes:
        family: "flow" or "diffusion": the kind of scheduler whose noise levels it is written for.
    """

    family: ClassVar[str]

    def __call__(self, prediction: Tensor, sample: Tensor, sigma: float, sigma_next: float) -> Transition:
        """The distribution of the next state.

        Args:
            prediction: (B, *) float32, what the network predicts (velocity for flows).
            sample: (B, *) float32, the state at `sigma`.
            sigma, sigma_next: noise levels now and after the step, sigma > sigma_next >= 0.
        """
        ...

    def std(self, sigma: float, sigma_next: float) -> float:
        """The step's noise standard deviation, sqrt(|dt|) included; 0 for a deterministic step."""
        ...
