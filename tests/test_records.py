"""The page of the papers' figures: what the committed rows make, and what rows of a test make."""

import numpy as np
import pytest

from experiments import benchmark, records, studies


def test_the_committed_page_is_what_the_committed_rows_make(tmp_path, monkeypatch, capsys):
    committed = benchmark.RESULTS
    for file in (*(f"{module.STUDY.name}.jsonl" for module in records.MODULES), "cnn_tel.md"):
        (tmp_path / file).symlink_to(committed / file)
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments, file in (([], "results/records.md"), (["--write"], "records.md")):
        records.main(arguments)
        text = (tmp_path / file).read_text()
        assert text == (committed / "records.md").read_text(), "python -m experiments.records --write"
        assert text.strip() == capsys.readouterr().out.strip()


def test_commands_of_missing_figures_are_those_of_the_scripts(tmp_path):
    results = records.Results.read(tmp_path)
    for row in (row for rows_of, _ in records.PAPERS.values() for row in rows_of(results)):
        assert row.ours is None and row.reached is None
        script, *arguments = row.command.strip("`").removeprefix("python -m experiments.").split()
        if script != "cnn_tel":
            study = next(module.STUDY for module in records.MODULES if script == module.STUDY.name)
            options = studies.parse(study, arguments)
            assert (options.parts[0], row.name, 0) in study.pieces(options)


@pytest.mark.parametrize(
    ("metric", "paper", "values", "reached"),
    [
        ("R², %", 80.0, [79.0, 80.0], True),
        ("R², %", 80.0, [78.5, 79.5], False),
        ("R², %", 80.0, [79.5], True),
        ("AUC, %", 80.0, [79.4], False),
        ("RMSE", 2.0, [2.0, 2.1], True),
        ("RMSE", 2.0, [2.1, 2.2], False),
        ("RMSE", 2.0, [2.1], False),
        ("RMSE", 2.0, [1.9], True),
        ("share, %", "45 to 55", [50.0], None),
    ],
)
def test_reached_is_within_a_deviation_or_of_a_single_run_half_a_point(metric, paper, values, reached):
    ours = records.Ours(float(np.mean(values)), float(np.std(values)), len(values))
    assert records.PaperFigure("1", "a set", "a method", metric, paper, ours, "", "no").reached is reached
