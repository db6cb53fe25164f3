"""A run folder as training writes it, made up, and a reader of the page that is made of it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import torch
import yaml

from flowrl.training.grids import picture_grid

EVIL = "<script>alert(1)</script>"
JUDGES = {"shapes": (0.31, 0.55), "clip_score": (0.27, 0.03), "aesthetic": (5.1, -0.35)}  # base, gain
METERS = {"brightness": 0.6, "edge_density": 0.08, "color_entropy": 3.1, "contrast": 0.22, "saturation": 0.35}
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


def metrics_rows(iterations: int, every: int, seed: int, speed: float = 1.0) -> list[dict]:
    """What training writes: a rising reward that saturates, falling diversity, a dead first step."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(iterations + 1):
        row: dict = {"iteration": i}
        learned = 1 - np.exp(-3 * speed * i / iterations)
        if i:
            score = 0.31 + 0.6 * learned + rng.normal(0, 0.03)
            row |= {"reward/shapes/raw_mean": score, "reward/shapes/raw_std": 0.3 * (1.2 - learned)}
            row |= {"reward/clip_score/raw_mean": 0.27 + 0.04 * learned, "reward/clip_score/raw_std": 0.02}
            row |= {"reward/shapes/weighted_mean": score, "reward/clip_score/weighted_mean": 0.1}
            row |= {"reward/total_mean": score + 0.1, "advantage/frac_zero_std": 0.1 + 0.2 * learned}
            row |= {"advantage/reward_std_group": 0.25 * (1.1 - learned), "advantage/clip_frac": 0.01}
            row |= {"objective/kl": 0.02 * learned**2 + 1e-5, "objective/approx_kl": 1e-5 * rng.random()}
            row |= {"objective/ratio_mean": 1 + rng.normal(0, 2e-5), "objective/ratio_std": 8e-5}
            row |= {"objective/log_ratio_max": 3e-4 * rng.lognormal(0, 0.5), "objective/loss": 1e-4}
            row |= {"objective/clip_frac_low": 0.02 * rng.random(), "objective/clip_frac_high": 0.03}
            row |= {"objective/policy_loss": rng.normal(0, 1e-4), "objective/branch_margin": 0.4 * learned}
            row |= {"optimizer/grad_norm": rng.lognormal(-1, 0.6), "optimizer/lr": 3e-4 * min(1, i / 10)}
            row |= {"optimizer/updates": 2 * i, "optimizer/skipped": 0, "rows/invalid": 0}
            row |= {"count/nfe_rollout": 640, "count/nfe_train_forward": 512}
            for k in range(8):
                row[f"step/{k}/std"] = 0.7 * (1 - k / 9)
                row[f"step/{k}/log_ratio_max"] = 1e-4 * (1 + k) * rng.lognormal(0, 0.3)
                row[f"step/{k}/output_grad_norm"] = (1e-6 if k == 0 else 0.02 * k) * rng.lognormal(0, 0.4)
            row |= {f"samples/{m}": v * (1 + 0.1 * learned) for m, v in METERS.items()}
        if i % every == 0 or i == iterations:
            for name, (base, gain) in JUDGES.items():
                row[f"eval/{name}/mean"] = base + gain * learned + rng.normal(0, 0.01)
                row |= {
                    f"eval/{name}/tag/{t}": base * (0.7 + 0.1 * n) + gain * learned
                    for n, t in enumerate(TAGS)
                }
            row |= {f"eval/{m}": v * (1 + 0.5 * learned * (m == "saturation")) for m, v in METERS.items()}
            row["eval/diversity"] = 0.42 * (1 - 0.3 * learned)
        rows.append(row)
    return rows


def timing_rows(iterations: int, every: int) -> list[dict]:
    phases = {"encode": 0.1, "rollout": 3.2, "decode": 0.4, "reward": 0.9, "advantage": 0.01}
    phases |= {"replay": 5.5, "optimizer": 0.2}
    rows = []
    for i in range(iterations + 1):
        spent = dict(phases) if i else {}
        if i:
            spent["total"] = sum(spent.values()) * 1.03
        spent |= {"evaluate": 4.0} if i % every == 0 else {}
        spent |= {"checkpoint": 0.8} if i and i % 10 == 0 else {}
        rows.append({"iteration": i, **spent})
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def scene(seed: int, order: float, count: int = 12, size: int = 64) -> torch.Tensor:
    """(count, 3, size, size): noise that becomes a disc as `order` goes from 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    color = torch.rand(count, 3, 1, 1, generator=generator)
    disc = ((x**2 + y**2) < 0.35).float()
    clean = 0.92 * (1 - disc) + color * disc
    noise = torch.rand(count, 3, size // 8, size // 8, generator=generator).repeat_interleave(8, 2)
    return order * clean + (1 - order) * noise.repeat_interleave(8, 3)


def make_run(
    folder: Path,
    iterations: int = 40,
    every: int = 10,
    seed: int = 0,
    finished: bool = True,
    **settings: float,
) -> Path:
    folder.mkdir(parents=True)
    recipe = {"description": f"Quick start {EVIL}", "name": folder.name, "seed": seed}
    recipe |= {"training": {"iterations": iterations, "group_size": 8}, "optimizer": {"lr": 3e-4, **settings}}
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    rows = metrics_rows(iterations, every, seed, settings.get("speed", 1.0))
    write_jsonl(folder / "metrics.jsonl", rows)
    write_jsonl(folder / "timings.jsonl", timing_rows(iterations, every))
    (folder / "grids").mkdir()
    prompts = [f"a photo of {n + 2} red circles left of a blue square" for n in range(12)]
    for i in range(0, iterations + 1, every):
        grid = picture_grid(scene(seed, i / iterations), prompts, columns=4, scale=2)
        grid.save(folder / "grids" / f"eval_{i:06d}.png")
    if finished:
        before, after = rows[0], rows[-1]
        summary = {
            "reward_name": "shapes",
            "reward_before": before["eval/shapes/mean"],
            "reward_after": after["eval/shapes/mean"],
            "diversity_before": before["eval/diversity"],
            "diversity_after": after["eval/diversity"],
            "ratio_first_max": 0.0,
            "wall_s": 431.0,
            "iterations": iterations,
            "status": "finished",
            "generation": {"num_steps": 10, "guidance": {"guidance_scale": 1.0}},
            "versions": {"torch": "2.14.1", "diffusers": "0.42.1"},
            "judges": {
                n: {"before": before[f"eval/{n}/mean"], "after": after[f"eval/{n}/mean"]} for n in JUDGES
            },
        }
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def small_run(folder: Path, iterations: int = 4) -> Path:
    """A run with two curves only, for tests that are not about the drawings."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"iteration": i, "reward/shapes/raw_mean": 0.3 + 0.1 * i} for i in range(iterations + 1)]
    for row in rows[::2]:
        row["eval/shapes/mean"] = 0.3 + 0.1 * row["iteration"]
    write_jsonl(folder / "metrics.jsonl", rows)
    return folder


class Reader(HTMLParser):
    """Collects what a browser would build: tags with their attributes, and the text between them."""

    VOID = ("meta", "img", "input", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.text += data
