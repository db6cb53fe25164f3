"""The CLIP reward: a hand formula, open_clip's own transform, pairing, truncation, and what is refused.

Small models are made in open_clip's folder format, so that the public way of loading is the one tested.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import save_file

from flowrl import registry
from flowrl.errors import UserError
from flowrl.reward import Samples

ARCHITECTURE: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "layers": 1, "width": 32, "head_width": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
PROMPTS = ["a red circle", "a photo of a cat", "two dogs"]
SHAPES_CLIP = ROOT / "assets" / "shapes-clip"


def make_folder(folder: Path, model: dict[str, Any] | None = None, **preprocess: Any) -> Path:
    """An open_clip folder with random weights."""
    folder.mkdir(exist_ok=True)
    config = {"model_cfg": model or ARCHITECTURE, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    made = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
    save_file(made.state_dict(), folder / "open_clip_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("clip"))


def reward(model: Path | str, **options: Any) -> Any:
    spec = {"name": "clip_score", "model": str(model), "device": "cpu", **options}
    return registry.build("reward", spec, "rewards.0")


def pictures(count: int, height: int = 40, width: int = 40) -> torch.Tensor:
    """Smooth pictures, exact in 8 bits."""
    rough = torch.rand(count, 3, 6, 6)
    smooth = F.interpolate(rough, size=(height, width), mode="bicubic").clamp(0, 1)
    return (smooth * 255).round() / 255


def test_it_is_the_cosine_times_scale(folder: Path) -> None:
    images = pictures(3)
    judge = reward(folder, clamp=False, scale=100.0)
    model, transform = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    tokenize = open_clip.get_tokenizer(f"local-dir:{folder}")
    model.eval()
    expected = []
    for image, prompt in zip(images, PROMPTS, strict=True):
        bytes_ = np.uint8(np.rint(image.permute(1, 2, 0).numpy() * 255))
        seen = model.encode_image(transform(Image.fromarray(bytes_))[None])
        expected.append(100 * F.cosine_similarity(seen, model.encode_text(tokenize([prompt]))))
    found = judge(Samples(images), PROMPTS, [{}] * 3)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert torch.allclose(found, torch.cat(expected), atol=0.2)
    clamped = reward(folder, scale=100.0)(Samples(images), PROMPTS, [{}] * 3)
    assert torch.equal(clamped, found.clamp_min(0))


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((64, 64), {}),
        ((32, 32), {}),
        ((50, 80), {}),
        ((90, 48), {}),
        ((20, 28), {}),
        ((50, 80), {"resize_mode": "squash"}),
        ((80, 50), {"interpolation": "bilinear", "mean": [0.5] * 3, "std": [0.5] * 3}),
    ],
)
def test_preprocessing_is_that_of_open_clip(
    tmp_path: Path, size: tuple[int, int], options: dict[str, Any]
) -> None:
    judge = reward(make_folder(tmp_path / "clip", **options))
    images = pictures(2, *size)
    transform = image_transform_v2(PreprocessCfg(**judge.model.visual.preprocess_cfg), is_train=False)
    bytes_ = np.uint8(np.rint(images.permute(0, 2, 3, 1).numpy() * 255))
    theirs = torch.stack([transform(Image.fromarray(image)) for image in bytes_])
    ours = judge.preprocess(images)
    std = torch.tensor(judge.model.visual.preprocess_cfg["std"]).view(3, 1, 1)
    assert ours.shape == theirs.shape
    assert ((ours - theirs) * std).abs().max() < 1.01 / 255


def test_preprocessing_for_a_target_that_is_not_square(tmp_path: Path) -> None:
    model = {**ARCHITECTURE, "vision_cfg": {**ARCHITECTURE["vision_cfg"], "image_size": [32, 48]}}
    judge = reward(make_folder(tmp_path / "clip", model))
    assert judge.preprocess(pictures(2, 64, 64)).shape == (2, 3, 32, 48)


def test_images_and_prompts_are_paired(folder: Path) -> None:
    judge = reward(folder, clamp=False)
    images = pictures(3)
    table = judge.encode_images(images) @ judge.encode_text(PROMPTS).T
    assert torch.allclose(judge(Samples(images), PROMPTS, [{}] * 3), table.diagonal(), atol=1e-5)
    same = judge(Samples(images), [PROMPTS[1]] * 3, [{}] * 3)
    assert torch.allclose(same, table[:, 1], atol=1e-5)
    with pytest.raises(UserError, match="3 images but 1 prompts"):
        judge(Samples(images), PROMPTS[:1], [{}])


def test_the_batch_size_does_not_matter(folder: Path) -> None:
    samples = Samples(pictures(5))
    prompts = [f"a photo of {k} cats" for k in range(5)]
    whole, parts = (reward(folder, clamp=False, batch_size=b)(samples, prompts, [{}] * 5) for b in (5, 2))
    assert torch.allclose(whole, parts, atol=1e-5)


def test_bf16_is_near(folder: Path) -> None:
    samples = Samples(pictures(3))
    full, half = (
        reward(folder, clamp=False, precision=p)(samples, PROMPTS, [{}] * 3) for p in ("fp32", "bf16")
    )
    assert half.dtype == torch.float32 and torch.allclose(full, half, atol=0.02)


def test_a_long_prompt_is_cut_counted_and_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    judge = reward(folder)
    fits = " ".join(["cat"] * 75)
    long, longer = " ".join(["cat"] * 76), " ".join(["dog"] * 200)
    with caplog.at_level(logging.WARNING):
        scores = judge(Samples(pictures(4)), [fits, "a cat", "", fits], [{}] * 4)
        assert scores.isfinite().all() and judge.num_truncated == 0 and not caplog.records
        scores = judge(Samples(pictures(3)), [longer, "a cat", longer], [{}] * 3)
        assert scores.isfinite().all() and judge.num_truncated == 1
        judge(Samples(pictures(1)), [long], [{}])
        assert judge.num_truncated == 2
    assert len(caplog.records) == 1 and "77 tokens" in caplog.records[0].getMessage()


def test_gradients_and_modes_are_off(folder: Path) -> None:
    model = reward(folder).model
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "no/such/folder"}, "model = 'no/such/folder' is not a folder"),
        ({"model": "local-dir:nowhere"}, "model = 'local-dir:nowhere' is not a folder"),
        (
            {"model": "ViT-B-23"},
            r"model = 'ViT-B-23' is no folder and no open_clip .*did you mean 'ViT-B-32'",
        ),
        ({"model": "ViT-B-32"}, "weights = None is no file and no tag of ViT-B-32; its tags: openai"),
        ({"model": "ViT-B-32", "weights": "/no/such.pt"}, "weights = '/no/such.pt' is no file and no tag"),
        ({"model": "hf-hub:a/b", "weights": "openai"}, "brings its own weights"),
        ({"model": "ViT-B-32", "weights": "openai"}, r"quick_gelu=False, but weights = 'openai'.*=True"),
        (
            {"model": "ViT-B-32-quickgelu", "weights": "openai", "quick_gelu": False},
            "trained with quick_gelu=",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_download(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a download was tried")

    monkeypatch.setattr(open_clip.factory, "download_pretrained", refuse)
    monkeypatch.setattr(open_clip.factory, "download_pretrained_from_hf", refuse)
    with pytest.raises(UserError, match=message):
        reward(**options)


def test_a_folder_without_its_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no open_clip_config\.json"):
        reward(tmp_path)
    folder = make_folder(tmp_path / "clip")
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be loaded"):
        reward(folder)


def test_weights_of_another_form_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "clip")
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"]["embed_dim"] = 24
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"cannot be loaded: RuntimeError"):
        reward(folder)


def test_a_folder_may_not_bring_code(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "clip")
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["tokenizer_kwargs"] = {"trust_remote_code": True}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="code of its own"):
        reward(folder)


class TestFileOfWeights:
    """An architecture by name, its weights from a file."""

    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        for name, quick in (("tiny", False), ("tiny-quickgelu", True)):
            monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, name, {**ARCHITECTURE, "quick_gelu": quick})
        torch.manual_seed(1)
        save_file(open_clip.create_model("tiny").state_dict(), tmp_path / "weights.safetensors")
        return tmp_path / "weights.safetensors"

    def test_it_scores_like_the_folder(self, file: Path, folder: Path) -> None:
        samples = Samples(pictures(3))
        from_file = reward("tiny", weights=str(file), clamp=False)(samples, PROMPTS, [{}] * 3)
        assert torch.equal(from_file, reward(folder, clamp=False)(samples, PROMPTS, [{}] * 3))

    def test_the_activation_changes_scores_without_a_word_from_open_clip(self, file: Path) -> None:
        samples = Samples(pictures(3))
        gelu, quick = (
            reward(name, weights=str(file), clamp=False)(samples, PROMPTS, [{}] * 3)
            for name in ("tiny", "tiny-quickgelu")
        )
        assert not torch.allclose(gelu, quick, atol=1e-4)

    def test_an_unknown_activation_is_logged(self, file: Path, caplog: pytest.LogCaptureFixture) -> None:
        reward("tiny", weights=str(file))
        assert "nothing says whether" in caplog.text
        caplog.clear()
        reward("tiny", weights=str(file), quick_gelu=False)
        assert "nothing says whether" not in caplog.text

    def test_a_stated_activation_is_checked(self, file: Path) -> None:
        with pytest.raises(UserError, match="quick_gelu=False, but weights"):
            reward("tiny", weights=str(file), quick_gelu=True)

    def test_a_config_beside_the_file_is_checked(self, file: Path) -> None:
        config = {"model_cfg": {**ARCHITECTURE, "quick_gelu": True}}
        (file.parent / "open_clip_config.json").write_text(json.dumps(config))
        reward("tiny-quickgelu", weights=str(file))
        with pytest.raises(UserError, match="quick_gelu=False, but weights"):
            reward("tiny", weights=str(file))


def test_naming_the_rewards_does_not_import_open_clip() -> None:
    code = (
        "import sys; from flowrl import registry; registry.names('reward'); "
        "sys.exit('open_clip' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd="/", timeout=200).returncode == 0


def test_the_shapes_model_prefers_the_true_caption(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # the folder works from wherever one stands
    from flowrl.shapes.domain import SceneObject
    from flowrl.shapes.render import render

    judge = reward(SHAPES_CLIP, clamp=False)
    groups = [
        {
            "a photo of a red circle": [("circle", "red", 0.5, 0.5)],
            "a photo of a blue circle": [("circle", "blue", 0.5, 0.5)],
            "a photo of a blue square": [("square", "blue", 0.3, 0.6)],
            "a photo of three triangles": [("triangle", "green", x, 0.5) for x in (0.2, 0.5, 0.8)],
        },
        {
            "a photo of a circle left of a square": [
                ("circle", "black", 0.25, 0.5),
                ("square", "red", 0.75, 0.5),
            ],
            "a photo of a square left of a circle": [
                ("circle", "black", 0.75, 0.5),
                ("square", "red", 0.25, 0.5),
            ],
            "a photo of a square above a circle": [
                ("circle", "black", 0.5, 0.75),
                ("square", "red", 0.5, 0.25),
            ],
        },
        {
            "a photo of a red square and a green circle": [
                ("square", "red", 0.3, 0.3),
                ("circle", "green", 0.7, 0.7),
            ],
            "a photo of a green square and a red circle": [
                ("square", "green", 0.3, 0.3),
                ("circle", "red", 0.7, 0.7),
            ],
        },
    ]
    for scenes in groups:  # within a group, a caption is true of one picture only
        images = [render(tuple(SceneObject(*item, 0.15) for item in items)) for items in scenes.values()]
        pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
        cosines = judge.encode_images(pixels) @ judge.encode_text(list(scenes)).T
        assert torch.equal(cosines.argmax(1), torch.arange(len(scenes)))
        assert torch.equal(cosines.argmax(0), torch.arange(len(scenes)))
    assert judge.num_truncated == 0
