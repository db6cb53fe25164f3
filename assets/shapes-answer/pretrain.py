"""Pretrains a masked discrete flow that answers questions about shapes scenes, and writes the question files.

    python assets/shapes-answer/pretrain.py --out runs/shapes-answer

Writes a folder that ``flowrl.pipelines.discrete_text.DiscreteTextPipeline.from_pretrained`` loads, and
metrics as JSON lines beside it. With ``--questions FOLDER``, only writes the files of questions to train
and evaluate on, ``shapes_questions_train.jsonl`` and ``shapes_questions_heldout.jsonl``: other scenes than
those here; and ``shapes_choices_*.jsonl``, those of them that have options.

Loss: cross-entropy of the clean tokens at masked positions; times uniform. Over the last steps a share of the
answers is that of another question of the same kind: a model that can do more than it shows.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.mdp.token_losses import cross_entropy
from flowrl.pipelines.discrete_text import DiscreteTextPipeline
from flowrl.pipelines.token_scheduler import DiscreteFlowScheduler
from flowrl.pipelines.token_transformer import TextTransformer
from flowrl.shapes.prompts import write_jsonl
from flowrl.shapes.questions import WORDS, question_records

SPECIAL = ("[PAD]", "[UNK]", "[MASK]", "[EOS]")
PROMPT_LENGTH = 12
ANSWER_LENGTH = 3
QUESTIONS = {"train": (480, 101), "heldout": (150, 202)}  # how many, and the seed

logger = logging.getLogger("pretrain")


def build_pipeline(width: int, layers: int) -> DiscreteTextPipeline:
    """The untrained pipeline."""
    words = Tokenizer(
        models.WordLevel({word: k for k, word in enumerate((*SPECIAL, *WORDS))}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        eos_token="[EOS]",
        model_max_length=PROMPT_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
    )
    size = len(tokenizer)
    return DiscreteTextPipeline(
        tokenizer=tokenizer,
        transformer=TextTransformer(
            num_states=size,
            prompt_length=PROMPT_LENGTH,
            answer_length=ANSWER_LENGTH,
            width=width,
            num_layers=layers,
        ),
        scheduler=DiscreteFlowScheduler(num_tokens=size, mask_token_id=tokenizer.mask_token_id),
        image_size=64,
        patch_size=8,
        answer_length=ANSWER_LENGTH,
    )


def training_pool(pipe: DiscreteTextPipeline, count: int, seed: int) -> dict[str, torch.Tensor]:
    """Questions, masks, pictures (uint8) and answers of many scenes, and the kind of each question."""
    records = question_records(count, seed)
    ids, mask = pipe.encode_prompt([r["prompt"] for r in records], PROMPT_LENGTH)
    answers = pipe.tokenizer([r["answer"] for r in records]).input_ids
    end = pipe.tokenizer.eos_token_id
    tags = sorted({r["tag"] for r in records})
    parts = [
        pipe.encode_image([r["image"] for r in records[i : i + 500]], len(records[i : i + 500]))
        for i in range(0, count, 500)
    ]
    return {
        "ids": ids,
        "mask": mask,
        "patches": torch.cat([((p + 1) * 127.5).round().to(torch.uint8) for p in parts]),
        "answers": torch.tensor([(a + [end] * ANSWER_LENGTH)[:ANSWER_LENGTH] for a in answers]),
        "kind": torch.tensor([tags.index(r["tag"]) for r in records]),
    }


def train(pipe: DiscreteTextPipeline, pool: dict[str, torch.Tensor], args: argparse.Namespace) -> None:
    """Trains the transformer; the pipeline gets the averaged weights."""
    model = pipe.transformer.train()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    path = pipe.scheduler.path
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.01)
    by_kind = [torch.nonzero(pool["kind"] == k)[:, 0] for k in range(int(pool["kind"].max()) + 1)]
    started, losses = time.monotonic(), []
    with (args.out / "metrics.jsonl").open("w", encoding="utf-8", buffering=1) as metrics:
        for step in range(args.steps):
            factor = min((step + 1) / args.warmup, 1 - 0.95 * max(0.0, 3 * step / args.steps - 2))
            for group in optimizer.param_groups:
                group["lr"] = args.lr * factor
            rows = torch.randint(len(pool["ids"]), (args.batch_size,))
            x1 = pool["answers"][rows]
            if step >= args.steps - args.noisy_steps:
                others = torch.stack(
                    [by_kind[k][torch.randint(len(by_kind[k]), ())] for k in pool["kind"][rows]]
                )
                wrong = torch.rand(len(rows), 1) < args.noise
                x1 = torch.where(wrong, pool["answers"][others], x1)
            x = path.noised(x1, torch.rand(len(rows)))
            logits = model(
                hidden_states=x,
                prompt_ids=pool["ids"][rows],
                prompt_mask=pool["mask"][rows],
                image_features=pool["patches"][rows].float() / 127.5 - 1,
            )[0]
            loss = cross_entropy(path.log_posterior(logits, x), x1)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            decay = min(0.995, (1 + step) / (10 + step))
            torch._foreach_lerp_(
                list(average.parameters()), [p.detach() for p in model.parameters()], 1 - decay
            )
            losses.append(loss.item())
            if (step + 1) % 100 == 0:
                record = {"step": step + 1, "loss": round(float(np.mean(losses[-100:])), 4)}
                record["seconds"] = round(time.monotonic() - started)
                metrics.write(json.dumps(record) + "\n")
                logger.info(record)
    pipe.transformer.load_state_dict(average.state_dict())
    pipe.transformer.eval()


def parse_args() -> argparse.Namespace:
    """The command line; the defaults are those of the shipped model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/shapes-answer"), help="folder of the pipeline")
    parser.add_argument("--questions", type=Path, help="only write the files of questions there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--scenes", type=int, default=30_000)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--noise", type=float, default=0.4, help="share of wrong answers")
    parser.add_argument("--noisy-steps", type=int, default=450, help="the last steps, which have them")
    return parser.parse_args()


def main() -> None:
    """Writes the questions, or makes the pool, trains and saves."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if args.questions is not None:
        for part, (count, seed) in QUESTIONS.items():
            records = question_records(count, seed)
            write_jsonl(records, args.questions / f"shapes_questions_{part}.jsonl")
            choices = [record for record in records if "options" in record]
            write_jsonl(choices, args.questions / f"shapes_choices_{part}.jsonl")
        return
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    pipe = build_pipeline(args.width, args.layers)
    pool = training_pool(pipe, args.scenes, args.seed + 1)
    train(pipe, pool, args)
    pipe.save_pretrained(args.out)


if __name__ == "__main__":
    main()
