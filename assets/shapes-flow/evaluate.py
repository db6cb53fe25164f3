"""Scores a shapes model on the held-out prompts with the ``scene`` verifier, and draws a sample grid.

    python assets/shapes-flow/evaluate.py --steps 8 10 20 --guidance 1 2 --grid samples.png

Prints nothing: figures are logged, and written as JSON lines with ``--out``.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from autoencoder import draw_scenes, encode
from diffusers import SanaPipeline
from PIL import Image

from flowrl.rewards.scene import mean_by_tag, scene_scores
from flowrl.shapes.prompts import split_prompts

logger = logging.getLogger("evaluate")


@torch.no_grad()
def sample(
    pipe: SanaPipeline, prompts: list[str], num_steps: int, guidance: float, seed: int
) -> torch.Tensor:
    """Images in [0, 1] (B, 3, H, W), one per prompt, by the plain pipeline."""
    batches = []
    generator = torch.Generator().manual_seed(seed)
    for first in range(0, len(prompts), 96):
        images = pipe(
            prompts[first : first + 96],
            num_inference_steps=num_steps,
            guidance_scale=guidance,
            height=64,
            width=64,
            max_sequence_length=16,
            complex_human_instruction=None,
            use_resolution_binning=False,
            generator=generator,
            output_type="pt",
        ).images
        batches.append(images)
    return torch.cat(batches)


def report(images: torch.Tensor, records: list[dict[str, Any]]) -> dict[str, float]:
    """Exact score of each task and overall, and the overall soft score."""
    scores = scene_scores(images, records)
    exact = mean_by_tag(scores["exact"], records)
    means = {**exact, "soft": mean_by_tag(scores["soft"], records)["overall"]}
    return {name: round(mean, 4) for name, mean in means.items()}


def round_trip(pipe: SanaPipeline, records: list[dict[str, Any]], seed: int) -> dict[str, float]:
    """The scores of rendered scenes after encoding and decoding: the ceiling of any sampler."""
    pool, chosen = draw_scenes(records, 6 * 64, np.random.default_rng(seed))
    with torch.no_grad():
        decoded = torch.cat([pipe.vae.decode(part).sample for part in encode(pipe.vae, pool).split(64)])
    return report((decoded / 2 + 0.5).clamp(0, 1), [records[i] for i in chosen])


def draw_grid(images: torch.Tensor, columns: int, path: Path) -> None:
    """Writes images (B, 3, H, W) as one picture, row by row, each enlarged twice."""
    padded = torch.nn.functional.pad(images[: len(images) // columns * columns], (1, 1, 1, 1))
    rows = torch.cat([torch.cat(list(row), dim=2) for row in padded.split(columns)], dim=1)
    pixels = (rows.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
    Image.fromarray(pixels).resize((2 * rows.shape[2], 2 * rows.shape[1]), 0).save(path)


def main() -> None:
    """Samples every prompt ``--repeats`` times for each pair of step count and guidance scale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(__file__).parent)
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 10, 20])
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0])
    parser.add_argument("--per-tag", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--round-trip", action="store_true", help="score the autoencoder too")
    parser.add_argument("--grid", type=Path, help="picture of one sample per prompt")
    parser.add_argument("--out", type=Path, help="JSON lines of the figures")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    pipe = SanaPipeline.from_pretrained(args.model)
    pipe.set_progress_bar_config(disable=True)
    records = split_prompts(held_out=True, per_tag=args.per_tag)
    figures = []
    if args.round_trip:
        figures.append({"round_trip": True, **round_trip(pipe, records, args.seed)})
        logger.info(json.dumps(figures[-1]))
    repeated = records * args.repeats
    prompts = [record["prompt"] for record in repeated]
    for num_steps in args.steps:
        for guidance in args.guidance:
            images = sample(pipe, prompts, num_steps, guidance, args.seed)
            setting = {"steps": num_steps, "guidance": guidance}
            figures.append({**setting, **report(images, repeated)})
            logger.info(json.dumps(figures[-1]))
            if args.grid:
                draw_grid(images[: len(records)], args.per_tag, args.grid)
    if args.out:
        args.out.write_text("".join(json.dumps(f) + "\n" for f in figures), encoding="utf-8")


if __name__ == "__main__":
    main()
