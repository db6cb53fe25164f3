"""The page of the report, on run folders that the tests write themselves."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from made_run import EVIL, Reader, make_run, small_run, write_jsonl
from PIL import Image

from flowrl.errors import UserError
from flowrl.tools.report import csv_cell, write_comparison, write_report
from flowrl.tools.report_run import load_run

SECTIONS = ("summary", "pictures", "reward", "policy", "steps", "meters", "tags", "cost", "settings")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "quickstart")


@pytest.fixture(scope="module")
def page(finished: Path) -> str:
    out = write_report(finished)
    assert out == finished / "report.html" and not (finished / "report.html.part").exists()
    return out.read_text(encoding="utf-8")


def test_every_section_is_there(page: str) -> None:
    reader = Reader(page)
    ids = {attrs["id"] for _, attrs in reader.tags if "id" in attrs}
    links = {attrs["href"] for tag, attrs in reader.tags if tag == "a"}
    assert ids >= set(SECTIONS) and links >= {f"#{name}" for name in SECTIONS}
    assert reader.open == [] and "Nothing of this was logged" not in page
    for words in (
        *(
            "KL",
            "Ratio − 1",
            "Largest |log ratio|",
            "Clipped ratios",
            "Gradient norm",
            "Learning rate",
            "Loss",
        ),
        *("Noise of the step", "Gradient at the output", "Groups without signal", "Spread within groups"),
        *("Judges on held-out prompts", "Diversity and hacking meters", "training reward − held-out reward"),
        *("Time by phase", "unaccounted", "objective/branch_margin", "guidance.guidance_scale", "2.14.1"),
        *("before training, iteration 0", "during, iteration 20", "after, iteration 40", "single_object"),
    ):
        assert words in reader.text, words
    assert [tag for tag, _ in reader.tags].count("svg") > 25
    assert [tag for tag, _ in reader.tags].count("img") == 5


def test_numbers_of_the_summary_are_shown(finished: Path, page: str) -> None:
    run = load_run(finished)
    before, after = run.judges["shapes"]
    text = Reader(page).text
    assert f"{before:.4g}" in text and f"{after:.4g}" in text and f"+{after - before:.4g}" in text
    train, held_out = run.series("reward/shapes/raw_mean")[1], run.series("eval/shapes/mean")[1]
    assert run.gap == pytest.approx((train[0] - held_out[0], train[-5:].mean() - held_out[-1]))
    assert f"{run.gap[1]:.4g}".replace("-", "−") in text


def test_page_is_self_contained(page: str) -> None:
    reader = Reader(page)
    for tag, attrs in reader.tags:
        for name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
            target = attrs.get(name) or "#"
            assert target.startswith(("#", "data:image/", "data:text/csv")), (tag, name, target[:80])
    assert not re.search(r"https?://|//cdn|@import|url\((?!#)", page)
    assert not {"link", "iframe", "object", "base", "form"} & {tag for tag, _ in reader.tags}
    assert len(page.encode()) < 3_000_000


def test_the_only_script_is_the_one_the_policy_allows(page: str) -> None:
    reader = Reader(page)
    assert [tag for tag, _ in reader.tags].count("script") == 1
    policy = next(a["content"] for tag, a in reader.tags if tag == "meta" and "http-equiv" in a)
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert not any(name.startswith("on") for _, attrs in reader.tags for name in attrs)


def test_strings_of_a_run_are_escaped(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "a<b>&amp; $x$ '\"")
    more = {f"eval/{EVIL}/mean": 0.5, f"reward/{EVIL}/raw_mean": 1.0, f"objective/{EVIL}": 2.0, EVIL: 1.0}
    more |= {
        f"eval/{EVIL}/tag/{EVIL}": 0.1,
        f"samples/{EVIL}": 0.3,
        f"step/0/{EVIL}": 0.3,
        f"count/{EVIL}": 3,
    }
    more |= {"objective/$\\alpha$": 1.0, "\ud800": 1.0, f"step/{EVIL}/std": 0.5}
    write_jsonl(folder / "metrics.jsonl", [{"iteration": i, **more} for i in range(3)])
    write_jsonl(folder / "timings.jsonl", [{"iteration": 1, EVIL: 2.0, "</svg><b>": 1.0}])
    (folder / "config.yaml").write_text(yaml.safe_dump({"description": EVIL, EVIL: [EVIL]}))
    summary = {"reward_name": EVIL, "status": EVIL, "generation": {EVIL: [EVIL]}, "versions": {EVIL: EVIL}}
    summary["judges"] = {EVIL: {"before": 0.2, "after": 0.4, "by_tag": {EVIL: {"before": 1, "after": 2}}}}
    (folder / "summary.json").write_text(json.dumps(summary))
    for out in (write_report(folder), write_comparison([folder, folder], tmp_path / "both.html")):
        page = out.read_text(encoding="utf-8")
        assert page.count("<script") == 1 and EVIL not in page and "<b>&amp; " not in page
        assert EVIL in Reader(page).text and "a<b>&amp; $x$" in Reader(page).text


def test_torn_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "torn", iterations=6)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    bad = ["{", "[1]", "3", "null", '"x"', '{"a": 1}', '{"iteration": -1}', '{"iteration": 1.5}']
    bad += ['{"iteration": "2"}', '{"iteration": null}', '{"iteration": NaN}', '{"iteration": 1e999}']
    bad += ["[" * 100_000, '{"iteration": ' + "9" * 5000 + "}", "\x00\x00", lines[4][:37]]
    holes = '{"iteration": 3, "reward/shapes/raw_mean": null, "objective/kl": NaN, "eval/diversity": null}'
    text = "\n".join([*lines[:3], "", *bad, *lines[3:], holes]) + '\n{"iteration": 7, "rew'
    (folder / "metrics.jsonl").write_text(text)
    (folder / "timings.jsonl").write_bytes(b"\xff\xfe{")
    run = load_run(folder)
    assert [*run.metrics] == [*range(7)] and run.torn == len(bad) + 2
    page = Reader(write_report(folder).read_text(encoding="utf-8"))
    assert f"{len(bad) + 2} unreadable lines of the logs were skipped." in page.text
    assert (
        "3 logged values are not finite numbers, the first reward/shapes/raw_mean at iteration 3."
        in page.text
    )
    assert "nan" not in page.text.lower().split()


@pytest.mark.parametrize("summary", [None, "", '{"reward_before": 0.1', "[]", "null"])
def test_unfinished_run(tmp_path: Path, summary: str | None) -> None:
    folder = small_run(tmp_path / "half")
    if summary is not None:
        (folder / "summary.json").write_text(summary)
    (folder / "config.yaml").write_text("training: {iterations: 50}")
    (folder / "grids").mkdir()
    for i in (0, 2):
        Image.new("RGB", (60, 40)).save(folder / "grids" / f"eval_{i:06d}.png")
    (folder / "grids" / "eval_000004.png").write_bytes(b"\x89PNG\r\n")  # being written
    reader = Reader(write_report(folder).read_text(encoding="utf-8"))
    assert "Unfinished: iteration 4 of 50 is the last one logged." in reader.text
    assert "shapes rose from 0.3 to 0.7" in reader.text and "latest, iteration 2" in reader.text


def test_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0, "eval/shapes/mean": 0.3}\n')
    reader = Reader(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "No evaluation after training yet: shapes is 0.3." in reader.text
    assert reader.text.count("Nothing of this was logged.") == 6
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n')
    assert "unfinished · 1 iteration" in Reader(write_report(tmp_path).read_text(encoding="utf-8")).text


def test_wrong_folders_are_named(tmp_path: Path, finished: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "metrics.jsonl").write_text("{")
    for name in ("empty", "torn", "none"):
        with pytest.raises(UserError, match=re.escape(str(tmp_path / name))):
            write_report(tmp_path / name)
        with pytest.raises(UserError, match=name):
            write_comparison([finished, tmp_path / name], tmp_path / "out.html")
    with pytest.raises(UserError, match="at least one"):
        write_comparison([], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_comparison_lays_runs_over_each_other(tmp_path: Path) -> None:
    a = make_run(tmp_path / "grpo", iterations=6, every=2)
    b = make_run(tmp_path / "cps", iterations=4, every=2, seed=1, finished=False, weight_decay=0.5)
    out = write_comparison([a, b], tmp_path / "deep" / "both.html")
    page = out.read_text(encoding="utf-8")
    reader = Reader(page)
    assert reader.open == [] and reader.text.count("grpo") > 5 and reader.text.count("cps") > 5
    assert (
        "optimizer.weight_decay" in reader.text
        and "training.group_size" not in reader.text.split("Where the")[1].split("Resolved")[0]
    )
    ratio = page[page.index("<b>Ratio − 1</b>") :].partition("</figure>")[0]
    assert "var(--c0)" in ratio and "var(--c1)" in ratio and "var(--c2)" not in ratio
    assert [attrs["alt"] for tag, attrs in reader.tags if tag == "img"] == [
        f"Samples at iteration {i}" for i in (0, 6, 0, 4)
    ]
    assert write_comparison([small_run(tmp_path / "c")], tmp_path) == tmp_path / "comparison.html"


def test_runs_of_equal_names_are_told_apart(tmp_path: Path) -> None:
    folders = [small_run(tmp_path / day / "quickstart") for day in ("monday", "tuesday")]
    text = Reader(write_comparison(folders, tmp_path / "x.html").read_text(encoding="utf-8")).text
    assert "monday/quickstart" in text and "tuesday/quickstart" in text


def test_curves_can_be_taken_as_csv(finished: Path, page: str) -> None:
    data = re.search(r'href="data:text/csv;charset=utf-8;base64,([^"]+)"', page)
    rows = [*csv.DictReader(io.StringIO(base64.b64decode(data[1]).decode()))]
    x, y = load_run(finished).series("eval/shapes/mean")
    told = {int(row["iteration"]): row["eval/shapes/mean"] for row in rows}
    assert len(rows) == 41 and told[5] == "" and {row["run"] for row in rows} == {"quickstart"}
    assert [float(told[int(i)]) for i in x] == pytest.approx(y.tolist())


def test_cells_are_no_formulas(tmp_path: Path) -> None:
    evil = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r\n=1", 'say "a,b"', "a=1"]
    cells = ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "' =1", "'  =1", 'say "a,b"', "a=1"]
    assert [csv_cell(text) for text in evil] == cells and csv_cell("") == ""
    folder = small_run(tmp_path / "=run")
    write_jsonl(folder / "metrics.jsonl", [{"iteration": 0} | dict.fromkeys(evil, -2.5)])
    page = write_report(folder).read_text(encoding="utf-8")
    data = base64.b64decode(re.search(r"csv;charset=utf-8;base64,([^\"]+)", page)[1]).decode()
    header, values = csv.reader(io.StringIO(data))
    assert header == ["run", "iteration", *cells] and values == ["'=run", "0", *["-2.5"] * len(cells)]


def test_settings_that_are_hostile_or_odd(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "odd")
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(24)
    )
    for text in (
        bomb,
        "!!python/object/apply:os.system ['true']",
        "[1, 2",
        "just text",
        "1: {2: *x}",
        "\x00",
    ):
        (folder / "config.yaml").write_text(text)
        assert load_run(folder).config == {}
        write_comparison([folder], tmp_path / "odd.html")


def test_long_runs_stay_small(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "long")
    rng = np.random.default_rng(0)
    rows = [
        {
            "iteration": i,
            "reward/r/raw_mean": rng.random(),
            "reward/r/raw_std": 0.1,
            "step/0/std": rng.random(),
        }
        for i in range(4000)
    ]
    write_jsonl(folder / "metrics.jsonl", rows)
    write_jsonl(folder / "timings.jsonl", [{"iteration": i, "rollout": rng.random()} for i in range(4000)])
    assert write_report(folder).stat().st_size < 1_500_000


def test_a_link_in_place_of_the_report_is_replaced_not_followed(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "linked")
    (tmp_path / "outside").write_text("mine")
    (folder / "report.html").symlink_to(tmp_path / "outside")
    write_report(folder)
    assert (tmp_path / "outside").read_text() == "mine" and not (folder / "report.html").is_symlink()
