"""The experiments run as declared, share their runs, never repeat or lose one, and their numbers are what the formulas say."""

import json
from pathlib import Path

import numpy as np
import pytest

import experiments
import figures
import train
from contradict import draw_lessons
from data import BOOLEAN_TASKS
from eval import SAMPLES
from experiments import FIGURES, Run, Size, packed, read_results, unpacked, vote, wanted
from images import DataError
from pretrain import thinking
from questions import ground_truth

ROOT = Path(__file__).resolve().parent.parent
fast = pytest.mark.fast
ALL = wanted(list(FIGURES), Size())


# --- what is run ------------------------------------------------------------------------------------------------------

@fast
def test_every_run_is_a_valid_command_line_with_a_name_of_its_own_and_figures_share_them():
    assert len({r.name for r in ALL}) == len({(r.flags, r.model, r.long) for r in ALL}) == len(ALL)
    assert len(ALL) < sum(len(wanted([figure], Size())) for figure in FIGURES)
    for run in ALL:
        if run.flags:
            args = train.parse_arguments(list(run.flags))
            assert run.name.startswith(f"{args.task}-{args.reward}") and run.name.endswith(f"-{args.seed}")
            assert run.model in run.name or run.model == "tiny"
            assert args.pairing in run.name or args.pairing == "minimal"


@fast
def test_depth_has_five_seeds_the_rest_at_least_three_and_pairings_two_elsewhere():
    seeds = {}
    for run in ALL:
        if run.flags and run.long == 1:
            seeds.setdefault(run.name.rsplit("-", 1)[0], set()).add(int(run.name.rsplit("-", 1)[1]))
    for name, found in seeds.items():
        pairing = any(p in name for p in ("random", "one_to_all", "minimal_vertex", "majority"))
        pairing = pairing and "pairs" not in name
        least = 5 if name in ("depth-consistency", "depth-accuracy") or (pairing and name.startswith("depth")) else 2 if pairing else 3
        assert found == set(range(least)), name


@fast
def test_no_run_is_tested_on_another_split_and_quick_runs_only_the_first_seed():
    assert all("--eval-split" not in run.flags for run in ALL)
    assert {run.flags[run.flags.index("--seed") + 1] for run in wanted(list(FIGURES), Size(seeds=1)) if run.flags} == {"0"}
    sizes = experiments.test_sizes(experiments.trained("depth", 0, outdoor=True), Size())
    assert sizes["synthetic"] == {"orientation": 100, "depth": 200, "size": 100, "distance": 100}
    assert sizes["synthetic-outdoor"] == dict.fromkeys(BOOLEAN_TASKS, 100)
    assert experiments.test_sizes(experiments.BASE, Size())["synthetic"]["counting"] == 200


@fast
def test_a_taught_base_is_shown_right_thinking_and_answers_right_as_often_as_stated(tmp_path, monkeypatch):
    lessons = []
    monkeypatch.setattr(experiments, "teach", lambda lesson, steps: lessons.append(lesson))
    monkeypatch.setattr(experiments, "save", lambda vlm, folder: folder.mkdir())
    for name, rates in experiments.TAUGHT.items():
        experiments.teach_base(name, tmp_path, Size())
        assert experiments.taught_base(name, tmp_path).is_dir()
        right = {0: [], 1: []}
        for step in range(12):
            for shown, told in draw_lessons(step, 0, 32, lessons[-1]):
                assert f"<think>{thinking(shown)}</think>" in told
                right[shown.question.relation].append(f"<answer>{ground_truth(shown.question, shown.view.objects)}</answer>" in told)
        for word, rate in enumerate(rates):
            assert abs(np.mean(right[word]) - rate) < 4 * (rate * (1 - rate) / len(right[word])) ** 0.5
    assert [np.mean(rates) > 0.5 for rates in experiments.TAUGHT.values()] == [True, False]


# --- the arithmetic ---------------------------------------------------------------------------------------------------

@fast
def test_packing_keeps_every_value():
    for values in ([0, 1, 1, 0], [0.25, 0.5, 1.0, 0.75], [True, False]):
        assert isinstance(packed(values), str) and unpacked(packed(values)).tolist() == [float(v) for v in values]
    assert unpacked(packed([1 / 3, 0.5])).tolist() == [0.333, 0.5] and SAMPLES == 4


@fast
def test_a_vote_counts_readable_answers_and_splits_ties():
    assert [vote(a, True) for a in ([True, True, False, None], [False, None, None, None], [True, False, None, None], [None] * 4)] == [1, 0, 0.5, 0.5]


@fast
def test_changes_are_paired_by_question_and_averaged_over_seeds():
    tested = lambda right, relation="0404": {"synthetic": {"depth": {"greedy_accuracy": right, "relation": relation}}}
    base = {"tests": tested("040400", "040440")}                       # the base answered two questions more
    runs = [{"tests": tested("4404")}, {"tests": tested("4400")}]
    c = figures.compared(runs, base, "synthetic", "depth")
    change = np.array([1, 0, 0, -0.5])                                 # by hand: mean over seeds minus base, per question
    assert c["value"] == pytest.approx(62.5) and c["base"] == 50 and c["change"] == pytest.approx(100 * change.mean())
    assert c["half"] == pytest.approx(196 * change.std(ddof=1) / 2) and c["spread"] == pytest.approx(np.std([75, 50], ddof=1))
    assert c["n"] == 4 and c["seeds"] == 2 and c["each"] == [75.0, 50.0]
    opposite = figures.compared(runs, base, "synthetic", "depth", word=1)
    assert opposite["n"] == 2 and opposite["value"] == 75 and opposite["base"] == 100


@fast
def test_an_arm_is_its_seeds_and_nothing_with_a_longer_name():
    results = {n: {"name": n} for n in ("depth-consistency-1", "depth-consistency-0", "depth-consistency-random-0", "depth-consistency-long-0")}
    assert [r["name"] for r in figures.arm(results, "depth", "consistency")] == ["depth-consistency-0", "depth-consistency-1"]


@fast
def test_take_off_is_the_first_look_above_the_level():
    assert [figures.first_above([[10, 0.7, 1], [20, 0.9, 1], [30, 0.95, 1], [40, 0.2, 1]], level) for level in (0.5, 0.9, 0.99)] == [10, 30, "never"]


# --- nothing is repeated or lost --------------------------------------------------------------------------------------

@fast
def test_finished_runs_are_not_repeated_half_a_line_is_passed_over_and_other_sizes_are_refused(tmp_path, monkeypatch):
    file, size = tmp_path / "results.jsonl", Size()
    file.write_text(json.dumps({"name": "a", "size": vars(size)}) + "\n" + '{"name": "b", "si')
    assert list(read_results(file)) == ["a"]
    asked = []

    class Future:
        def __init__(self, line): self.result = lambda: line

    class Pool:
        def __init__(self, *_, **__): ...
        def __enter__(self): return self
        def __exit__(self, *_): ...
        def submit(self, _, run, *__):
            asked.append(run.name)
            return Future({"name": run.name, "size": vars(size)})

    monkeypatch.setattr(experiments, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(experiments, "as_completed", list)
    runs = [Run("a"), Run("b"), Run("c")]
    experiments.carry_out_all(runs, tmp_path, file, size, workers=1)
    assert asked == ["b", "c"] and list(read_results(file)) == ["a", "b", "c"]
    with pytest.raises(DataError, match="other steps or test sizes; give another --results"):
        experiments.carry_out_all(runs, tmp_path, file, Size(steps=7), workers=1)


@fast
def test_wrong_names_are_refused_with_the_choices(capsys):
    with pytest.raises(SystemExit) as refused:
        experiments.main(["figure99"])
    assert refused.value.code == 2 and "figure99: choose from figure2" in (error := capsys.readouterr().err) and len(error.splitlines()) == 1


def test_all_experiments_together_run_quickly_and_every_figure_is_drawn_from_them(tmp_path):
    work = tmp_path / "work"
    assert experiments.main(["--quick", "--workers", "2", "--work", str(work)]) == 0
    results = read_results(work / "experiments.jsonl")
    assert set(results) == {r.name for r in wanted(list(FIGURES), Size(seeds=1))}
    assert results["depth-consistency-long-0"]["curve"][-1][0] == 20 and results["depth-consistency-0"]["curve"][-1][0] == 2
    before = (work / "experiments.jsonl").read_bytes()
    assert experiments.main(["--quick", "--work", str(work)]) == 0 and (work / "experiments.jsonl").read_bytes() == before
    assert figures.main(["--results", str(work / "experiments.jsonl"), "--out", str(tmp_path / "drawn"),
                         "--adapter", str(work / "depth-consistency-0")]) == 0
    text = (tmp_path / "drawn" / "experiments.txt").read_text()
    assert "not run" not in text
    assert figures.main(["--results", str(work / "experiments.jsonl"), "--out", str(tmp_path / "drawn"), "--adapter", "nothing"]) == 0
    assert (tmp_path / "drawn" / "experiments.txt").read_text() == text  # what figure 10 showed stays where its adapter is gone
    assert {f.name for f in (tmp_path / "drawn").glob("*.png")} == {f"{n}.png" for n in ("figure2", "figure3_4", "figure5", "figure6", "figure8", "figure10", "long")}
