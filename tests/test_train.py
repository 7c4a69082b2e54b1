"""Claims about train.py: what a run prints and leaves, that it needs no label, resumes exactly and stops when it must."""
import json
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from toy import ROOT, flags, log_of, parity, write_photos
from transformers import AutoModelForImageTextToText

import eval as evaluation
import lenguard
import preflight
import train
from data import TASKS
from dataset import draw_pair, load_examples
from images import DataError
from model import ModelError, add_lora, trainable_parameters
from rewards import REWARDS, make_reward
from verifiers import Parsed

fast = pytest.mark.fast


def adapter_of(run):
    return load_file(Path(run) / "adapter_model.safetensors")


def comparable(run):
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in log_of(run)]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def furthest(a, b):
    """The largest difference of any weight, relative to the largest weight."""
    assert a.keys() == b.keys()
    return max((a[n] - b[n]).abs().max() for n in a) / max(w.abs().max() for w in a.values())


def trained(base, data, out, **changed):
    """The adapter that a run leaves."""
    assert train.main(flags(base, data, out, **changed)) == 0
    return adapter_of(out)


def settings(base, data, tmp_path, /, **changed):
    """Effective settings without running anything."""
    args, _ = train.settle(train.parse_arguments(flags(base, data, tmp_path / "never", **changed)))
    train.share_pairs(args, 1)
    return args


# --- what is printed first --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole_run(base, photos, tmp_path_factory):
    """One run with everything: two tasks' worth of evaluation, probe, checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "parse", parity)
        patch.setattr(evaluation, "parse", parity)
        out = tmp_path_factory.mktemp("runs") / "whole"
        with open(out.with_suffix(".txt"), "w") as file:
            patch.setattr(sys, "stdout", file)
            assert train.main(flags(base, photos, out, steps=3, eval_size=4, save_every=1, eval_every=2)) == 0
    return out, out.with_suffix(".txt").read_text()


@fast
def test_the_first_lines_say_preset_and_why_what_is_trainable_the_batch_and_how_answers_are_sampled(whole_run, base):
    out, text = whole_run
    preset, _, trainable, batch, sampling = text.splitlines()[:5]
    assert preset == "preset tiny: as asked"
    weights = sum(w.numel() for w in adapter_of(out).values())
    assert trainable.startswith(f"trainable: {weights:,} of ") and "3 x q_proj" in trainable and "vision tower: 0" in trainable
    assert batch == ("batch: 1 rank x 2 pairs x 2 prompts x 4 completions = 16 answers per step, 3 steps at rate 0.001")
    assert sampling.startswith("sampling: temperature 1, no top-k, no top-p, no penalties, at most 6 tokens; pictures at most "
                               "12,544 pixels (16 tokens)")


@fast
def test_the_preset_is_the_papers_only_with_cuda_and_data_and_an_explicit_flag_always_wins(monkeypatch, tmp_path):
    def chosen(*argv):
        args, reason = train.settle(train.parse_arguments(["--task", "depth", *argv]))
        return args, reason

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert chosen()[0].preset == "tiny" and "no data in data/omni3d" in chosen()[1] and "no CUDA" not in chosen()[1]
    (tmp_path / "data/omni3d/annotations").mkdir(parents=True)
    args, reason = chosen("--lr", "0.5")
    assert (args.preset, args.model, args.lr, args.steps) == ("paper", "Qwen/Qwen2.5-VL-3B-Instruct", 0.5, 500)
    assert (args.pairs_per_device, args.group_size, args.temperature, args.lora_rank) == (4, 8, 1.0, 32)
    assert args.max_new_tokens == 512 and args.max_pixels == 512 * 784 and reason.startswith("CUDA is available and data/omni3d")
    assert chosen("--preset", "tiny")[0].model == "tiny"
    assert train.settle(train.parse_arguments(["--task", "joint"]))[0].steps == 2000
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen()[0].preset == "tiny" and "no CUDA device." in chosen()[1]
    assert "For the paper's recipe put Omni3D's SUNRGBD_*.json into data/omni3d/Omni3D" in chosen()[1]


@fast
def test_data_of_ones_own_counts_for_the_preset_and_the_embedded_models_rate_never_meets_another_model(monkeypatch, tmp_path, photos, base):
    def chosen(*argv):
        return train.settle(train.parse_arguments(["--task", "depth", *argv]))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args, reason = chosen("--data", photos)
    assert (args.preset, args.data, args.lr) == ("paper", photos, 1e-6) and reason == f"CUDA is available and {photos} holds the prepared data"
    assert chosen("--data", "synthetic")[0].preset == chosen("--data", photos, "--model", "tiny")[0].preset == "tiny"
    for model in ("Qwen/Qwen2.5-VL-7B-Instruct", base):
        args, reason = chosen("--model", model)
        assert (args.preset, args.lr, args.max_new_tokens) == ("paper", 1e-6, 512) and f"--model {model} is no embedded model" in reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen("--model", base)[0].lr == 1e-6  # a small folder runs on a laptop
    assert chosen("--preset", "paper", "--model", base)[1] == "as asked"
    for argv in (["--preset", "paper"], ["--model", "Qwen/Qwen2.5-VL-3B-Instruct"]):
        with pytest.raises(DataError, match="the paper's recipe needs a CUDA device, and there is none: add --dry-run"):
            chosen(*argv)
        assert chosen(*argv, "--dry-run")[0].model == "Qwen/Qwen2.5-VL-3B-Instruct"


# --- what a run leaves ------------------------------------------------------------------------------------------------
@fast
def test_a_run_leaves_adapter_settings_log_scores_pictures_and_checkpoints(whole_run, base):
    out, text = whole_run
    assert {f.name for f in out.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors", "config.json", "log.jsonl",
                                               "eval.json", "curves.png", "pairs.png", "checkpoints"}
    config = json.loads((out / "config.json").read_text())
    assert config["task"] == "depth" and config["lr"] == 1e-3 and config["versions"]["torch"] == torch.__version__
    assert config["system_prompt_text"] and config["pairs_per_step"] == 2
    assert sorted(f.name for f in (out / "checkpoints").iterdir()) == ["step-00002", "step-00003"]  # the newest two
    assert same(adapter_of(out), adapter_of(out / "checkpoints" / "step-00003"))
    for name in ("curves.png", "pairs.png"):
        assert min(Image.open(out / name).size) > 200
    assert text.splitlines()[-1].startswith(f"{out} is complete")
    model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32), str(out))
    assert any(p.any() for n, p in model.named_parameters() if "lora_B" in n)


@fast
def test_the_log_holds_one_row_a_step_with_every_part_and_the_examples_used(whole_run, photos):
    rows = log_of(whole_run[0])
    assert [r["step"] for r in rows] == [1, 2, 3]
    for row in rows:
        assert {"reward", "task_reward", "format", "consistency", "no_spread", "unparsed", "truncated", "length", "grad_norm",
                "loss", "entropy", "clip_fraction", "ratio_deviation", "seconds_rollout", "seconds_update"} <= row.keys()
        assert len(row["ids"]) == 2 and row["format"] == 1 and row["unparsed"] == 0
        assert row["reward"] == pytest.approx(row["task_reward"] + row["format"]) and row["ratio_deviation"] < 1e-4
        assert abs(row["loss"]) < 1e-5  # about zero by construction, while the gradient is not:
    assert any(row["grad_norm"] > 1e-3 for row in rows)
    known = {e.id for e in load_examples(photos, "depth", "train")}
    assert {i for row in rows for i in row["ids"]} == known  # 3 steps of 2 pairs: one epoch of the six examples
    assert ["probe_accuracy" in row for row in rows] == [False, True, True]


@fast
def test_eval_json_has_exactly_the_promised_schema(whole_run):
    content = json.loads((whole_run[0] / "eval.json").read_text())
    assert list(content) == ["before", "after"]
    for part in content.values():
        assert list(part) == ["depth"] and set(part["depth"]) == {
            "sampled_accuracy", "greedy_accuracy", "consistency", "unparsed", "blind_accuracy", "blind_consistency"}
        for estimate in part["depth"].values():
            assert set(estimate) == {"value", "n", "low", "high"} and estimate["n"] == 4
            assert 0 <= estimate["low"] <= estimate["value"] <= estimate["high"] <= 1


@fast
def test_the_run_ends_with_one_table_of_before_after_and_the_difference_paired_by_question(whole_run):
    out, text = whole_run
    before, after = (json.loads((out / f"{name}.json").read_text()) for name in ("before", "after"))
    table = text[text.index("task         metric"):].splitlines()
    assert [line.split()[1] for line in table[1:7]] == ["greedy_accuracy", "sampled_accuracy", "consistency", "unparsed",
                                                       "blind_accuracy", "blind_consistency"]
    change = 100 * sum(b["sampled_accuracy"] - a["sampled_accuracy"] for a, b in zip(before, after)) / 4
    assert f"{change:+5.1f} [" in table[2] and table[2].rstrip().endswith(" 4")


@fast
def test_the_default_folder_counts_on_and_an_explicit_one_with_content_is_refused(monkeypatch, tmp_path, base, photos):
    monkeypatch.chdir(tmp_path)
    args = settings(base, photos, tmp_path, out=None, seed=3)
    names = [str(train.new_folder(args)) for _ in range(3)]
    assert names == ["runs/depth-consistency-seed3" + end for end in ("", "-2", "-3")]
    (tmp_path / "mine").mkdir()
    settings(base, photos, tmp_path, out="mine")  # empty: fine
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(DataError, match="--out mine exists and is not empty; go on with it by --resume mine"):
        settings(base, photos, tmp_path, out="mine")


def test_numeric_tasks_and_joint_train_and_their_scores_stand_beside_the_best_constant(base, tmp_path, quick):
    data = write_photos(tmp_path / "photos", train=3, test=3, task="counting")
    trained(base, data, tmp_path / "count", task="counting", eval_size=3, steps=1)
    scores = json.loads((tmp_path / "count" / "eval.json").read_text())["after"]["counting"]
    assert {"best_constant", "commonest_answer", "sampled_accuracy"} <= scores.keys()
    assert {"value", "n", "low", "high", "answer"} == set(scores["best_constant"])
    trained(base, data, tmp_path / "joint", task="joint", steps=2, pairs_per_device=4)
    assert len({i.split(":")[2] for row in log_of(tmp_path / "joint") for i in row["ids"]}) > 1


# --- label-free, structurally -----------------------------------------------------------------------------------------
@fast
def test_no_path_from_a_label_free_training_step_reaches_the_truth(lora_vlm, base, tmp_path, monkeypatch, quick):
    def label(*_):
        raise AssertionError("a label was read")

    optimiser = torch.optim.SGD(trainable_parameters(lora_vlm).values(), lr=1e-3)
    examples = {task: load_examples("synthetic", task, "train", limit=2) for task in TASKS}
    holders = [m for m in sys.modules.values() if str(getattr(m, "__file__", "")).startswith(str(ROOT)) and hasattr(m, "ground_truth")]
    assert {m.__name__ for m in holders} >= {"questions", "rewards", "eval"}
    for module in holders:
        monkeypatch.setattr(module, "ground_truth", label)
    for task in TASKS:
        args = settings(base, "synthetic", tmp_path, task=task)
        step = lambda: train.train_step(lora_vlm, optimiser, examples[task], train.choose_methods(args, {}), 0, 0, 1, args)
        for args.reward in set(REWARDS) - {"accuracy", "judge"}:
            step()
        args.reward = "accuracy"
        with pytest.raises(AssertionError, match="a label was read"):
            step()


def test_a_file_without_any_3d_box_trains_bitwise_the_same_and_is_scored_for_consistency_only(base, tmp_path, quick):
    with_3d = write_photos(tmp_path / "with", train=4, test=0)
    without = write_photos(tmp_path / "without", train=4, test=3, boxes3d=False)
    a = trained(base, with_3d, tmp_path / "a", select="2d")
    b = trained(base, without, tmp_path / "b", select="2d", eval_size=3)
    assert same(a, b) and log_of(tmp_path / "a")[1]["ids"] == log_of(tmp_path / "b")[1]["ids"]
    for part in json.loads((tmp_path / "b" / "eval.json").read_text()).values():
        assert set(part["depth"]) == {"consistency", "unparsed", "blind_consistency"}
    assert "probe_consistency" in log_of(tmp_path / "b")[-1] and "probe_accuracy" not in log_of(tmp_path / "b")[-1]


def test_label_noise_flips_an_example_once_and_for_all_and_both_of_its_sides(photos):
    examples = load_examples(photos, "depth", "train")
    y = [Parsed(True, True, "ok"), Parsed(False, True, "ok")]
    for step in range(6):
        pair = draw_pair(examples, 0, step, 0, 1)
        clean, noisy, all_wrong = (make_reward("accuracy", label_noise=p, seed=0)(pair, y, y) for p in (0.0, 0.5, 1.0))
        assert (all_wrong.c == 1 - clean.c).all() and (all_wrong.c_prime == 1 - clean.c_prime).all()
        flipped = (noisy.c != clean.c).any()
        assert ((noisy.c_prime != clean.c_prime).any()) == flipped
        again = make_reward("accuracy", label_noise=0.5, seed=0)(draw_pair([pair.example], 1, 7, 1, 2), y, y)
        truth = make_reward("accuracy")(draw_pair([pair.example], 1, 7, 1, 2), y, y)
        assert ((again.c != truth.c).any()) == flipped


# --- the checks before the first step ---------------------------------------------------------------------------------
@fast
def test_overlong_prompts_are_refused_by_id_before_training_and_the_rest_run(vlm, base, photos, tmp_path, capsys):
    examples = load_examples(photos, "depth", "train")
    args = settings(base, photos, tmp_path, max_prompt_tokens=128)
    talkative = examples[2]
    names = [replace(o, name=" ".join(["very"] * 700)) for o in talkative.record.objects]
    record = replace(talkative.record, objects=tuple(names))
    examples[2] = replace(talkative, record=record, id="SUNRGBD:long")
    kept = train.refuse_long(vlm, examples, args)  # requirement 15
    assert kept == examples[:2] + examples[3:]
    assert re.fullmatch(r"left out: SUNRGBD:long may need \d{3,} prompt tokens, over --max-prompt-tokens 128\n", capsys.readouterr().out)
    args.max_prompt_tokens = 50
    with pytest.raises(DataError, match="every example needs more than --max-prompt-tokens 50: raise it"):
        train.refuse_long(vlm, examples, args)


@fast
@pytest.mark.parametrize("max_pixels, guided", [(112 * 112, False), (9 * 784, False), (112 * 112, True)])
def test_no_prompt_of_any_draw_is_longer_than_predicted_and_some_draw_is_as_long(vlm, base, photos, tmp_path, max_pixels, guided):
    args = settings(base, photos, tmp_path, max_pixels=max_pixels, **({"lenguard": "kl"} if guided else {}))
    vlm.image_processor.size = {"shortest_edge": 4 * 784, "longest_edge": max_pixels}
    for task in TASKS:
        (example,) = load_examples("synthetic", task, "train", limit=1)
        predicted = preflight.longest_prompt(vlm, example, args)
        pairs = [draw_pair([example], 0, step, 0, 1) for step in range(25)]
        make = lenguard.guided_prompt if guided else train.to_prompt
        lengths = [len(make(vlm, side, args.system_prompt_text).input_ids) for p in pairs for side in (p.x, p.x_prime)]
        assert predicted - 3 <= max(lengths) <= predicted


@fast
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_self_check_passes_a_sound_adapter_and_names_a_matrix_without_gradient(vlm, base, photos, tmp_path, checkpointing):
    add_lora(vlm, 4, 0)
    args = settings(base, photos, tmp_path)
    args.activation_checkpointing = checkpointing
    pair = draw_pair(load_examples(photos, "depth", "train"), 0, 0, 0, 1)
    before = {n: p.detach().clone() for n, p in trainable_parameters(vlm).items()}
    train.self_check(vlm, pair, args)
    assert same(before, trainable_parameters(vlm)) and all(p.grad is None for p in trainable_parameters(vlm).values())
    with torch.no_grad():
        next(p for n, p in trainable_parameters(vlm).items() if "layers.1.mlp.up_proj.lora_A" in n).zero_()
    with pytest.raises(ModelError, match="self-check: 1 LoRA matrices get no gradient .*layers.1.mlp.up_proj.lora_B"):
        train.self_check(vlm, pair, args)


@fast
def test_the_self_check_notices_a_pixel_limit_without_effect(vlm, base, photos, tmp_path):
    add_lora(vlm, 4, 0)
    args = settings(base, photos, tmp_path, max_pixels=4 * 784)  # but the processor goes on with its own 112 x 112
    with pytest.raises(ModelError, match="a picture became 16 tokens, expected 4: --max-pixels has no effect"):
        train.self_check(vlm, draw_pair(load_examples(photos, "depth", "train"), 0, 0, 0, 1), args)


def test_bad_pictures_are_named_and_left_out_before_training_and_one_that_breaks_later_ends_the_run(base, tmp_path, capsys, monkeypatch, quick):
    data = write_photos(tmp_path / "photos", train=5)
    files = sorted((tmp_path / "photos/pictures").iterdir())
    half = files[0].read_bytes()
    files[0].write_bytes(half[:len(half) // 2])
    files[1].unlink()
    trained(base, data, tmp_path / "run", steps=3)
    text = capsys.readouterr().out
    assert all(f"left out: {f}" in text for f in files[:2]) and "(3 training examples" in text
    used = {i.split(":")[1] for row in log_of(tmp_path / "run") for i in row["ids"]}
    assert used == {f.stem for f in files[2:]}

    def break_it(*_):
        files[2].write_bytes(b"<html>")
        return original(*_)

    original = train.self_check
    monkeypatch.setattr(train, "self_check", break_it)
    with pytest.raises(DataError, match=f"{files[2]} is not a picture"):
        train.main(flags(base, data, tmp_path / "second", steps=3))


# --- steps without signal, reproducibility ----------------------------------------------------------------------------
@fast
def test_a_cap_of_one_token_trains_nothing_stays_finite_and_warns_of_full_truncation(base, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "plot_curves", lambda *_: None)
    one = trained(base, photos, tmp_path / "one", max_new_tokens=1, steps=3)  # requirement 7
    text = capsys.readouterr().out
    assert text.count("warning: 100 % of the completions were cut off at 1 tokens") == 3
    assert all(w.isfinite().all() for w in one.values()) and not any(w.any() for n, w in one.items() if "lora_B" in n)
    for row in log_of(tmp_path / "one"):
        assert row["truncated"] == 1 and row["no_spread"] == 1 and row["loss"] == 0 and row["grad_norm"] == 0
        assert all(abs(v) < 1e9 for v in row.values() if isinstance(v, float))


def test_the_same_seed_gives_the_same_run_and_another_seed_another(base, photos, tmp_path, quick):
    first, again, other = (trained(base, photos, tmp_path / name, seed=seed, steps=3) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert same(first, again) and not same(first, other)
    a, b, c = (comparable(tmp_path / name) for name in "abc")
    assert a == b and a != c and [r["ids"] for r in a] != [r["ids"] for r in c]


@fast
def test_activation_checkpointing_changes_memory_and_not_the_adapter(base, photos, tmp_path, quick):
    plain = trained(base, photos, tmp_path / "plain", no_activation_checkpointing=True)
    again = trained(base, photos, tmp_path / "again", activation_checkpointing=True)
    assert furthest(plain, again) < 1e-5
    assert any(w.any() for n, w in plain.items() if "lora_B" in n)


# --- stopping and resuming --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("examples, where", [(6, "at an epoch's end"), (5, "in mid-epoch")])
def test_stopping_after_three_steps_and_resuming_is_bitwise_the_uninterrupted_run(base, tmp_path, quick, examples, where):
    data = write_photos(tmp_path / "photos", train=examples)  # 3 steps of 2 pairs
    whole = trained(base, data, tmp_path / "whole", steps=6)
    trained(base, data, tmp_path / "parts", steps=3)
    assert train.main(["--resume", str(tmp_path / "parts"), "--steps", "6"]) == 0
    assert same(whole, adapter_of(tmp_path / "parts")) and any(w.any() for n, w in whole.items() if "lora_B" in n)
    # the probe differs: the first part ended, and looked, at its third step
    assert [r["ids"] for r in log_of(tmp_path / "parts")] == [r["ids"] for r in log_of(tmp_path / "whole")]
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")


def test_ctrl_c_finishes_the_step_saves_and_the_resumed_run_is_the_uninterrupted_one(base, photos, tmp_path, capsys, monkeypatch, quick):
    options = dict(steps=4, eval_size=2, eval_every=10)
    whole = trained(base, photos, tmp_path / "whole", **options)
    original, handler = train.train_step, signal.getsignal(signal.SIGINT)

    def interrupted(*arguments):
        if arguments[4] == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(train, "train_step", interrupted)
    run = tmp_path / "stopped"
    assert train.main(flags(base, photos, run, **options)) == 1
    assert capsys.readouterr().out.endswith(f"stopped; go on with: python train.py --resume {run}\n")
    assert signal.getsignal(signal.SIGINT) is handler and not (run / "eval.json").exists()
    monkeypatch.setattr(train, "train_step", original)
    before = (run / "before.json").read_bytes()
    assert train.main(["--resume", str(run)]) == 0
    assert same(whole, adapter_of(run)) and comparable(run) == comparable(tmp_path / "whole")
    assert (run / "eval.json").read_text() == (tmp_path / "whole/eval.json").read_text() and (run / "before.json").read_bytes() == before


def test_ctrl_c_before_the_first_step_can_be_resumed_too(base, photos, tmp_path, capsys, monkeypatch, quick):
    whole = trained(base, photos, tmp_path / "whole", eval_size=2)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", interrupted)
        assert train.main(flags(base, photos, tmp_path / "run", eval_size=2)) == 1
    assert "go on with: python train.py --resume" in capsys.readouterr().out
    assert train.main(["--resume", str(tmp_path / "run")]) == 0
    assert same(whole, adapter_of(tmp_path / "run"))


def test_resuming_keeps_the_runs_settings_and_refuses_any_that_would_change_it(base, other_base, photos, tmp_path, quick, monkeypatch):
    run = str(tmp_path / "run")
    trained(base, photos, run, pairing="majority", steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(train, "load_vlm", lambda *_: pytest.fail("it should have been refused before the model is loaded"))
        for changed in (["--seed", "1"], ["--lr", "0.5"], ["--pairing", "minimal"], ["--task", "size"], ["--model", other_base],
                        ["--reward", "accuracy"], ["--group-size", "8"], ["--out", str(tmp_path / "elsewhere")]):
            with pytest.raises(DataError, match=f"--resume {run}: {changed[0]} .*differs from the run's own"):
                train.main(["--resume", run, *changed])
    assert train.main(["--resume", run, "--steps", "2", "--pairing", "majority", "--task", "depth", "--save-every", "9"]) == 0
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert (config["pairing"], config["steps"], config["seed"]) == ("majority", 2, 0) and len(log_of(run)) == 2
    with pytest.raises(DataError, match="newest checkpoint is of step 2, beyond --steps 1"):
        train.main(["--resume", run, "--steps", "1"])
    config["model"] = other_base  # as if the folder now held another checkpoint
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no longer the base it was begun with"):
        train.main(["--resume", run, "--steps", "3"])


def test_a_log_cut_off_in_the_middle_of_a_line_is_mended_on_resume(base, photos, tmp_path, quick):
    run = tmp_path / "run"
    trained(base, photos, run, steps=2, save_every=1)
    with open(run / "log.jsonl", "a") as file:
        file.write('{"step": 3, "reward": 1.2}\n{"step": 4, "rew')  # steps after the newest checkpoint, the last one torn
    assert train.main(["--resume", str(run), "--steps", "4"]) == 0
    assert [r["step"] for r in log_of(run)] == [1, 2, 3, 4] and all("ids" in r for r in log_of(run))
