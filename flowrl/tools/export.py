"""Export: what training made, in a form that diffusers loads without flowrl.

* ``lora``: a folder that ``pipe.load_lora_weights(folder)`` takes, written by the pipeline class's own
  ``save_lora_weights`` with adapter metadata, without which a rank other than alpha loads with a wrong scale.
  Weights of a second denoiser (Wan 2.2) lie in the subfolder ``transformer_2``.
* ``pipeline``: a whole pipeline for ``DiffusionPipeline.from_pretrained(folder)``, LoRAs merged.

Loaders only warn about weights that find no place. `verify_export` therefore loads what was written into a
fresh pipeline and compares pictures.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.mdp.adapters import POLICY, load_base_adapter, lora_layers, lora_slots
from flowrl.mdp.policy import Policy

LORA_FILE = "pytorch_lora_weights.safetensors"
SECOND = "transformer_2"
TOLERANCE = 1e-5  # largest difference of a pixel in [0, 1]
TOLERANCE_16_BIT = 0.1  # loading and merging round the trained weights


def export(
    pipe: Any,
    policy: Policy,
    out: str | Path,
    form: Literal["lora", "pipeline"] = "lora",
    *,
    average: bool | None = None,
    make_pipe: Callable[[], Any] | None = None,
    call: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
) -> None:
    """Writes the policy and, if the caller can make a fresh pipeline, verifies what was written.

    Args:
        pipe: the pipeline that holds the policy's networks; it is not changed.
        policy: as it was trained, or as `Policy.load_tensors` restored it from a checkpoint.
        out: a folder that does not exist yet.
        form: a LoRA folder, or a whole pipeline.
        average: whether to write the average of the weights; None: if one was kept.
        make_pipe: makes the start pipeline, base adapters loaded, on the same device and in the same dtype.
        call: keyword arguments of the pipeline call that the verification compares, the prompt among them.
        tolerance: largest difference of a pixel in [0, 1]; None: 1e-5, or 0.1 for a policy in 16 bits.

    Raises:
        UserError: if the pipeline cannot load LoRAs, the folder exists, or the verification fails; then
            nothing is left under ``out``.
    """
    out = Path(out)
    if tolerance is None:
        tolerance = TOLERANCE if policy.dtype == torch.float32 else TOLERANCE_16_BIT
    if out.exists():
        raise UserError(f"{out} exists: an export does not overwrite")
    if average and policy.ema is None:
        raise UserError("no average of the weights was kept (ema.decay is 0): export the trained ones")
    use_average = policy.ema is not None if average is None else average
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with policy.ema_weights() if use_average else nullcontext():
            if form == "lora":
                export_lora(pipe, policy.networks, part)
            else:
                export_merged(pipe, part)
            if make_pipe is not None and call is not None:
                with policy.compute():
                    expected = render(pipe, call)
        if make_pipe is not None and call is not None:
            verify_export(make_pipe, part, call, expected, tolerance=tolerance)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def export_lora(pipe: Any, networks: Mapping[str, nn.Module], out: str | Path, name: str = POLICY) -> None:
    """Writes an adapter as diffusers' own LoRA folder; the weights are those that the networks hold now.

    Args:
        pipe: the pipeline, whose class does the writing.
        networks: the networks by component name; wrapped or compiled ones are unwrapped.
        out: the folder.
        name: the adapter; other adapters, such as the frozen base adapters, are not part of the file.

    Raises:
        UserError: if the class has no LoRA loader, or a network no such adapter.
    """
    saver = getattr(type(pipe), "save_lora_weights", None)
    parameters = inspect.signature(saver).parameters if saver is not None else {}
    for component, wrapped in networks.items():
        network = unwrap(wrapped)
        weights = {
            key: getattr(*slot).detach().cpu().clone().contiguous()
            for key, slot in lora_slots(network, name).items()
        }
        if not weights:
            raise UserError(
                f"{component} has no adapter {name!r}: full fine-tuning exports as form=pipeline "
                "(--form pipeline)"
            )
        second = component == SECOND and SECOND in getattr(pipe, "_lora_loadable_modules", ())
        key = "transformer" if second else component
        layers, metadata = f"{key}_lora_layers", f"{key}_lora_adapter_metadata"
        if saver is None or layers not in parameters or metadata not in parameters:
            raise UserError(
                f"{type(pipe).__name__} cannot save and load LoRAs of {component}: export form=pipeline, "
                "which merges them"
            )
        saver(
            Path(out) / SECOND if second else Path(out),
            weight_name=LORA_FILE,
            **{layers: weights, metadata: _metadata(network, name)},
        )


def _metadata(network: nn.Module, name: str) -> dict[str, Any]:
    """What a loader needs beside the matrices; no more, so that other versions of peft take it."""
    configs: Any = network.peft_config
    config = configs[name]
    targets = config.target_modules
    return {
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
    }


def export_merged(pipe: Any, out: str | Path) -> None:
    """Writes the whole pipeline with all acting adapters merged; the pipeline itself is not changed.

    Sums are taken in float32 and stored in the dtype of the network's own weights.
    """
    originals: dict[str, nn.Module] = {}
    try:
        for component, module in pipe.components.items():
            network = unwrap(module) if isinstance(module, nn.Module) else module
            if isinstance(network, nn.Module) and (lora_layers(network) or network is not module):
                originals[component] = module
                setattr(pipe, component, _merged(network))
        pipe.save_pretrained(str(out), safe_serialization=True)
        _forget_places(Path(out))
    finally:
        for component, module in originals.items():
            setattr(pipe, component, module)


def _forget_places(folder: Path) -> None:
    """Takes the folders that the weights were once loaded from out of the saved configs."""
    for file in (folder / "model_index.json", *folder.glob("*/config.json")):
        config = json.loads(file.read_text(encoding="utf-8"))
        if config.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def _merged(network: nn.Module) -> nn.Module:
    """A network of the same class without adapters, on the CPU, fit for saving only."""
    layers = dict(lora_layers(network))
    tensors: dict[str, Tensor] = {}
    for key, tensor in network.state_dict().items():
        owner, _, rest = key.rpartition(".base_layer.")
        if owner not in layers:
            if not any(key.startswith(f"{layer}.lora_") for layer in layers):
                tensors[key] = tensor.cpu()
            continue
        if rest == "weight":
            layer = layers[owner]
            acting = [name for name in layer.active_adapters if name in layer.lora_A]
            total = tensor.float()
            for name in [] if layer.disable_adapters else acting:
                total = total + layer.get_delta_weight(name).float()
            tensor = total.to(tensor.dtype)
        tensors[f"{owner}.{rest}"] = tensor.cpu()
    kind: Any = type(network)
    with torch.device("meta"):
        fresh: nn.Module = kind.from_config(network.config)
    fresh.load_state_dict(tensors, strict=True, assign=True)
    return fresh.eval()


def unwrap(network: nn.Module) -> nn.Module:
    """The network inside wrappers of data parallelism and compilation."""
    while True:
        inner = getattr(network, "_orig_mod", None)
        if inner is None and isinstance(network, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = network.module
        if inner is None:
            return network
        network = inner


@torch.no_grad()
def render(pipe: Any, call: Mapping[str, Any], seed: int = 0) -> Tensor:
    """Runs the pipeline with its own scheduler; the same noise for the same seed."""
    options: dict[str, Any] = {"output_type": "pt", **call, "return_dict": False}
    images = pipe(generator=torch.Generator("cpu").manual_seed(seed), **options)[0]
    return torch.as_tensor(images).detach().float().cpu()


def verify_export(
    make_pipe: Callable[[], Any],
    out: str | Path,
    call: Mapping[str, Any],
    expected: Tensor,
    *,
    tolerance: float = TOLERANCE,
) -> float:
    """Loads an export into a fresh pipeline and compares its pictures with those of the trained one.

    Args:
        make_pipe: makes the start pipeline, base adapters loaded.
        out: the folder that was written.
        call: keyword arguments of the pipeline call.
        expected: what `render` gave for the trained pipeline and this call.
        tolerance: largest difference of a pixel.

    Returns:
        The largest difference of a pixel.

    Raises:
        UserError: if the pictures differ from the trained ones, or do not differ from the start pipeline's.
    """
    pipe = make_pipe()
    pipe.set_progress_bar_config(disable=True)
    start = render(pipe, call)
    if (Path(out) / "model_index.json").is_file():
        dtype = next(m.dtype for m in pipe.components.values() if isinstance(m, nn.Module))
        device = pipe.device
        pipe = type(pipe).from_pretrained(str(out), dtype=dtype, use_safetensors=True).to(device)
        pipe.set_progress_bar_config(disable=True)
    else:
        load_lora(pipe, out)
    images = render(pipe, call)
    difference = float((images - expected).abs().max())
    if not difference <= tolerance:
        raise UserError(f"export {out}: a pixel differs by {difference:.2e} from the trained pipeline's")
    change = float((images - start).abs().max())
    if not change > max(difference, TOLERANCE):
        raise UserError(f"export {out} has no effect: its pictures equal the start pipeline's ({change:.2e})")
    return difference


def load_lora(pipe: Any, folder: str | Path, name: str = POLICY) -> None:
    """Loads an exported LoRA folder beside the adapters that are there; all of them act."""
    components = [part for part in getattr(pipe, "_lora_loadable_modules", ()) if "encoder" not in part]
    networks = {part: getattr(pipe, part) for part in components if getattr(pipe, part, None) is not None}
    before = {part: [*getattr(network, "peft_config", {})] for part, network in networks.items()}
    load_base_adapter(pipe, networks, folder, name)
    for part, network in networks.items():
        present = [adapter for adapter in network.peft_config if adapter in (*before[part], name)]
        network.set_adapters(present)
