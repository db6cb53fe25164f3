"""What a transition kernel is; the kernels themselves live in flowrl/kernels, one file a law.

Convention: sigma in [0, 1], 1 = noise, descending; x_sigma = (1 - sigma) x0 + sigma eps; velocity
v = eps - x0, so x0 = x - sigma v and eps = x + (1 - sigma) v. Samplers with other schedules and predictions
are brought to these coordinates by their wrappers (flowrl/mdp/schedules.py).
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from flowrl.mdp.transitions import Transition


class Kernel(Protocol):
    """The contract of a kernel (register one with ``@register("kernel", name)``).

    Pure and stateless: a function of its arguments only.

    Class attributes:
        family: "flow": the coordinates that it is written for, which a wrapper must offer.

    A kernel that has the network jump to a level of its own choice and re-noises from there may also have
    ``destination(sigma_next) -> float``, the level where the jump ends; flow maps need it.
    """

    family: ClassVar[str]

    def __call__(self, prediction: Tensor, sample: Tensor, sigma: float, sigma_next: float) -> Transition:
        """The distribution of the next state.

        Args:
            prediction: (B, *) float32, the velocity that the network's prediction implies.
            sample: (B, *) float32, the state of the flow at `sigma`.
            sigma, sigma_next: noise levels now and after the step, sigma > sigma_next >= 0.
        """
        ...

    def std(self, sigma: float, sigma_next: float) -> float:
        """The step's noise standard deviation, sqrt(|dt|) included; 0 for a deterministic step."""
        ...
