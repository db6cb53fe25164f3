"""Reading run folders, and the verdicts on them; nothing is drawn here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_run import make_run, metrics_rows, write_jsonl

from flowrl.tools.report import verdicts
from flowrl.tools.report_charts import is_noisy, running_mean
from flowrl.tools.report_run import Run, flat, load_run, number, short


def test_a_later_line_of_an_iteration_wins(tmp_path: Path) -> None:
    rows = [{"iteration": i, "reward/r/raw_mean": float(i), "a": 1} for i in (0, 1, 2, 3)]
    write_jsonl(tmp_path / "metrics.jsonl", [*rows, {"iteration": 2.0, "reward/r/raw_mean": 9.0}])
    run = load_run(tmp_path)
    assert run.series("reward/r/raw_mean")[1].tolist() == [0, 1, 9, 3] and run.metrics[2]["a"] == 1


def judged(**changes: object) -> dict[str, str]:
    """Verdicts on a small made-up log: sentence to level."""
    rows = {i: {"eval/r/mean": v} for i, v in ((0, 0.2), (10, 0.6), (20, 0.9), (30, 0.8))}
    summary: dict = {"status": "finished"}
    for key, value in changes.items():
        if isinstance(value, list):
            for row, item in zip(rows.values(), value, strict=True):
                row[key] = item
        else:
            summary[key] = value
    run = Run("x", Path("x"), "", {}, summary, rows, {}, 0)
    return {text: level for level, text in verdicts(run)}


def test_verdicts_say_what_the_numbers_say() -> None:
    assert judged() == {
        "r rose from 0.2 to 0.8 on held-out prompts.": "good",
        "Best at iteration 20 (0.9); final is 0.89 of best.": "warn",
    }
    fell = judged(**{"eval/r/mean": [-0.2, -0.3, -0.4, -0.5]})
    assert fell["r fell from −0.2 to −0.5 on held-out prompts."] == "bad"
    assert fell["Best at iteration 0 (−0.2); final is 0.3 below it."] == "warn"
    assert (
        judged(**{"eval/r/mean": [0.5] * 4})["r did not move: from 0.5 to 0.5 on held-out prompts."] == "warn"
    )


@pytest.mark.parametrize(
    ("key", "value", "text", "level"),
    [
        ("status", "interrupted", "The run ended with status “interrupted”.", "warn"),
        ("eval/diversity", [1.0, 0.9, 0.8, 0.71], "Diversity fell to 0.71 of its base.", "warn"),
        ("eval/diversity", [0.4, 0.4, 0.3, 0.1], "Diversity fell to 0.25 of its base.", "bad"),
        ("eval/diversity", [0.4, 0.4, 0.4, 0.44], "Diversity went to 1.10 of its base.", "good"),
        ("samples/saturation", [0.3, 0.3, 0.4, 0.6], "saturation moved to 2.00 of its base", "warn"),
        ("eval/z/mean", [5.0, 4.0, 4.0, 4.5], "z, a judge beside the headline, fell from 5 to 4.5.", "warn"),
        ("objective/clip_frac_high", [0.9] * 4, "Lately 90% of the ratios were clipped", "bad"),
        ("advantage/frac_zero_std", [0.8] * 4, "Lately 80% of the groups had equal rewards", "warn"),
        ("rows/invalid", [0, 0, 3, 0], "Some rows had no reward, first at iteration 20.", "warn"),
        ("reward/r/raw_mean", [0.2, 1.0, 1.6, 2.0], "Training reward minus held-out: 0 at the start", "warn"),
        ("reward/r/raw_mean", [0.2, 0.7, 1.0, 0.9], "Training reward minus held-out: 0 at the start", "note"),
    ],
)
def test_each_verdict(key: str, value: object, text: str, level: str) -> None:
    found = {told: how for told, how in judged(**{key: value}).items() if told.startswith(text)}
    assert [*found.values()] == [level], judged(**{key: value})


@pytest.mark.parametrize(
    "key", ["eval/diversity", "eval/z/mean", "samples/contrast", "advantage/frac_zero_std", "step/0/std"]
)
def test_silence_where_nothing_is_wrong_or_known(key: str) -> None:
    usual = judged()
    for values in ([0.5, 0.5, 0.5, 0.495], [None] * 4, [0.0] * 4):
        more = {text: level for text, level in judged(**{key: values}).items() if text not in usual}
        assert all(
            "Diversity went to 0.99" in t or "Diversity fell to 0.99" in t or "finite" in t for t in more
        )


def test_ratio_before_the_first_update() -> None:
    logged = {"objective/log_ratio_max": [0.0, 1e-3, 1e-3, 1e-3]}
    assert judged(ratio_first_max=0.0, **logged)["The ratio was exactly 1 before the first update."] == "good"
    bad = judged(ratio_first_max=2e-3, **logged)
    assert (
        bad["Before the first update a log-ratio was 0.002, not 0: the replay is not the rollout."] == "bad"
    )
    assert judged(ratio_first_max=0.0) == judged()  # an objective without ratios


def test_run_without_evaluation() -> None:
    rows = {i: {"reward/r/raw_mean": 0.1 * i} for i in (1, 2, 3)}
    assert verdicts(Run("x", Path("x"), "", {}, {"status": "finished"}, rows, {}, 0)) == [
        ("note", "No held-out evaluation was logged; training reward went from 0.1 to 0.3.")
    ]


def test_vanishing_step_gradient_is_told() -> None:
    steps = {f"step/{k}/output_grad_norm": [v] * 4 for k, v in enumerate((1e-5, 0.5, 1.0))}
    assert judged(**steps)["Output gradient below 1/1000 of the largest at step 0."] == "warn"


def test_running_mean_keeps_length_and_level() -> None:
    y = np.random.default_rng(0).normal(3.0, 1.0, 300)
    smooth = running_mean(y)
    assert smooth.shape == y.shape and abs(smooth.mean() - 3) < 0.2 and smooth.std() < 0.5 * y.std()
    assert running_mean(np.full(90, 2.0)) == pytest.approx(2.0)


def test_null_and_not_finite_values_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = metrics_rows(4, 2, 0)
    rows[2] |= {"objective/kl": None, "optimizer/grad_norm": float("nan"), "objective/loss": float("inf")}
    rows[3] |= {"objective/kl": "much", "reward/shapes/raw_std": None, "step/3/std": None}
    rows[3] |= {"optimizer/skipped": 1, "rows/invalid": 10**400}
    for row in rows:
        row["objective/approx_kl"] = None
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    run = load_run(tmp_path)
    assert run.series("objective/kl")[0].tolist() == [1, 4]
    assert len(run.series("objective/approx_kl")[0]) == 0 and np.isnan(run.recent("objective/approx_kl"))
    texts = [text for _, text in verdicts(run)]
    assert any("12 logged values are not finite numbers, the first objective/approx_kl" in t for t in texts)
    assert "Some updates were skipped, first at iteration 3." in texts


def test_nested_settings_are_flattened_to_a_depth() -> None:
    deep: dict = {}
    for _ in range(200):
        deep = {"k": deep}
    assert [*flat({"a": deep}).values()] == ["..."]
    assert flat({"a": [1, {"b": None}], "c": {}, 3: ""}) == {"a.0": "1", "a.1.b": "None", "c": "{}", "3": ""}


def test_numbers_are_shown_short() -> None:
    assert [short(v) for v in (0.123456, -2.0, 1e-7, 12345678, None, "x", float("nan"), True)] == [
        *("0.1235", "−2", "1e−07", "1.235e+07", "–", "–", "–", "1")
    ]
    assert np.isnan(number(10**400)) and np.isnan(number(float("inf"))) and number(3) == 3.0


def test_before_and_after_come_from_the_log_or_else_from_the_summary(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", iterations=4, every=2)
    run = load_run(folder)
    assert [*run.judges] == ["shapes", "clip_score", "aesthetic"] and next(iter(run.meters)) == "diversity"
    assert run.judges["shapes"] == (run.summary["reward_before"], run.summary["reward_after"])
    seconds = {name: y.sum() for name, y in run.phases.items()}
    assert seconds["evaluate"] == pytest.approx(12) and seconds["unaccounted"] == pytest.approx(
        4 * 0.03 * 10.31
    )
    assert run.tags("shapes")["colors"] == run.ends("eval/shapes/tag/colors")
    (folder / "summary.json").unlink()
    logged = load_run(folder)
    assert logged.judges == run.judges and logged.meters == run.meters
    write_jsonl(folder / "metrics.jsonl", [{"iteration": 0, "eval/shapes/mean": 0.25}])
    (folder / "summary.json").write_text(
        '{"judges": {"shapes": {"before": 0.25, "after": 0.25}, "z": {"before": 1, "after": 2, "by_tag": '
        '{"t": {"before": 3, "after": 4}}}}, "meters": {"contrast": {"before": 5, "after": null}}}'
    )
    told = load_run(folder)
    assert told.judges["z"] == (1, 2) and told.tags("z") == {"t": (3, 4)} and told.meters["contrast"][0] == 5
    assert told.judges["shapes"][0] == 0.25 and np.isnan(told.judges["shapes"][1])  # evaluated only once
    assert [*run.phases][:2] == ["replay", "rollout"] and [*run.phases][-1] == "unaccounted"


def test_only_jumpy_curves_are_smoothed() -> None:
    ramp, noise = np.minimum(np.arange(200.0), 10), np.random.default_rng(0).normal(size=200)
    assert is_noisy(noise) and not is_noisy(ramp) and not is_noisy(noise[:50]) and not is_noisy(np.ones(200))
