"""What the linear scaling experiment says of its results; the published table is that of the published results."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import linear_scaling, linear_scaling_report

ROOT = Path(__file__).resolve().parents[2]


def run(arm: str, seed: int, *accuracies: float | None) -> dict:
    return {"arm": arm, "seed": seed, "curve": [{"accuracy": value, "loss": 1.0} for value in accuracies]}


def tuned(rate: float, seed: int, accuracy: float) -> dict:
    return {"learning_rate": rate, **run("one", seed, accuracy)}


RESULTS = {
    "settings": {"ranks": 4, "batch_size": 125, "momentum": 0.9, "epochs": 2},
    "tuning": [tuned(0.1, 1, 0.96), tuned(0.1, 2, 0.98), tuned(0.2, 1, 0.975), tuned(0.2, 2, 0.971)],
    "runs": [
        run("one", 2, 0.9, 0.98),
        run("one", 1, 0.9, 0.984),
        run("rule-warmup", 1, 0.9, 0.982),
        run("rule-warmup", 2, 0.9, 0.977),
        run("rule", 1, 0.9, 0.9799),
        run("unscaled", 1, None, None),
        run("unscaled", 3, 0.9, 0.99),
    ],
}


def test_arms_are_compared_with_one_rank_seed_by_seed():
    one, warmup, rule, unscaled = linear_scaling_report.summarise(RESULTS)
    assert one.accuracies == pytest.approx([98.4, 98.0])
    assert warmup.differences == pytest.approx([-0.2, -0.3])
    assert rule.differences == pytest.approx([-0.41])
    # Diverged counts as 0; a seed that one rank has not run yet is left out.
    assert unscaled.differences == pytest.approx([-98.4])
    assert linear_scaling_report.verdicts([one, warmup, rule, unscaled]) == [
        "rule-warmup: -0.25 points from 1 rank, within 0.3",
        "rule: -0.41 points from 1 rank, not within 0.3",
        "unscaled: -98.40 points from 1 rank, not within 0.3",
    ]


def test_rate_with_the_best_mean_is_chosen_and_of_equals_the_smaller():
    assert linear_scaling.best_rate(RESULTS["tuning"]) == 0.2
    assert linear_scaling.best_rate([tuned(0.4, 1, 0.97), tuned(0.1, 1, 0.97)]) == 0.1


@pytest.mark.parametrize("name", ["plot.svg", "plot.png"])
def test_plot_shows_every_arm(tmp_path, name):
    path = tmp_path / name
    linear_scaling_report.draw(RESULTS, path)
    if name.endswith(".png"):
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    ElementTree.parse(path)
    text = path.read_text()
    for label in (
        "1 rank",
        "4 ranks, rule and warm-up",
        "4 ranks, rate not scaled",
        "MNIST, batch 125 a rank",
    ):
        assert f"<!-- {label}" in text
    linear_scaling_report.draw(RESULTS, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == path.read_bytes()


def test_show_prints_the_table_and_runs_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    path = tmp_path / "results.json"
    path.write_text(json.dumps(RESULTS))
    assert linear_scaling.main(["--show", "--results", str(path)]) == 0
    output = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "rule: -0.41 points from 1 rank, not within 0.3" in output
    assert "98.40 98.00" in output
    assert path.with_suffix(".svg").exists()
    assert json.loads(path.read_text()) == RESULTS


def test_published_table_is_that_of_the_published_results():
    results = json.loads((ROOT / "benchmarks/results/linear_scaling.json").read_text())
    published = (ROOT / "benchmarks/RESULTS.md").read_text()
    summaries = linear_scaling_report.summarise(results)
    assert [summary.arm for summary in summaries] == list(linear_scaling_report.ARMS)
    for row in linear_scaling_report.rows(results):
        assert "| " + " | ".join(row) + " |" in published
