"""Writes the prompt files beside this script: ``python assets/prompts/make.py``."""

from pathlib import Path

from flowrl.shapes.prompts import split_prompts, write_jsonl

FOLDER = Path(__file__).parent

write_jsonl(split_prompts(held_out=False, per_tag=64), FOLDER / "shapes_train.jsonl")
write_jsonl(split_prompts(held_out=True, per_tag=16), FOLDER / "shapes_heldout.jsonl")
