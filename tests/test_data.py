"""Prompt files, and which prompts and seeds an iteration consists of."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from flowrl.errors import UserError
from flowrl.mdp.trajectory import Request
from flowrl.training.data import MAX_PROMPT_CHARACTERS, Prompt, PromptSampler, read_prompts

ROOT = Path(__file__).parent.parent


def sampler(
    prompts: int = 7, per_iteration: int = 3, group: int = 4, micro: int = 2, **more
) -> PromptSampler:
    return PromptSampler(
        [Prompt(f"prompt {k}", {"prompt": f"prompt {k}", "number": k}) for k in range(prompts)],
        prompts_per_iteration=per_iteration,
        group_size=group,
        micro_batch_size=micro,
        seed=more.get("seed", 5),
        shared_initial_noise=more.get("shared", False),
    )


def rows(requests: list[Request]) -> list[tuple]:
    """Every sample of an iteration: text, record's number, group, seeds."""
    return [
        row
        for r in requests
        for row in zip(
            r.prompts,
            [m["number"] for m in r.metadata],
            r.groups,
            r.initial_seeds,
            r.step_seeds,
            strict=True,
        )
    ]


# ----------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("prompts", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("per_iteration", [1, 3, 4, 8])
def test_r10_every_prompt_once_an_epoch(prompts: int, per_iteration: int) -> None:
    """The epochs laid end to end are permutations, also where an iteration spans several of them."""
    source = sampler(prompts, per_iteration)
    epochs = 4
    iterations = -(-prompts * epochs // per_iteration)
    seen = [p.metadata["number"] for i in range(iterations) for p in source.chosen(i)]
    for first in range(0, prompts * epochs, prompts):
        assert sorted(seen[first : first + prompts]) == list(range(prompts))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[str]:
        return [p.text for p in sampler(20, 20, seed=seed).chosen(epoch)]

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(found) for found in orders}) == 4 and order(0, 1) == orders[1]


def test_an_iteration_is_a_function_of_its_number() -> None:
    """No state: asked in any order, by any instance, under any global random state, it is the same."""
    forwards, backwards = sampler(), sampler()
    found = {i: forwards.requests(i) for i in range(6)}
    torch.manual_seed(99)
    assert {i: backwards.requests(i) for i in reversed(range(6))} == found
    assert len({tuple(rows(requests)) for requests in found.values()}) == 6


@pytest.mark.parametrize("micro", [1, 2, 4, 6, 12])
def test_g29_the_micro_batch_size_changes_only_the_cut(micro: int) -> None:
    requests = sampler(micro=micro).requests(2)
    assert [len(r) for r in requests] == [micro] * (12 // micro)
    assert rows(requests) == rows(sampler(micro=3).requests(2))


def test_groups_are_the_members_of_a_prompt() -> None:
    source = sampler()
    found = rows(source.requests(1))
    assert source.groups().tolist() == [group for _, _, group, _, _ in found] == [0] * 4 + [1] * 4 + [2] * 4
    assert [text for text, *_ in found[::4]] == [p.text for p in source.chosen(1)]
    assert all(text == f"prompt {number}" for text, number, *_ in found)
    assert set(Counter(text for text, *_ in found).values()) == {4}


def test_a_prompt_drawn_twice_in_an_iteration_is_two_groups() -> None:
    source = sampler(prompts=1, per_iteration=3)
    found = rows(source.requests(0))
    assert {text for text, *_ in found} == {"prompt 0"} and source.groups().unique().tolist() == [0, 1, 2]
    assert len({initial for *_, initial, _ in found}) == len(found)


@pytest.mark.parametrize("shared", [False, True])
def test_g28_seeds_are_distinct_but_for_shared_initial_noise(shared: bool) -> None:
    found = [row for i in range(20) for row in rows(sampler(shared=shared).requests(i))]
    steps = [row[4] for row in found]
    initial = [row[3] for row in found]
    assert len(set(steps)) == len(found) == 240
    assert len(set(initial)) == (60 if shared else 240)
    assert not set(steps) & set(initial)
    if shared:
        assert all(initial[k] == initial[k - k % 4] for k in range(240))
    other = [row for i in range(20) for row in rows(sampler(shared=shared, seed=6).requests(i))]
    assert not {row[4] for row in other} & set(steps)


# ------------------------------------------------------------------------------------------------ reading


def test_records_and_plain_lines(tmp_path: Path) -> None:
    record = {"prompt": "a cat", "tag": "single_object", "include": [{"class": "cat", "count": 1}]}
    (tmp_path / "p.jsonl").write_text(f"{json.dumps(record)}\n\n  \n" + '{"prompt": "ein \\u00dcbermut"}')
    assert read_prompts(tmp_path / "p.jsonl", "data.train") == [
        Prompt("a cat", record),
        Prompt("ein Übermut", {"prompt": "ein Übermut"}),
    ]
    (tmp_path / "p.txt").write_bytes(b'\xef\xbb\xbfa cat \r\n\r\n{"prompt": 1}\r\n')  # as Windows writes it
    assert [p.text for p in read_prompts(tmp_path / "p.txt", "data.train")] == ["a cat", '{"prompt": 1}']
    assert read_prompts(tmp_path / "p.txt", "data.train")[0].metadata == {"prompt": "a cat"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "x"', "not JSON"),
        ("a cat", "not JSON"),
        ('["a cat"]', "a record needs a 'prompt' text"),
        ('"a cat"', "a record needs a 'prompt' text"),
        ('{"text": "a cat"}', "a record needs a 'prompt' text"),
        ('{"prompt": 3}', "a record needs a 'prompt' text"),
        ('{"prompt": null}', "a record needs a 'prompt' text"),
        (json.dumps({"prompt": "x" * (MAX_PROMPT_CHARACTERS + 1)}), f"longer than {MAX_PROMPT_CHARACTERS}"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a cat"}\n\n' + line + '\n{"prompt": "a dog"}\n')
    with pytest.raises(UserError) as caught:
        read_prompts(path, "data.train")
    message = str(caught.value)
    assert message.startswith(f"data.train: {path} line 3: ") and said in message and "\n" not in message


def test_files_without_prompts(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes("a caf\xe9".encode("latin-1"))
    for name, said in (
        ("empty.jsonl", "holds no prompt"),
        ("nowhere.txt", "no such file"),
        (".", "no such file"),
        ("latin.txt", "not UTF-8"),
    ):
        with pytest.raises(UserError, match=f"data.held_out.*{said}"):
            read_prompts(tmp_path / name, "data.held_out")


def test_line_separators_inside_a_record_do_not_split_it(tmp_path: Path) -> None:
    """JSON allows U+2028 and U+0085 unescaped in a string; only a line feed ends a record."""
    text = "a\u2028cat\u0085here"
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False), encoding="utf-8")
    assert [p.text for p in read_prompts(tmp_path / "p.jsonl", "data.train")] == [text]


@pytest.mark.parametrize("kind", ["shapes", "objects"])
def test_shipped_prompts_are_disjoint(kind: str) -> None:
    train, held_out = (
        {p.text for p in read_prompts(ROOT / f"assets/prompts/{kind}_{part}.jsonl", "data")}
        for part in ("train", "heldout")
    )
    assert len(held_out) >= 64 and not train & held_out
