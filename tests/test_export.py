"""Exports are loaded by diffusers alone and give the trained pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import TINY
from torch import Tensor, nn

from flowrl.config import AdapterConfig, EmaConfig
from flowrl.errors import UserError
from flowrl.mdp.adapters import POLICY
from flowrl.mdp.policy import Policy
from flowrl.tools.export import (
    LORA_FILE,
    TOLERANCE,
    export,
    export_lora,
    export_merged,
    load_lora,
    render,
    unwrap,
    verify_export,
)

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # a scheduler of diffusers
LORA = AdapterConfig(rank=4, alpha=12)  # rank != alpha: without metadata it would load with a wrong scale


def call(name: str) -> dict[str, Any]:
    entry = TINY[name]
    return {"prompt": ["a cat", "a red circle"], "num_inference_steps": 2, **entry.kwargs()}


def trained(name: str, adapter: AdapterConfig = LORA, **options: Any) -> tuple[Any, Policy]:
    entry = TINY[name]
    pipe = entry.build()
    networks = {part: getattr(pipe, part) for part in entry.networks}
    subject = Policy(networks, adapter, **options)
    for _ in range(2):
        for p in subject.parameters().values():
            p.data.add_(0.05 * torch.randn(p.shape))
        subject.update_ema()
    return pipe, subject


def same(first: Path, second: Path) -> bool:
    one, two = load_file(first), load_file(second)
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("name", ["sd3", "wan22", "flux", "sana", "qwen_image"])
def test_g26_lora_export_gives_the_trained_pictures(name: str, tmp_path: Path) -> None:
    pipe, subject = trained(name)
    before = render(pipe, call(name))
    export(pipe, subject, tmp_path / "lora", make_pipe=TINY[name].build, call=call(name))
    assert torch.equal(render(pipe, call(name)), before)
    files = [tmp_path / "lora" / LORA_FILE]
    if len(TINY[name].networks) == 2:
        files.append(tmp_path / "lora" / "transformer_2" / LORA_FILE)
    assert sorted(p for p in (tmp_path / "lora").rglob("*") if p.is_file()) == sorted(files)
    weights = load_file(files[0])
    assert all(key.startswith("transformer.") for key in weights)
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    with safe_open(files[0], "pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
    assert (metadata["transformer.r"], metadata["transformer.lora_alpha"]) == (4, 12)


FRESH = """
import sys
import torch
from tiny import TINY
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    pipe = TINY["sd3"].build()
    pipe.load_lora_weights(folder)
    images = pipe(
        prompt=["a cat", "a red circle"], num_inference_steps=2, **TINY["sd3"].kwargs(),
        generator=torch.Generator("cpu").manual_seed(0), output_type="pt", return_dict=False,
    )[0]
    torch.save(images, folder + ".pt")
assert not any(name.split(".")[0] == "flowrl" for name in sys.modules)
"""


def test_g26_a_fresh_process_without_flowrl_loads_raw_and_average(tmp_path: Path) -> None:
    pipe, subject = trained("sd3", ema=EmaConfig(decay=0.5, warmup=False))
    start = render(TINY["sd3"].build(), call("sd3"))
    expected: dict[bool, Tensor] = {False: render(pipe, call("sd3"))}
    with subject.ema_weights():
        expected[True] = render(pipe, call("sd3"))
    assert (expected[True] - expected[False]).abs().max() > 1e-3
    for average in (False, True):
        export(pipe, subject, tmp_path / str(average), average=average)
    export(pipe, subject, tmp_path / "default")
    files = [tmp_path / part / LORA_FILE for part in ("default", "True", "False")]
    assert same(files[0], files[1]) and not same(files[1], files[2])
    command = [sys.executable, "-c", FRESH, str(tmp_path / "True"), str(tmp_path / "False")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr[-2000:]
    for average in (True, False):
        images = torch.load(tmp_path / f"{average}.pt", weights_only=True)
        assert (images - expected[average]).abs().max() <= TOLERANCE
        assert (images - start).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["sd3", "wan22"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_merged_pipeline_loads_without_peft(kind: str, name: str, tmp_path: Path) -> None:
    adapter = LORA if kind == "lora" else AdapterConfig(kind="full")
    pipe, subject = trained(name, adapter, needs_old=True)
    before = {part: id(getattr(pipe, part)) for part in pipe.components}
    expected = render(pipe, call(name))
    export(pipe, subject, tmp_path / "whole", "pipeline", make_pipe=TINY[name].build, call=call(name))
    assert {part: id(getattr(pipe, part)) for part in pipe.components} == before
    assert torch.equal(render(pipe, call(name)), expected)
    loaded = DiffusionPipeline.from_pretrained(tmp_path / "whole")
    assert type(loaded) is type(pipe)
    assert not hasattr(loaded.transformer, "peft_config")
    assert not any("lora" in key for key in loaded.transformer.state_dict())


def test_base_adapters_are_merged_but_not_part_of_the_lora(tmp_path: Path) -> None:
    pipe, subject = trained("sd3")
    export_lora(pipe, subject.networks, tmp_path / "base")

    def start() -> Any:
        fresh = TINY["sd3"].build()
        load_lora(fresh, tmp_path / "base", "base_0")
        return fresh

    pipe = start()
    subject = Policy({"transformer": pipe.transformer}, LORA, base_adapters=["base_0"])
    for p in subject.parameters().values():
        p.data.add_(0.05 * torch.randn(p.shape))
    for form in ("lora", "pipeline"):
        export(pipe, subject, tmp_path / form, form, make_pipe=start, call=call("sd3"))


def test_an_export_does_not_say_where_its_weights_came_from(tmp_path: Path) -> None:
    pipe, subject = trained("sd3")
    pipe.register_to_config(_name_or_path="/home/somebody/models/secret")
    pipe.transformer.register_to_config(_name_or_path="/home/somebody/models/secret/transformer")
    export(pipe, subject, tmp_path / "out", "pipeline")
    assert (tmp_path / "out" / "model_index.json").exists()
    assert not [f for f in (tmp_path / "out").rglob("*.json") if "somebody" in f.read_text()]


def test_16_bit_storage_exports_within_its_precision(tmp_path: Path) -> None:
    def start() -> Any:
        return TINY["sd3"].build(torch.bfloat16)

    pipe = start()
    subject = Policy({"transformer": pipe.transformer}, LORA, dtype="bf16")
    for p in subject.parameters().values():
        p.data.add_(0.05 * torch.randn(p.shape))
    for form in ("lora", "pipeline"):
        export(pipe, subject, tmp_path / form, form, make_pipe=start, call=call("sd3"))


def test_g26_an_export_without_effect_or_with_a_wrong_scale_is_refused(tmp_path: Path) -> None:
    pipe, subject = trained("sd3")
    expected = render(pipe, call("sd3"))
    start = TINY["sd3"].build
    raw = {
        f"base_model.model.{k}": v
        for k, v in get_peft_model_state_dict(pipe.transformer, adapter_name=POLICY).items()
    }
    (tmp_path / "raw").mkdir()
    save_file(raw, tmp_path / "raw" / LORA_FILE)
    with pytest.raises(UserError):
        verify_export(start, tmp_path / "raw", call("sd3"), expected)

    export_lora(pipe, subject.networks, tmp_path / "good")
    assert verify_export(start, tmp_path / "good", call("sd3"), expected) <= TOLERANCE
    weights = load_file(tmp_path / "good" / LORA_FILE)
    (tmp_path / "scale").mkdir()
    save_file(weights, tmp_path / "scale" / LORA_FILE)  # no metadata: alpha is taken to be the rank
    with pytest.raises(UserError, match="differs"):
        verify_export(start, tmp_path / "scale", call("sd3"), expected)

    zero = {key: torch.zeros_like(value) for key, value in weights.items()}
    (tmp_path / "zero").mkdir()
    save_file(zero, tmp_path / "zero" / LORA_FILE)
    with pytest.raises(UserError, match="no effect"):
        verify_export(start, tmp_path / "zero", call("sd3"), render(start(), call("sd3")))


def test_a_failed_verification_leaves_nothing_behind(tmp_path: Path) -> None:
    pipe, subject = trained("sd3")
    with pytest.raises(UserError):
        export(
            pipe,
            subject,
            tmp_path / "lora",
            make_pipe=lambda: TINY["sd3"].build(torch.bfloat16),
            call=call("sd3"),
        )
    assert not list(tmp_path.iterdir())
    (tmp_path / "lora").mkdir()
    with pytest.raises(UserError, match="does not overwrite"):
        export(pipe, subject, tmp_path / "lora")


def test_exports_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    pipe, subject = trained("sd3", AdapterConfig(kind="full"))
    with pytest.raises(UserError, match="form=pipeline"):
        export(pipe, subject, tmp_path / "lora")
    with pytest.raises(UserError, match=r"ema\.decay"):
        export(pipe, subject, tmp_path / "lora", "pipeline", average=True)
    pipe, subject = trained("sd3")

    class Plain:
        """A pipeline class without a LoRA loader."""

    with pytest.raises(UserError, match="form=pipeline"):
        export_lora(Plain(), subject.networks, tmp_path / "lora")
    assert not list(tmp_path.iterdir())


class Compiled(nn.Module):
    """What torch.compile puts around a network, as far as names go."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._orig_mod = network


def test_g26_wrapped_networks_export_alike(tmp_path: Path) -> None:
    pipe, subject = trained("sd3")
    wrapped = Compiled(nn.DataParallel(pipe.transformer))
    assert unwrap(wrapped) is pipe.transformer
    export_lora(pipe, {"transformer": wrapped}, tmp_path / "wrapped")
    export_lora(pipe, subject.networks, tmp_path / "plain")
    files = [tmp_path / part / LORA_FILE for part in ("wrapped", "plain")]
    assert same(*files)


def test_export_from_restored_tensors(tmp_path: Path) -> None:
    pipe, subject = trained("sd3")
    saved = {group: {n: t.clone() for n, t in ts.items()} for group, ts in subject.tensors().items()}
    other = TINY["sd3"].build()
    restored = Policy({"transformer": other.transformer}, LORA)
    restored.load_tensors(saved)
    export_merged(other, tmp_path / "merged")
    verify_export(TINY["sd3"].build, tmp_path / "merged", call("sd3"), render(pipe, call("sd3")))
