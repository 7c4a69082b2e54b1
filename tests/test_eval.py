"""Claims about eval.py: every metric against hand-made answers, intervals against closed forms, what blanking removes."""
import json
import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from toy import flags, parity, write_photos

import eval as evaluation
import train
from dataset import evaluation_pair, load_examples
from eval import Settings, blank, breakdown, estimate, evaluate, held_out_examples, print_summary, shown, summarise
from images import DataError
from questions import ground_truth
from verifiers import Parsed

fast = pytest.mark.fast


def parsed(answer):
    return Parsed(answer, answer is not None, "")


def truth(shown):
    return ground_truth(shown.question, shown.view.objects)


def is_blank(shown):
    return (np.asarray(shown.picture) == 128).all()


def ask_as(monkeypatch, policy, examples, **settings):
    """Rows for a policy: (what is shown, system prompt, number of the sample or None for greedy) -> answer."""
    def answers(vlm, shown, system, settings, samples, stream):
        return [[parsed(policy(s, system, k if samples else None)) for k in range(max(1, samples))] for s in shown]

    monkeypatch.setattr(evaluation, "answers", answers)
    return evaluate(None, examples, Settings(**settings))


@pytest.fixture(scope="module")
def depth():
    return load_examples("synthetic", "depth", "test", limit=12)


# --- intervals --------------------------------------------------------------------------------------------------------
@fast
@pytest.mark.parametrize("successes, n", [(0, 10), (3, 10), (10, 10), (71, 100), (1, 1)])
def test_intervals_of_shares_are_wilsons(successes, n):
    e = estimate([1.0] * successes + [0.0] * (n - successes))
    z, p = NormalDist().inv_cdf(0.975), successes / n
    # its ends are the two shares q for which p lies z standard errors away: (p - q)^2 = z^2 q (1 - q) / n
    ends = np.roots([1 + z * z / n, -(2 * p + z * z / n), p * p])
    assert e["value"] == p and e["n"] == n
    assert (e["low"], e["high"]) == pytest.approx((min(ends), max(ends)), abs=2e-4)


@fast
def test_intervals_of_means_are_normal_with_the_sample_deviation_and_stay_in_0_to_1():
    values = [0.25, 0.5, 0.5, 0.75, 1.0]
    mean = sum(values) / 5
    half = NormalDist().inv_cdf(0.975) * math.sqrt(sum((v - mean) ** 2 for v in values) / 4 / 5)
    e = estimate(values)
    assert e["value"] == pytest.approx(mean) and e["low"] == pytest.approx(mean - half, abs=1e-4) and e["high"] == pytest.approx(mean + half, abs=1e-4)
    assert estimate([1.0, 1.0, 0.25])["high"] == 1.0
    assert estimate([0.5]) == {"value": 0.5, "n": 1, "low": 0.0, "high": 1.0}  # one question says nothing
    assert shown(estimate([1.0] * 3 + [0.0])) == " 75.0 [30.1, 95.4]"


# --- metrics of known policies ----------------------------------------------------------------------------------------
@fast
def test_whoever_knows_scores_one_everywhere_but_when_blinded(monkeypatch, depth):
    def knows(shown, system, k):
        return None if is_blank(shown) else truth(shown)

    rows = ask_as(monkeypatch, knows, depth, diagnostics=("blind", "marks_only", "direct"))
    scores = {name: e["value"] for name, e in summarise(rows)["depth"].items()}
    assert scores == {"greedy_accuracy": 1, "sampled_accuracy": 1, "consistency": 1, "unparsed": 0, "blind_accuracy": 0,
                      "blind_consistency": 0, "marks_only_accuracy": 1, "marks_only_consistency": 1, "direct_accuracy": 1,
                      "direct_consistency": 1}
    assert [r["id"] for r in rows] == [e.id for e in depth] and rows[0]["answers"] == [rows[0]["truth"]] * 4


@fast
def test_a_constant_answer_is_consistent_exactly_where_the_transform_keeps_the_answer(monkeypatch, depth):
    rows = ask_as(monkeypatch, lambda *_: True, depth)
    pairs = [evaluation_pair(e, 0) for e in depth]
    assert [r["consistency"] for r in rows] == [1 - p.negates for p in pairs] == [r["blind_consistency"] for r in rows]
    assert [r["greedy_accuracy"] for r in rows] == [truth(p.x) for p in pairs]
    assert 0 < sum(p.negates for p in pairs) < len(pairs)


@fast
def test_each_metric_by_hand_where_samples_differ_and_some_are_unreadable(monkeypatch, depth):
    """Samples 0, 1 right on both sides; 2 right on x, wrong on x'; 3 unreadable. Greedy is wrong on x, right on x'."""
    pair = evaluation_pair(depth[0], 0)

    def policy(shown, system, k):
        right, first = truth(shown), shown.question == pair.x.question
        if k is None:
            return right != first
        return [right, right, right == first, None][k]

    (row,) = ask_as(monkeypatch, policy, depth[:1])
    assert (row["sampled_accuracy"], row["greedy_accuracy"]) == (0.75, 0.0)
    assert (row["consistency"], row["unparsed"]) == (0.5, 0.25)
    assert row["x_prime"]["greedy_accuracy"] == 1.0
    e = summarise([row])["depth"]["sampled_accuracy"]
    assert e["value"] == 0.75 and e["n"] == 1


@fast
def test_the_breakdown_sorts_both_sides_of_a_pair_by_their_own_wording(monkeypatch, depth):
    """A model that knows one word of the two and falls for unnamed listings."""
    def policy(shown, system, k):
        return truth(shown) if shown.question.relation == 0 and shown.question.named else not truth(shown)

    rows = ask_as(monkeypatch, policy, depth)
    sides = [s for e in depth for p in [evaluation_pair(e, 0)] for s in (p.x, p.x_prime)]
    found = {name: (e["value"], e["n"]) for _, name, e in breakdown(rows)}
    assert found["word: further"][0] == found["listing: unnamed"][0] == 0
    closer = [s for s in sides if s.question.relation == 0]
    assert found["word: closer"] == (pytest.approx(np.mean([s.question.named for s in closer])), len(closer))
    assert found["flip: no"][1] + found["flip: yes"][1] == 24 and found["flip: yes"][1] > 0
    assert sum(found[f"template {t}"][1] for t in range(5) if f"template {t}" in found) == 24
    assert found["order: 2 then 1"][1] == sum(s.question.swapped for s in sides)


@fast
def test_numeric_tasks_stand_beside_the_best_constant_and_the_commonest_answer(monkeypatch, capsys):
    examples = load_examples("synthetic", "counting", "test", limit=10)
    counts = [len(e.object_ids) for e in examples]
    rows = ask_as(monkeypatch, lambda shown, system, k: 3.0, examples)
    scores = summarise(rows)["counting"]
    by_hand = {y: np.mean([max(0, 1 - abs(y - t) / t) for t in counts]) for y in range(1, 7)}
    assert scores["greedy_accuracy"]["value"] == pytest.approx(by_hand[3])
    assert scores["best_constant"]["value"] == pytest.approx(max(by_hand.values()))
    assert by_hand[scores["best_constant"]["answer"]] == max(by_hand.values())
    assert (scores["commonest_answer"]["answer"], scores["commonest_answer"]["value"]) == (3.0, 1.0)
    assert scores["consistency"]["value"] == 1  # nothing in the transforms of counting removes a constant answer
    print_summary({"counting": scores})
    assert "best_constant" in capsys.readouterr().out


@fast
def test_without_3d_boxes_there_is_no_truth_and_only_consistencies_are_given(monkeypatch, depth):
    flat = [replace(e, record=replace(e.record, objects=tuple(replace(o, box3d=None) for o in e.record.objects))) for e in depth]
    for task in ("depth", "orientation", "counting"):
        rows = ask_as(monkeypatch, lambda *_: 2.0 if task == "counting" else True, [replace(e, task=task) for e in flat])
        assert {"consistency", "unparsed", "blind_consistency"} <= summarise(rows)[task].keys()
        assert not any("accuracy" in name or name == "best_constant" for name in summarise(rows)[task])


# --- blanking ---------------------------------------------------------------------------------------------------------
@fast
@pytest.mark.parametrize("task, colours", [("depth", 2), ("orientation", 2), ("distance", 3), ("counting", 0)])
def test_blanking_removes_everything_and_marks_only_keeps_the_marks(task, colours):
    (example,) = load_examples("synthetic", task, "test", limit=1)
    shown = evaluation_pair(example, 0).x
    blind, marked = blank(shown, marks=False), blank(shown, marks=True)
    assert blind.picture.size == marked.picture.size == shown.picture.size and blind.question == shown.question
    assert is_blank(blind)
    drawn = (np.asarray(marked.picture) != 128).any(-1)  # (H, W)
    assert (np.asarray(marked.picture)[drawn] == np.asarray(shown.picture)[drawn]).all() and drawn.mean() < 0.6
    pure = {c for _, c in marked.picture.getcolors(10**6)} & {(255, 0, 0), (0, 0, 255), (0, 255, 0)}
    assert len(pure) == colours == min(colours, len(pure)) and bool(drawn.any()) == (colours > 0)


# --- which questions --------------------------------------------------------------------------------------------------
@fast
def test_every_model_is_asked_the_same_questions_and_ranks_share_them_without_changing_an_answer(vlm, depth, monkeypatch):
    monkeypatch.setattr(evaluation, "parse", parity)
    settings = Settings(max_new_tokens=4, samples=2)
    whole = evaluate(vlm, depth[:5], settings, batch=2)
    assert [r["id"] for r in whole] == [e.id for e in depth[:5]]
    shares = []
    monkeypatch.setattr(evaluation, "gather", lambda mine, world_size: [shares.append(mine) or dict.fromkeys(range(3), [])])
    for rank in (0, 1):
        evaluate(vlm, depth[:5], settings, rank, 2, batch=2)
    assert shares[0].keys() == {0, 2} and shares[1].keys() == {1}
    assert [row for i in range(3) for row in (shares[0] | shares[1])[i]] == whole


@fast
def test_evaluation_takes_gap_filtered_pairs_and_2d_ones_only_where_nothing_else_is_known(tmp_path):
    with_3d = write_photos(tmp_path / "with", train=2, test=3)
    found = held_out_examples(with_3d, "depth", "test", 2)
    assert [e.id for e in found] == [e.id for e in load_examples(with_3d, "depth", "test", "gap")][:2]
    content = json.loads((tmp_path / "with/annotations/SUNRGBD_toy.json").read_text())
    for row in content["annotations"]:  # every object at one depth: 3D boxes, but no unambiguous pair
        row.update(center_cam=[0, 0, 9], R_cam=np.eye(3).tolist(), dimensions=[1, 1, 1], bbox3D_cam=None)
    (tmp_path / "with/annotations/SUNRGBD_toy.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="no example of task depth in the test split"):
        held_out_examples(with_3d, "depth", "test", 2)
    without = write_photos(tmp_path / "without", train=2, test=3, boxes3d=False)
    assert len(held_out_examples(without, "depth", "test", 2)) == 2


# --- the command ------------------------------------------------------------------------------------------------------
def test_an_adapter_brings_its_base_and_settings_two_sources_make_one_table_and_out_is_json(base, photos, tmp_path, capsys, quick):
    prompt = tmp_path / "system.txt"
    prompt.write_text("Answer.")
    run = tmp_path / "run"
    assert train.main(flags(base, photos, run, max_new_tokens=5, max_pixels=9 * 784, system_prompt=prompt)) == 0
    data = write_photos(tmp_path / "both", train=0, test=2)
    write_photos(tmp_path / "both", train=0, test=2, source="KITTI", first=3000)
    capsys.readouterr()
    out = tmp_path / "scores.json"
    assert evaluation.main(["--adapter", str(run), "--data", data, "--tasks", "depth", "orientation", "--n", "2", "--breakdown",
                            "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{base} + {run} on {data} (test), seed 0, 4 samples per question at temperature 1, at most 5 tokens, "
                           "pictures at most 7,056 pixels")
    assert all(f"{source:<12}depth" in text for source in ("SUNRGBD", "KITTI")) and "template 0" in text
    content = json.loads(out.read_text())
    assert set(content["sources"]) == {"SUNRGBD", "KITTI"} and content["arguments"]["adapter"] == str(run)
    entry = content["sources"]["KITTI"]
    assert entry["summary"]["depth"]["greedy_accuracy"]["n"] == 2 and {r["task"] for r in entry["rows"]} == {"depth", "orientation"}
    assert all(r["id"].startswith("KITTI") for r in entry["rows"])
    # the same numbers again, and the base alone through its folder
    assert evaluation.main(["--adapter", str(run), "--data", data, "--tasks", "depth", "--n", "2"]) == 0
    again = capsys.readouterr().out
    assert [line for line in text.splitlines() if line.startswith("KITTI       depth")] == [
        line for line in again.splitlines() if line.startswith("KITTI       depth")]


@fast
def test_what_a_folder_lacks_is_named_and_the_rest_evaluated(base, tmp_path, capsys):
    data = write_photos(tmp_path / "photos", train=0, test=2)
    content = json.loads((tmp_path / "photos/annotations/SUNRGBD_toy.json").read_text())
    for i, row in enumerate(content["annotations"]):
        row["category_name"] = f"thing {i}"  # nothing to count
    (tmp_path / "photos/annotations/SUNRGBD_toy.json").write_text(json.dumps(content))
    argv = ["--model", base, "--data", data, "--max-new-tokens", "3", "--diagnostics"]
    assert evaluation.main([*argv, "--tasks", "counting", "depth"]) == 0
    assert "left out: SUNRGBD counting: --data" in capsys.readouterr().out
    with pytest.raises(DataError, match="no example of task counting"):
        evaluation.main([*argv, "--tasks", "counting"])
    with pytest.raises(DataError, match="nowhere: no images of SUNRGBD or KITTI or own"):
        evaluation.main(["--model", base, "--data", str(tmp_path / "nowhere")])
