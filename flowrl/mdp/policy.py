"""The policy: what is trained inside the pipeline's own networks, and the frozen policies beside it.

The networks are changed in place and keep their class and attributes. With a LoRA, the reference is the
network without the policy's adapter and the old policy a second adapter, so that no weight exists twice.
With full fine-tuning both are sets of tensors that take the place of the weights for a while; there is one
forward path in all cases.

Rules for callers:

* Replay and rollout run inside `Policy.compute`, the backward pass outside of every other context. A backward
  pass that starts while another policy is in place raises: gradient checkpointing runs the forward pass
  again, and would run it with the wrong weights.
* The contexts of other policies carry no gradient. All contexts put back what they find: weights, active
  adapters, requires_grad, eval mode; train mode, with its dropout, never comes back.
* Optimizer steps, averages and checkpoints are taken outside of the contexts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowrl.config import AdapterConfig, EmaConfig
from flowrl.errors import UserError
from flowrl.mdp import adapters
from flowrl.mdp.adapters import OLD, POLICY, Slot
from flowrl.mdp.ema import Ema
from flowrl.mdp.shards import exchange, spread_like

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
REFERENCE = "reference"


class Policy:
    """Trainable weights inside the pipeline's networks, with reference, old policy and average."""

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        adapter: AdapterConfig,
        *,
        dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
        needs_reference: bool = False,
        needs_old: bool = False,
        gradient_checkpointing: bool = False,
        base_adapters: Sequence[str] = (),
        ema: EmaConfig | None = None,
        seed: int = 0,
    ) -> None:
        """Prepares the networks in place.

        Args:
            networks: the pipeline's own denoisers by component name.
            adapter: a LoRA, or all weights.
            dtype: of the forward pass. The frozen weights of a LoRA run are stored in it; trained weights are
                always float32.
            needs_reference: whether `reference` will be used; only then full fine-tuning keeps a copy.
            needs_old: whether `old` will be used.
            gradient_checkpointing: recompute activations in the backward pass.
            base_adapters: names of loaded adapters that belong to the frozen start policy.
            ema: keep an average of the trained weights.
            seed: of the LoRA's initial weights.
        """
        self.networks = dict(networks)
        self.adapter = adapter
        self.dtype = DTYPES[dtype]
        self._lora = adapter.kind == "lora"
        self._base = list(base_adapters)
        self._view = POLICY
        self._own: dict[str, Tensor] | None = None
        self._needs = {REFERENCE: needs_reference, OLD: needs_old}
        self._ema_config = ema
        if self._base and not self._lora:
            raise UserError("model.base_adapters with adapter.kind=full: merge the adapters first")
        for number, network in enumerate(self.networks.values()):
            self._prepare(network, seed + number)
            network.eval()
            if gradient_checkpointing:
                if not getattr(network, "_supports_gradient_checkpointing", False):
                    raise UserError(f"model.gradient_checkpointing: {type(network).__name__} has none")
                network.enable_gradient_checkpointing()  # type: ignore[operator]
            if self.dtype != torch.float32:
                adapters.round_inputs(network, self._dtype_now)
            adapters.guard_backward(network, self._shown)
        self.snapshot()

    def _prepare(self, network: nn.Module, seed: int) -> None:
        if not self._lora:
            adapters.check_frozen(network, [])
            adapters.store(network, torch.float32)
            network.requires_grad_(True)
            return
        adapters.check_frozen(network, self._base)
        adapters.store(network, self.dtype)
        network.requires_grad_(False)
        for name in [POLICY, OLD] if self._needs[OLD] else [POLICY]:
            adapters.add_lora(network, self.adapter, name, seed)
        network.requires_grad_(False)
        for module, attribute in adapters.lora_slots(network, POLICY).values():
            getattr(module, attribute).requires_grad_(True)

    def snapshot(self) -> None:
        """Takes the frozen copies and the average afresh from the present weights.

        Done when the policy is built; to be done again, before the first update, when the networks were moved
        to another device or other start weights were loaded into them.
        """
        self._slots = self._find(POLICY)
        self._layers = [layer for n in self.networks.values() for _, layer in adapters.lora_layers(n)]
        self._modules = [module for n in self.networks.values() for module in n.modules()]
        self._flagged = [p for n in self.networks.values() for p in n.parameters()]
        present = self.parameters()
        config = self._ema_config
        self.ema = Ema(present, config) if config is not None and config.decay > 0 else None
        self._copies: dict[str, dict[str, Tensor]] = {}
        if self._lora:
            adapters.activate(self._layers, self._active(POLICY))
            if self._needs[OLD]:
                self._copies[OLD] = {name: getattr(*slot).detach() for name, slot in self._find(OLD).items()}
                self.update_old(0.0)
        else:
            for name in (REFERENCE, OLD):
                if self._needs[name]:
                    self._copies[name] = {key: p.detach().clone() for key, p in present.items()}

    def _find(self, name: str) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        for prefix, network in self.networks.items():
            if self._lora:
                found = adapters.lora_slots(network, name)
            else:
                modules = dict(network.named_modules())
                found = {
                    key: (modules[key.rpartition(".")[0]], key.rpartition(".")[2])
                    for key, _ in network.named_parameters()
                }
            slots |= {f"{prefix}.{key}": slot for key, slot in found.items()}
        return slots

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters: ``transformer.<layer>.lora_A.weight``, or ``transformer.<parameter>``."""
        return {name: getattr(module, attribute) for name, (module, attribute) in self._slots.items()}

    @property
    def num_trainable(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.parameters().values())

    def compute(self) -> AbstractContextManager[None]:
        """Where forward passes belong: networks in eval mode, and the policy's precision.

        Eval mode stays after the exit, because gradient checkpointing runs the forward pass again later: with
        dropout on, the ratio is not 1 before the first update.
        """
        if True in [module.training for module in self._modules]:
            for network in self.networks.values():
                network.eval()
        if self.dtype == torch.float32:
            return nullcontext()
        # Its cache would keep a whole copy of weights that are sharded.
        sharded = isinstance(self._flagged[0], DTensor)
        return torch.autocast(
            self._flagged[0].device.type, dtype=self.dtype, cache_enabled=False if sharded else None
        )

    def acting(self) -> AbstractContextManager[None]:
        """The policy that is trained (inside `ema_weights`: its average)."""
        return self._as(POLICY)

    def reference(self) -> AbstractContextManager[None]:
        """The frozen start policy, base adapters included; no gradient."""
        return self._as(REFERENCE)

    def old(self) -> AbstractContextManager[None]:
        """The slow acting copy of forward-process objectives; no gradient."""
        return self._as(OLD)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """The average in place of the trained weights; no gradient; does not nest."""
        if self.ema is None:
            raise RuntimeError("no average is kept: ema.decay is 0")
        with self._as(POLICY), self.ema.lend():
            yield

    @torch.no_grad()
    def update_old(self, decay: float) -> None:
        """Moves the old policy: old <- decay * old + (1 - decay) * policy."""
        self._at_home("update_old")
        if OLD not in self._copies:
            raise RuntimeError("the policy was built without needs_old")
        present = self.parameters()
        old = self._copies[OLD]
        torch._foreach_lerp_(list(old.values()), [present[name].detach() for name in old], 1.0 - decay)

    def update_ema(self) -> None:
        """Takes the present weights into the average, if one is kept; once after each optimizer step."""
        if self.ema is not None:
            self._at_home("update_ema")
            self.ema.update()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds: groups ``policy``, ``old``, ``ema`` and ``counters``; not copied."""
        self._at_home("tensors")
        groups = {"policy": {name: p.detach() for name, p in self.parameters().items()}}
        if OLD in self._copies:
            groups["old"] = dict(self._copies[OLD])
        if self.ema is not None:
            groups["ema"] = dict(self.ema.shadow)
            groups["counters"] = {"ema_updates": torch.tensor(self.ema.updates)}
        return groups

    @torch.no_grad()
    def load_tensors(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Puts checkpointed tensors into the existing ones; no adapter or parameter is created.

        Raises:
            UserError: if groups, names, shapes or dtypes differ; then nothing was changed.
        """
        mine = self.tensors()
        _same("groups", mine, groups)
        for group, tensors in mine.items():
            _same(f"group {group}", tensors, groups[group])
            for name, tensor in tensors.items():
                other = groups[group][name]
                if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
                    raise UserError(
                        f"checkpoint, group {group}: {name} is {tuple(other.shape)} {other.dtype}, "
                        f"this policy has {tuple(tensor.shape)} {tensor.dtype}"
                    )
        for group, tensors in mine.items():
            for name, tensor in tensors.items():
                tensor.copy_(spread_like(groups[group][name], tensor))
        if self.ema is not None:
            self.ema.updates = int(mine["counters"]["ema_updates"])

    def _active(self, view: str) -> list[str]:
        return self._base + ([] if view == REFERENCE else [view])

    @contextmanager
    def _as(self, view: str) -> Iterator[None]:
        """Shows a policy to whoever calls the networks, and puts back what was there."""
        if view in self._needs and not self._needs[view] and not (self._lora and view == REFERENCE):
            raise RuntimeError(f"the policy was built without needs_{view}")
        before = self._view
        active = adapters.activity(self._layers)
        grads = [p.requires_grad for p in self._flagged]
        modes = [module.training for module in self._modules]
        try:
            self._show(view)
            with nullcontext() if view == POLICY else torch.no_grad():
                yield
        finally:
            self._show(before)
            adapters.set_activity(self._layers, active)
            if grads != [p.requires_grad for p in self._flagged]:
                for p, flag in zip(self._flagged, grads, strict=True):
                    p.requires_grad = flag
            if modes != [module.training for module in self._modules]:
                for module, mode in zip(self._modules, modes, strict=True):
                    module.training = module.training and mode

    def _show(self, view: str) -> None:
        self._view, before = view, self._view
        if self._lora:
            adapters.activate(self._layers, self._active(view))
            return
        if view == before:
            return
        tensors = self._copies[view] if view != POLICY else self._own or {}
        shown = exchange(self.parameters(), tensors)
        if before == POLICY:
            self._own = shown
        elif view == POLICY:
            self._own = None
        torch.clear_autocast_cache()  # it knows weights by object, not by content

    def _at_home(self, what: str) -> None:
        if self._shown() != POLICY:
            raise RuntimeError(f"{what} inside a context that shows the {self._shown()}")

    def _dtype_now(self) -> torch.dtype:
        """The dtype in which a forward pass computes at the moment."""
        device = self._flagged[0].device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self.dtype if self._lora else torch.float32

    def _shown(self) -> str:
        """Which weights the networks hold at the moment."""
        return "average" if self.ema is not None and self.ema.lent else self._view


def _same(what: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    missing, unknown = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
    if missing or unknown:
        raise UserError(
            f"checkpoint {what}: {len(missing)} missing {missing[:1]}, {len(unknown)} unknown {unknown[:1]}: "
            "made with another model, adapter or ema setting"
        )
