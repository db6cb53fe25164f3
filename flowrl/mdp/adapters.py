"""What is done to the pipeline's networks: LoRA adapters, storage dtype, and two hooks.

LoRAs are added in place by the network's own ``add_adapter``. The network keeps its class and attributes (no
``PeftModel`` around it), so that pipelines and ``save_lora_weights`` go on working. Which adapters act is
switched without touching ``requires_grad``, which peft's own ``set_adapter`` and ``disable_adapters`` change.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flowrl.config import AdapterConfig
from flowrl.errors import UserError

DENOISERS = ("transformer", "transformer_2", "unet")
POLICY = "policy"
OLD = "old"
SUPPORTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# peft's warnings about several adapters, which are meant here, and about one that it takes out after an error
EXPECTED = "Already found a `peft_config`|Adapter .* was active which is now deleted"
ABSENT = re.compile(r"No LoRA keys associated to (\w+)")  # said of text encoders: the ordinary case
Slot = tuple[nn.Module, str]
# positions and times keep their precision: bfloat16 cannot tell token 257 from token 256
KEEP = re.compile(r"_ids$|coords|rotary|freqs|rope|position|timestep|sigma|guidance")


def find_networks(pipe: Any, wanted: Sequence[str] | None) -> dict[str, nn.Module]:
    """The denoising networks of a pipeline by component name.

    Raises:
        UserError: if a wanted component does not exist or none is found.
    """
    names = (
        list(wanted) if wanted is not None else [n for n in DENOISERS if getattr(pipe, n, None) is not None]
    )
    networks = {}
    for name in names:
        network = getattr(pipe, name, None)
        if not isinstance(network, nn.Module):
            raise UserError(
                f"model.networks: {type(pipe).__name__} has no network {name!r}; it has: "
                + ", ".join(n for n, c in pipe.components.items() if isinstance(c, nn.Module))
            )
        networks[name] = network
    if not networks:
        raise UserError(f"model.networks: no denoiser found in {type(pipe).__name__}; name it")
    return networks


def resolve_targets(network: nn.Module, endings: Sequence[str] | None) -> list[str]:
    """Full names of the modules that get a LoRA.

    Args:
        network: a denoiser; a module that already carries an adapter counts as the module inside.
        endings: module names or their endings (``to_q`` is each ``...attn.to_q``); None: every linear layer.

    Raises:
        UserError: for an ending that names no linear or convolution layer, with near names.
    """
    layers = dict(_layers(network))
    if endings is None:
        names = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
        if not names:
            raise UserError(f"{type(network).__name__} has no linear layer to adapt: use adapter.kind=full")
        return names
    chosen: set[str] = set()
    for ending in endings:
        found = {name for name in layers if name == ending or name.endswith("." + ending)}
        if not found:
            parts = [name.split(".") for name in layers]
            known = {".".join(p[-n:]) for p in parts for n in range(1, ending.count(".") + 2)}
            near = difflib.get_close_matches(ending, sorted(known), n=5, cutoff=0.5)
            hint = f"; near names: {', '.join(near)}" if near else ""
            raise UserError(
                f"adapter.targets: {ending!r} names no linear or convolution layer of "
                f"{type(network).__name__}{hint}"
            )
        chosen |= found
    return [name for name in layers if name in chosen]


def _layers(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers that can be adapted; those inside an adapter or of a fused attention are skipped."""
    closed: tuple[str, ...] = ()
    for name, module in network.named_modules():
        if name.startswith(closed):
            continue
        if isinstance(module, BaseTunerLayer | nn.MultiheadAttention):
            closed += (name + ".",)
        layer = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        if isinstance(layer, SUPPORTED):
            yield name, layer


def add_lora(network: nn.Module, config: AdapterConfig, name: str, seed: int = 0) -> None:
    """Adds a LoRA whose effect is zero: float32 weights, no dropout, no bias.

    Args:
        network: a denoiser with ``add_adapter`` (diffusers' ``PeftAdapterMixin``).
        config: rank, alpha, targets and initialisation.
        name: of the adapter.
        seed: of the initial weights, so that all ranks start alike.
    """
    add: Any = getattr(network, "add_adapter", None)
    if add is None:
        raise UserError(
            f"{type(network).__name__} has no add_adapter (see diffusers' PeftAdapterMixin): use kind=full"
        )
    if name in getattr(network, "peft_config", {}):
        raise UserError(f"{type(network).__name__} already has an adapter {name!r}: build a fresh pipeline")
    wanted = resolve_targets(network, config.targets)
    alpha: Any = config.alpha  # declared an int by peft, which computes with it as a float
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        target_modules=_pattern(network, wanted),
        lora_dropout=0.0,
        bias="none",
        init_lora_weights="gaussian" if config.init == "gaussian" else True,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=EXPECTED)
        torch.default_generator.manual_seed(seed)
        add(lora, adapter_name=name)
    added = {layer_name for layer_name, layer in lora_layers(network) if name in layer.lora_A}
    if added != set(wanted):
        raise RuntimeError(f"peft adapted {len(added)} layers, {len(wanted)} were asked for")
    for module, attribute in lora_slots(network, name).values():
        weight: Tensor = getattr(module, attribute)
        weight.data = weight.data.float()


def _pattern(network: nn.Module, names: list[str]) -> list[str] | str:
    """What peft takes as targets: the names, or a pattern where one is also the ending of another module."""
    wanted = set(names)
    for other in {name for name, _ in network.named_modules()} - wanted:
        parts = other.split(".")
        if any(".".join(parts[n:]) in wanted for n in range(1, len(parts))):
            return "|".join(re.escape(name) for name in names)
    return names


def lora_layers(network: nn.Module) -> list[tuple[str, LoraLayer]]:
    """The layers that carry LoRAs, by name."""
    return [(name, layer) for name, layer in network.named_modules() if isinstance(layer, LoraLayer)]


def lora_slots(network: nn.Module, name: str) -> dict[str, Slot]:
    """Where the weights of an adapter live: ``<layer>.lora_A.weight`` -> (module, attribute)."""
    slots: dict[str, Slot] = {}
    for layer_name, layer in lora_layers(network):
        for part in ("lora_A", "lora_B"):
            matrices = getattr(layer, part)
            if name in matrices:
                slots[f"{layer_name}.{part}.weight"] = (matrices[name], "weight")
    return slots


def activate(layers: Sequence[LoraLayer], names: list[str]) -> None:
    """Makes exactly the named adapters act; layers without one of them ignore that name."""
    set_activity(layers, [(names, False)] * len(layers))
    if layers and (layers[0].active_adapters != names or layers[0].disable_adapters):
        raise RuntimeError("this version of peft keeps the active adapters elsewhere")


def activity(layers: Sequence[LoraLayer]) -> list[tuple[Any, bool]]:
    """Which adapters act, and whether all are off, for each layer."""
    return [(layer._active_adapter, layer._disable_adapters) for layer in layers]


def set_activity(layers: Sequence[LoraLayer], states: Sequence[tuple[Any, bool]]) -> None:
    """Puts back what `activity` gave."""
    for layer, (names, disabled) in zip(layers, states, strict=True):
        own = layer.__dict__  # a module's own attribute assignment costs milliseconds over all layers
        own["_active_adapter"], own["_disable_adapters"] = names, disabled


def check_frozen(network: nn.Module, names: Sequence[str]) -> None:
    """Refuses a start that "policy adapter off" would not bring back.

    Raises:
        UserError: for an adapter that is loaded but not named, or one that changes more than LoRA matrices.
    """
    present: Mapping[str, Any] = getattr(network, "peft_config", {})
    kind = type(network).__name__
    unknown = sorted(set(present) - set(names))
    if unknown:
        raise UserError(
            f"{kind} already carries the adapters {', '.join(unknown)}; name the LoRAs that belong to the "
            "start policy in model.base_adapters, or build a fresh pipeline"
        )
    for name, config in present.items():
        if getattr(config, "bias", "none") != "none" or getattr(config, "lora_bias", False):
            raise UserError(f"adapter {name!r} of {kind} trains biases, which an adapter cannot switch off")
        if getattr(config, "modules_to_save", None):
            raise UserError(f"adapter {name!r} of {kind} replaces whole modules (modules_to_save): merge it")
    if any(isinstance(module, ModulesToSaveWrapper) for module in network.modules()):
        raise UserError(f"{kind} has modules replaced by an adapter (modules_to_save): merge it first")
    if any(layer.merged for _, layer in lora_layers(network)):
        raise UserError(f"{kind} has adapters merged into its weights: unfuse them first")


def load_base_adapter(pipe: Any, networks: Mapping[str, nn.Module], folder: str | Path, name: str) -> None:
    """Loads a LoRA folder as a frozen part of the start policy.

    The libraries only warn when weights of the file find no place; here that is an error.

    Args:
        pipe: the pipeline, whose own loader reads the folder.
        networks: the networks that will be trained, by component name.
        folder: a folder (or file) that ``pipe.load_lora_weights`` takes, as a path or, on the hub, as a name;
            a subfolder named like a second network (``transformer_2``) holds that network's LoRA.
        name: the adapter's name.
    """
    if not hasattr(pipe, "load_lora_weights"):
        raise UserError(f"{type(pipe).__name__} cannot load LoRAs: model.base_adapters must be empty")
    if isinstance(folder, Path) and not folder.exists():
        raise UserError(f"model.base_adapters: no file or folder {folder}")
    second = (
        Path(folder) / "transformer_2"
    )  # as a path: the loader prefers the parent's file to a subfolder's
    with strict_loading(folder, {type(network).__name__ for network in networks.values()}):
        pipe.load_lora_weights(str(folder), adapter_name=name, use_safetensors=True)
        if second.is_dir():
            options = {"adapter_name": name, "use_safetensors": True, "load_into_transformer_2": True}
            pipe.load_lora_weights(str(second), **options)
    slots = [slot for network in networks.values() for slot in lora_slots(network, name).values()]
    if not slots:
        raise UserError(f"{folder} holds no LoRA weights for {', '.join(networks)}")
    for module, attribute in slots:
        getattr(module, attribute).requires_grad_(False)


@contextmanager
def strict_loading(folder: str | Path, kinds: set[str]) -> Iterator[None]:
    """Turns what diffusers only logs while it loads a LoRA into networks of these classes into an error."""
    handler, logger = BufferingHandler(capacity=1_000_000), logging.getLogger("diffusers")
    handler.setLevel(logging.WARNING)
    level = logger.level
    logger.setLevel(min(level, logging.WARNING))
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=EXPECTED)
            yield
    except (ValueError, TypeError, KeyError, RuntimeError, OSError) as error:
        raise UserError(f"{folder} cannot be loaded as a LoRA: {error}") from error
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    messages = [record.getMessage() for record in handler.buffer]
    if wrong := [m for m in messages if not (match := ABSENT.match(m)) or match.group(1) in kinds]:
        raise UserError(f"{folder} does not fit the network: {'; '.join(wrong)}")


def store(network: nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters, except those that the network's class keeps in float32."""
    keep = {*(getattr(network, "_keep_in_fp32_modules", None) or ())}
    for name, p in network.named_parameters():
        if p.is_floating_point():
            p.data = p.data.to(torch.float32 if keep & {*name.split(".")} else dtype)


def round_inputs(network: nn.Module, dtype: Callable[[], torch.dtype]) -> None:
    """Casts states and embeddings (three dimensions or more) that enter; the sampler keeps its float32."""
    names = list(inspect.signature(network.forward).parameters)

    def hook(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        to = dtype()
        cast = [_rounded(name, value, to) for name, value in zip(names, args, strict=False)]
        return (*cast, *args[len(cast) :]), {name: _rounded(name, v, to) for name, v in kwargs.items()}

    network.register_forward_pre_hook(hook, with_kwargs=True)


def _rounded(name: str, value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        fits = value.is_floating_point() and value.ndim >= 3 and not KEEP.search(name)
        return value.to(dtype) if fits else value
    if type(value) in (list, tuple):
        return type(value)(_rounded(name, item, dtype) for item in value)
    return value


def guard_backward(network: nn.Module, shown: Callable[[], str]) -> None:
    """Refuses a backward pass that starts while other weights are in place than in its forward pass."""

    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        before, mode = shown(), network.training

        def check(gradient: Tensor) -> None:
            if shown() != before:
                raise RuntimeError(
                    f"backward pass of the {before} inside a context that shows the {shown()}: close it first"
                )
            if network.training != mode:
                raise RuntimeError("train or eval mode changed between the forward and the backward pass")

        for leaf in tree_leaves(output):
            if getattr(leaf, "requires_grad", False):
                leaf.register_hook(check)

    network.register_forward_hook(hook)
