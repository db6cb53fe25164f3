"""Held-out evaluation: the deployed pipeline, with its own scheduler, on prompts never trained on.

What is measured is what is deployed: no kernel and no seam takes part. The same prompts and seeds are
used every time, so before and after differ by the weights alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.mdp.scheduler import placed
from flowrl.mdp.seeds import derive_seed
from flowrl.mdp.trajectory import Request
from flowrl.mdp.wrapper import SamplerWrapper
from flowrl.reward import RewardSet, Samples
from flowrl.training.data import Prompt
from flowrl.training.distributed import Engine
from flowrl.training.meters import image_meters, pairwise_diversity, text_diversity


@dataclass(frozen=True)
class Evaluation:
    """Scores of one evaluation.

    Attributes:
        metrics: ``eval/<judge>/mean``, ``eval/<judge>/tag/<tag>``, ``eval/<meter>``, ``eval/diversity``.
        scores: (N, R) raw scores of every sample.
        grid: images of the grid prompts, (M, 3, H, W) or (M, F, 3, H, W), float in [0, 1].
        captions: (M,) their prompts, and the answers to them where texts are sampled.
    """

    metrics: dict[str, float]
    scores: Tensor
    grid: Tensor
    captions: list[str]


class Evaluator:
    """Evaluates the current weights of a pipeline on held-out prompts."""

    def __init__(
        self,
        wrapper: SamplerWrapper,
        prompts: list[Prompt],
        judges: RewardSet,
        engine: Engine,
        *,
        num_steps: int,
        guidance: dict[str, Any],
        samples_per_prompt: int,
        batch_size: int,
        seed: int,
        grid_prompts: int,
        scheduler: Any | None = None,
    ) -> None:
        """Args are those of `flowrl.config.EvaluationConfig`, resolved; no scheduler means the pipeline's."""
        self.wrapper = wrapper
        self.prompts = prompts
        self.judges = judges
        self.engine = engine
        self.num_steps = num_steps
        self.guidance = guidance
        self.samples_per_prompt = samples_per_prompt
        self.batch_size = batch_size
        self.seed = seed
        self.grid_prompts = grid_prompts
        self.scheduler = wrapper.pipe.scheduler if scheduler is None else scheduler

    @property
    def settings(self) -> dict[str, Any]:
        """The generation settings that stand beside every score."""
        scheduler = self.scheduler
        return {
            "pipeline": type(self.wrapper.pipe).__name__,
            "scheduler": type(scheduler).__name__,
            "scheduler_shift": scheduler.config.get("shift", scheduler.config.get("flow_shift")),
            "num_inference_steps": self.num_steps,
            "guidance": self.guidance,
            "call": self.wrapper.call,
            "prompts": len(self.prompts),
            "samples_per_prompt": self.samples_per_prompt,
            "seed": self.seed,
        }

    def evaluate(self) -> Evaluation:
        """Samples every prompt and scores it; the same figures on every rank."""
        batches = self._batches()
        outputs, scores = [], []
        for batch in self._turns(batches):
            outputs.append(self._sample(batch))
            samples = self.wrapper.to_samples(outputs[-1], self._request(batch))
            scores.append(
                self.judges.score(samples, [p.text for p, _ in batch], [p.metadata for p, _ in batch])
            )
        all_scores = self._collect(scores, batches)
        rows = [row for batch in batches for row in batch]
        everything = self.wrapper.to_samples(self._collect(outputs, batches), self._request(rows))
        shown = self._grid_rows(rows)
        texts = [prompt.text for prompt, _ in rows]
        return Evaluation(
            metrics=self._metrics(all_scores, everything, rows),
            scores=all_scores,
            grid=everything.images[shown],
            captions=[captioned(texts, everything)[i] for i in shown],
        )

    def sample(self) -> tuple[Samples, list[tuple[Prompt, int]]]:
        """Samples every prompt without scoring: all rows, and which prompt and member each is."""
        batches = self._batches()
        mine = [self._sample(batch) for batch in self._turns(batches)]
        rows = [row for batch in batches for row in batch]
        return self.wrapper.to_samples(self._collect(mine, batches), self._request(rows)), rows

    def _batches(self) -> list[list[tuple[Prompt, int]]]:
        rows = [(prompt, member) for prompt in self.prompts for member in range(self.samples_per_prompt)]
        return [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]

    def _turns(self, batches: list[list[tuple[Prompt, int]]]) -> list[list[tuple[Prompt, int]]]:
        """This rank's batches; where they run out, the last one again, which is not counted.

        Every rank makes the same number of network calls: with sharded weights each is a communication.
        """
        surplus = -len(batches) % self.engine.world
        return self.engine.share(batches + batches[-1:] * surplus)

    def _request(self, batch: list[tuple[Prompt, int]]) -> Request:
        seeds = tuple(derive_seed(self.seed, "evaluation", p.text, member) for p, member in batch)
        return Request(tuple(p.text for p, _ in batch), tuple(p.metadata for p, _ in batch), (), seeds, seeds)

    @torch.no_grad()
    def _sample(self, batch: list[tuple[Prompt, int]]) -> Tensor:
        """What the pipeline returns for ``output_type`` "pt", on the CPU."""
        arguments = self.wrapper.arguments(self._request(batch), self.guidance, self.num_steps)
        with placed(self.wrapper.pipe, "scheduler", self.scheduler):
            output = self.wrapper.pipe(**arguments, output_type="pt", return_dict=False)[0]
        return (output if isinstance(output, Tensor) else torch.stack(list(output))).cpu()

    def _collect(self, mine: list[Tensor], batches: list[list[tuple[Prompt, int]]]) -> Tensor:
        """All ranks' rows in order; the last batch may be short, so rows are padded for the gathering."""
        if self.engine.world == 1:
            return torch.cat(mine)
        padded = []
        for rows in mine:
            block = rows.new_zeros(self.batch_size, *rows.shape[1:])
            block[: len(rows)] = rows
            padded.append(block)
        blocks = self.engine.gather_shares(padded).split(self.batch_size)
        return torch.cat([block[: len(batch)] for block, batch in zip(blocks, batches, strict=False)])

    def _metrics(self, scores: Tensor, samples: Samples, rows: list[tuple[Prompt, int]]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for column, judge in enumerate(self.judges.names):
            values = scores[:, column]
            metrics[f"eval/{judge}/mean"] = _finite_mean(values)
            by_tag: dict[str, list[int]] = defaultdict(list)
            for i, (prompt, _) in enumerate(rows):
                if "tag" in prompt.metadata:
                    by_tag[str(prompt.metadata["tag"])].append(i)
            for tag, members in sorted(by_tag.items()):
                metrics[f"eval/{judge}/tag/{tag}"] = _finite_mean(values[members])
        index = torch.arange(len(self.prompts)).repeat_interleave(self.samples_per_prompt)
        if samples.texts is not None:
            return metrics | {"eval/diversity": text_diversity(samples.texts, index)}
        images = samples.images
        frames = images if images.ndim == 4 else images.flatten(0, 1)
        metrics |= {f"eval/{name}": value for name, value in image_meters(frames).items()}
        still = images if images.ndim == 4 else images[:, images.shape[1] // 2]
        metrics["eval/diversity"] = pairwise_diversity(still, index if self.samples_per_prompt > 1 else None)
        return metrics

    def _grid_rows(self, rows: list[tuple[Prompt, int]]) -> list[int]:
        """The first sample of prompts spread evenly over the file, so that every tag is seen."""
        count = min(self.grid_prompts, len(self.prompts))
        picked = [i * len(self.prompts) // count for i in range(count)]
        return [i * self.samples_per_prompt for i in picked]


def captioned(prompts: Sequence[str], samples: Samples) -> list[str]:
    """What is written below pictures: the prompts, and the answers to them where texts were sampled."""
    if samples.texts is None:
        return list(prompts)
    return [f"{prompt}: {text or '-'}" for prompt, text in zip(prompts, samples.texts, strict=True)]


def _finite_mean(values: Tensor) -> float:
    finite = values[torch.isfinite(values)]
    return float(finite.double().mean()) if len(finite) else float("nan")
