"""Pretrains the shapes model from nothing: autoencoder, then text encoder and transformer jointly.

    python assets/shapes-flow/pretrain.py --out runs/shapes-flow

Writes a folder that ``diffusers.SanaPipeline.from_pretrained`` loads, metrics as JSON lines beside it,
and while it runs a training state; started again with the same ``--out`` it carries on from there.

Source: rectified flow, arXiv 2209.03003: x_sigma = (1 - sigma) x_0 + sigma e, and the transformer
predicts e - x_0. Architecture: SANA, arXiv 2410.10629.

Shapes: B scenes per step, C latent channels, h = w = 8 latent sides, L <= 16 tokens, D text width.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from autoencoder import (
    LATENT_CHANNELS,
    SIZE,
    draw_scenes,
    encode,
    minibatches,
    train_autoencoder,
)
from diffusers import (
    AutoencoderDC,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast

from flowrl.shapes.prompts import all_prompts, split_prompts

MAX_TOKENS = 16
TEXT_WIDTH = 96
SHIFT = 2.0  # of the sampling schedule: more steps where the scene is decided

logger = logging.getLogger("pretrain")
Log = Callable[[dict[str, Any]], None]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of the domain, in alphabetical order after the four special ones."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = sorted({word for record in all_prompts() for word in record["prompt"].split()})
    vocabulary = {token: index for index, token in enumerate(special + words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        special_tokens=[(token, vocabulary[token]) for token in ("<bos>", "<eos>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=MAX_TOKENS,
        padding_side="right",
    )


def build_text_encoder(tokenizer: PreTrainedTokenizerFast) -> Gemma2Model:
    """Two layers; attention is causal, so a noun knows the words before it and ``<eos>`` knows all."""
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        query_pre_attn_scalar=24,
        max_position_embeddings=64,
        sliding_window=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=False,
    )
    model = Gemma2Model(config)
    # The layers add vectors of unit size, in which words of the usual 0.02 would drown.
    torch.nn.init.normal_(model.embed_tokens.weight, std=0.15)
    return model


def build_transformer() -> SanaTransformer2DModel:
    """The velocity model; patches of one latent pixel."""
    return SanaTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=4,
        attention_head_dim=32,
        num_layers=4,
        num_cross_attention_heads=4,
        cross_attention_head_dim=32,
        cross_attention_dim=128,
        caption_channels=TEXT_WIDTH,
        mlp_ratio=2.0,
        sample_size=SIZE // 8,
        patch_size=1,
        interpolation_scale=1,  # None would drop the position embedding
    )


def build_pipeline(vae: AutoencoderDC) -> SanaPipeline:
    """The whole pipeline, untrained but for the autoencoder."""
    tokenizer = build_tokenizer()
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=build_text_encoder(tokenizer),
        vae=vae,
        transformer=build_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
    )


def tokenize(pipe: SanaPipeline, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask (N, L), as the pipeline makes them with ``max_sequence_length=16``.

    The columns that are padding in all prompts are cut off: masked everywhere, they change nothing.
    """
    tokens = pipe.tokenizer(
        prompts,
        padding="max_length",
        max_length=MAX_TOKENS,
        truncation=True,
        return_tensors="pt",
    )
    longest = int(tokens.attention_mask.sum(1).max())
    return tokens.input_ids[:, :longest], tokens.attention_mask[:, :longest]


def training_pool(
    vae: AutoencoderDC, records: list[dict[str, Any]], num_scenes: int, seed: int, cache: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of unit variance (N, C, h, w) and the prompt index of each (N,); kept in ``cache``."""
    if cache.exists():
        return tuple(torch.load(cache, weights_only=True))
    rng = np.random.default_rng(seed)
    latents, prompts = [], []
    for first in range(0, num_scenes, 5000):  # in parts, to keep the images out of memory
        images, chosen = draw_scenes(records, min(5000, num_scenes - first), rng)
        latents.append(encode(vae, images) * vae.config.scaling_factor)
        prompts.append(chosen)
    pool = torch.cat(latents), torch.cat(prompts)
    torch.save(pool, cache)
    return pool


class Ema:
    """An exponential moving average of the text encoder and the transformer."""

    def __init__(self, pipe: SanaPipeline, decay: float) -> None:
        """Starts from the present weights."""
        self.decay = decay
        self.modules = {
            name: copy.deepcopy(getattr(pipe, name)).eval().requires_grad_(False)
            for name in ("text_encoder", "transformer")
        }
        self.averages = [p for m in self.modules.values() for p in m.parameters()]
        self.sources = [p for name in self.modules for p in getattr(pipe, name).parameters()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the present weights; early steps are forgotten fast."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.averages, self.sources, 1 - decay)

    def save(self, pipe: SanaPipeline, folder: Path) -> None:
        """Saves the pipeline with the averaged weights in it."""
        parts = {"tokenizer": pipe.tokenizer, "vae": pipe.vae, "scheduler": pipe.scheduler}
        SanaPipeline(**parts, **self.modules).save_pretrained(folder)


def train_flow(
    pipe: SanaPipeline,
    latents: torch.Tensor,
    prompt_ids: torch.Tensor,
    prompts: list[str],
    args: argparse.Namespace,
    log: Log,
) -> Ema:
    """Trains the text encoder and the transformer on a pool of latents with their prompts."""
    transformer = pipe.transformer.to(memory_format=torch.channels_last).train()
    text_encoder = pipe.text_encoder.train()
    velocity = torch.compile(transformer) if args.compile else transformer
    # The prompt behind the last index is the empty one, for caption dropout.
    token_ids, masks = tokenize(pipe, [*prompts, ""])
    parameters = [*transformer.parameters(), *text_encoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_stable_decay(step, args.steps, args.warmup, args.lr_floor)
    )
    ema = Ema(pipe, args.ema)
    state_file = args.out / "state.pt"
    trained = {"transformer": transformer, "text_encoder": text_encoder, "optimizer": optimizer}
    trained |= {"schedule": schedule} | {f"ema_{k}": m for k, m in ema.modules.items()}
    first = load_state(state_file, trained)
    torch.manual_seed(args.seed + 1 + first)
    start, losses = time.monotonic(), []
    batches = minibatches(len(latents), args.batch_size, args.steps - first)
    for step, chosen in enumerate(batches, start=first):
        clean = latents[chosen]
        noise = args.caption_noise if step >= args.steps - args.noisy_steps else 0.0
        caption = spoil(prompt_ids[chosen], len(prompts), noise, args.caption_dropout)
        text = text_encoder(token_ids[caption], attention_mask=masks[caption])[0]
        sigma = sample_times(len(chosen))
        noise = torch.randn_like(clean)
        noisy = torch.lerp(clean, noise, sigma.view(-1, 1, 1, 1))
        output = velocity(
            noisy,
            encoder_hidden_states=text,
            encoder_attention_mask=masks[caption],
            timestep=1000 * sigma,
            return_dict=False,
        )[0]
        loss = F.mse_loss(output, noise - clean)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        ema.update(step)
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - start
            record = {"stage": "flow", "step": step + 1, "loss": float(np.mean(losses[-50:]))}
            log(record | {"grad_norm": norm.item(), "seconds": seconds})
        if (step + 1) % args.save_every == 0:
            torch.save({"step": step + 1, **{k: v.state_dict() for k, v in trained.items()}}, state_file)
            ema.save(pipe, args.out)
    return ema


def spoil(caption: torch.Tensor, num_prompts: int, noise: float, dropout: float) -> torch.Tensor:
    """Prompt indices (B,) of which a share ``noise`` is of any prompt, and then ``dropout`` of the empty one.

    Captions that are often wrong, as those of web pictures are, make a model that can do more than it shows:
    it follows a prompt only part of the time. That is what reinforcement is good at mending.
    """
    wrong = torch.rand(len(caption)) < noise
    caption = torch.where(wrong, torch.randint(num_prompts, caption.shape), caption)
    return caption.masked_fill(torch.rand(len(caption)) < dropout, num_prompts)


def sample_times(num: int) -> torch.Tensor:
    """Noise levels (num,): mostly those at which number, form, colour and place are decided.

    Above 0.97 nothing of the scene is visible, and below 0.6 the caption adds nothing to the latents.
    """
    decisive = torch.sigmoid(1.5 + 0.8 * torch.randn(num))
    return torch.where(torch.rand(num) < 0.25, torch.rand(num), decisive)


def warmup_stable_decay(step: int, num_steps: int, warmup: int, floor: float) -> float:
    """Learning rate factor: linear to 1, flat, and over the last third linear to ``floor``.

    Nothing before the last third depends on ``num_steps``, so that a run can be prolonged.
    """
    decay_start = num_steps * 2 // 3
    decayed = max(0.0, (step - decay_start) / max(1, num_steps - decay_start))
    return min((step + 1) / warmup, 1 - (1 - floor) * min(1.0, decayed))


def load_state(file: Path, trained: dict[str, Any]) -> int:
    """Restores an interrupted run and returns its step, or 0 if there is none."""
    if not file.exists():
        return 0
    state = torch.load(file, weights_only=True)
    for name, part in trained.items():
        part.load_state_dict(state[name])
    logger.info("carrying on from step %d", state["step"])
    return int(state["step"])


def parse_args() -> argparse.Namespace:
    """The command line; the defaults are those of the shipped model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ae-scenes", type=int, default=20_000)
    parser.add_argument("--ae-steps", type=int, default=1400)
    parser.add_argument("--ae-batch-size", type=int, default=16)
    parser.add_argument("--ae-lr", type=float, default=2e-3)
    parser.add_argument("--scenes", type=int, default=40_000, help="scenes the flow is trained on")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--lr-floor", type=float, default=0.05, help="last over peak learning rate")
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--ema", type=float, default=0.999)
    parser.add_argument("--caption-noise", type=float, default=0.25, help="share of wrong captions")
    parser.add_argument("--noisy-steps", type=int, default=600, help="the last steps, which have them")
    parser.add_argument("--caption-dropout", type=float, default=0.1)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--compile", action="store_true", help="a tenth faster, after a minute")
    return parser.parse_args()


def main() -> None:
    """Runs both stages; a stage whose result lies in the folder already is not run again."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    metrics = (args.out / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)

    def log(record: dict[str, Any]) -> None:
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in record.items()})
        metrics.write(line + "\n")
        logger.info(line)

    records = split_prompts(held_out=False)
    if not (args.out / "vae" / "config.json").exists():
        torch.manual_seed(args.seed)
        images, _ = draw_scenes(records, args.ae_scenes, np.random.default_rng(args.seed))
        vae = train_autoencoder(images, args.ae_steps, args.ae_batch_size, args.ae_lr, log)
        vae.save_pretrained(args.out / "vae")
    vae = AutoencoderDC.from_pretrained(args.out / "vae").to(memory_format=torch.channels_last)
    vae.register_to_config(_name_or_path="")  # else the saved config names a folder of this machine

    cache = args.out / "pool.pt"
    latents, prompt_ids = training_pool(vae, records, args.scenes, args.seed + 1, cache)
    logger.info("pool of %d latents, std %.3f", len(latents), latents.std())
    torch.manual_seed(args.seed)
    pipe = build_pipeline(vae)
    ema = train_flow(pipe, latents, prompt_ids, [r["prompt"] for r in records], args, log)
    ema.save(pipe, args.out)
    for leftover in ("state.pt", "pool.pt"):
        (args.out / leftover).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
