"""Claims about the scripts as a user meets them: bad input is one line and exit code 2, good input runs, Ctrl-C saves."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from toy import ROOT, flags, log_of, shortcuts, write_photos

import ask
import command
import eval as evaluation
import model
import train
from data import TASKS

fast = pytest.mark.fast
MINI = Path(os.environ.get("OMNI3D_MINI", ROOT.parent / "shared" / "data" / "omni3d_mini"))
TINY = ROOT / "tiny"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def outcome(module, argv, capsys):
    """Exit code, stdout and stderr of a script's main, as its last line would give them."""
    capsys.readouterr()
    try:
        code = command.run(lambda: module.main([str(a) for a in argv]))
    except SystemExit as stop:  # argparse's way out
        code = stop.code
    return code, *capsys.readouterr()


def refused(module, argv, capsys, pattern):
    code, _, err = outcome(module, argv, capsys)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), (code, err)
    assert re.search(pattern, err), err


@pytest.fixture
def nothing_long(monkeypatch):
    """Loading a model, the first slow thing that a script does, fails the test."""
    for module in (train, model):
        monkeypatch.setattr(module, "load_vlm", lambda *_, **__: pytest.fail("refused too late: the model was being loaded"))


@pytest.fixture(scope="module")
def run(base, photos, tmp_path_factory):
    """A finished run with an adapter."""
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        shortcuts(patch)
        assert train.main(flags(base, photos, out)) == 0
    return out


# --- bad usage and bad input ------------------------------------------------------------------------------------------
@fast
@pytest.mark.parametrize("changed, pattern", [
    (dict(task=None), "--task is needed: one of orientation, depth"),
    (dict(task="colour"), "invalid choice: 'colour'"),
    (dict(reward="truth"), "invalid choice: 'truth'"),
    (dict(nonsense=1), "unrecognized arguments: --nonsense 1"),
    (dict(step=1), "unrecognized arguments: --step 1"),  # no abbreviations
    (dict(steps="many"), "--steps: invalid int value: 'many'"),
    (dict(steps=0), "--steps 0: must be at least 1"),
    (dict(group_size=1), r"--group-size 1: must be at least 2 \(a completion is compared"),
    (dict(eval_size=-1), "--eval-size -1: must be at least 0"),
    (dict(eval_every=0), "--eval-every 0: must be at least 1"),
    (dict(seed=-1), "--seed -1: must be at least 0"),
    (dict(max_pixels=100), "--max-pixels 100: must be at least 3136"),
    (dict(lr=0), "--lr and --temperature must be above 0"),
    (dict(lr="nan"), "--lr and --temperature must be above 0"),
    (dict(temperature=0), "--lr and --temperature must be above 0"),
    (dict(label_noise=0.3), "--label-noise .* needs --reward accuracy and a boolean task"),
    (dict(label_noise=0.3, reward="accuracy", task="counting"), "--label-noise .* needs --reward accuracy and a boolean task"),
    (dict(label_noise=2, reward="accuracy"), "--label-noise between 0 and 1"),
    (dict(system_prompt="nowhere.txt"), "--system-prompt nowhere.txt: No such file or directory; give a text file"),
    (dict(system_prompt=sys.executable), "not UTF-8 text; give a text file"),
    (dict(data="nowhere"), "nowhere: no images of SUNRGBD or own in annotations"),
    (dict(resume="nowhere"), "--resume nowhere: no config.json of a run there; give the folder that train.py printed"),
])
def test_bad_usage_of_train_is_one_line_before_any_long_work(base, photos, tmp_path, capsys, nothing_long, changed, pattern):
    refused(train, flags(base, photos, tmp_path / "out", **changed), capsys, pattern)
    assert not (tmp_path / "out").exists()


@fast
def test_bad_data_and_folders_are_one_line_before_any_long_work(base, photos, run, tmp_path, capsys, nothing_long):
    out = tmp_path / "out"
    one = write_photos(tmp_path / "one", train=2)
    file = Path(one) / "annotations/SUNRGBD_toy.json"
    content = json.loads(file.read_text())
    content["annotations"] = content["annotations"][:1]
    file.write_text(json.dumps(content))
    refused(train, flags(base, one, out), capsys, "no example of task depth in the train split .*data.py --check")
    refused(train, flags(base, photos, run), capsys, f"--out {run} exists and is not empty; go on with it by --resume {run}")
    only_train = write_photos(tmp_path / "train", train=2)
    refused(train, flags(base, only_train, out, eval_size=2), capsys, "in the test split.*; or train without evaluation: --eval-size 0")
    for picture in (Path(only_train) / "pictures").iterdir():
        picture.write_bytes(picture.read_bytes()[:100])
    refused(train, flags(base, only_train, out), capsys, "no example of task depth")
    flat = write_photos(tmp_path / "flat", train=2, boxes3d=False)
    refused(train, flags(base, flat, out, select="2d", reward="accuracy"), capsys, "--reward accuracy: .* has no 3D box, so there is no label")
    content["annotations"][0]["valid3D"] = "maybe"
    file.write_text(json.dumps(content))
    refused(train, flags(base, one, out), capsys, "row .*: valid3D is 'maybe'; it must be true or false")
    file.write_text("{")
    refused(train, flags(base, one, out), capsys, "cannot be read as JSON")
    for text in ("{", "[]", "{}", '{"task": "depth"}'):
        (tmp_path / "config.json").write_text(text)
        refused(train, ["--resume", tmp_path], capsys, str(tmp_path))
    assert not out.exists()


@fast
def test_asking_for_the_papers_recipe_without_its_data_says_where_to_put_it(tmp_path, capsys, monkeypatch, nothing_long):
    monkeypatch.chdir(tmp_path)
    refused(train, ["--task", "depth", "--preset", "paper"], capsys, "needs a CUDA device, and there is none: add --dry-run .* or give --preset tiny")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(train, "setup", lambda: (0, 1, "cuda"))
    refused(train, ["--task", "depth", "--preset", "paper"], capsys, "data/omni3d: no images of SUNRGBD or own in .*; put annotation files there")


@fast
def test_a_model_that_is_not_there_is_one_line(photos, tmp_path, capsys):
    refused(train, flags("nowhere", photos, tmp_path / "out"), capsys, "--model nowhere: no config.json there; give a checkpoint folder")
    assert not (tmp_path / "out").exists()


@fast
@pytest.mark.parametrize("argv, pattern", [
    (["--tasks", "colour"], "invalid choice: 'colour'"),
    (["--split", "half"], "invalid choice: 'half'"),
    (["--task", "depth"], "unrecognized arguments: --task depth"),
    (["--n", "0"], "--n 0: must be at least 1"),
    (["--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1"),
    (["--out", "nowhere/scores.json"], "--out nowhere/scores.json: there is no folder nowhere; make it first"),
    (["--data", "nowhere"], "nowhere: no images of SUNRGBD or KITTI or own"),
])
def test_bad_usage_of_eval_is_one_line_before_any_long_work(capsys, nothing_long, argv, pattern):
    refused(evaluation, argv, capsys, pattern)


@fast
def test_adapters_that_do_not_fit_are_one_line(base, other_base, run, photos, tmp_path, capsys):
    argv = ["--data", photos, "--tasks", "depth", "--n", "2", "--adapter"]
    refused(evaluation, [*argv, tmp_path], capsys, "no adapter here .*; give the run folder that train.py printed")
    refused(evaluation, [*argv, run, "--model", other_base], capsys, f"another base than {other_base}: it was trained on {base}")
    refused(evaluation, [*argv, run, "--system-prompt", "nowhere"], capsys, "--system-prompt nowhere: No such file")
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (keys / name).write_bytes((run / name).read_bytes())
    config = json.loads((keys / "adapter_config.json").read_text())
    (keys / "adapter_config.json").write_text(json.dumps({**config, "target_modules": config["target_modules"].replace("q_proj|", "")}))
    refused(evaluation, [*argv, keys], capsys, "adapter weights do not match")


@fast
@pytest.mark.parametrize("argv, pattern", [
    (["--box", "1,2,30,40"], "--task depth needs 2 --box, got 1"),
    (["--box", "1,2,30,40", "--box", "1,2,30"], "--box 1,2,30: give four numbers"),
    (["--box", "1,2,30,40", "--box", "a,b,c,d"], "--box a,b,c,d: give four numbers"),
    (["--box", "1,2,30,40", "--box", "50,2,30,40"], "--box 50,2,30,40: needs 0 <= x0 < x1"),
    (["--box", "1,2,30,40", "--box", "1,2,nan,40"], "--box 1,2,nan,40: needs 0 <= x0 < x1"),
    (["--box", "1,2,30,40", "--box", "1,2,900,40"], "--box 1,2,900,40: leaves the picture, which is 112x112 pixels"),
    (["--box", "1,2,30,40", "--box", "5,2,30,40", "--name", "chair"], "--task depth needs 2 --name"),
    (["--box", "1,2,30,40", "--box", "5,2,30,40", "--template", "7"], "invalid choice: 7"),
    (["--task", "distance", "--box", "1,2,30,40"], "--task distance needs 3 --box, got 1"),
    (["--task", "counting"], "--task counting needs 1 --name"),
])
def test_bad_usage_of_ask_is_one_line_before_any_long_work(photos, capsys, nothing_long, argv, pattern):
    picture = next((Path(photos) / "pictures").iterdir())
    refused(ask, [picture, *(() if "--task" in argv else ("--task", "depth")), *argv], capsys, pattern)


@fast
def test_a_picture_that_cannot_be_read_is_one_line(tmp_path, capsys, nothing_long):
    (tmp_path / "page.jpg").write_text("<html>")
    Image.new("RGB", (20, 20)).save(tmp_path / "small.png")
    boxes = ["--task", "depth", "--box", "1,2,3,4", "--box", "2,2,3,4"]
    for name, pattern in (("none.jpg", "is missing"), ("page.jpg", "is not a picture"), ("small.png", "is too small")):
        refused(ask, [tmp_path / name, *boxes], capsys, pattern)


# --- good input -------------------------------------------------------------------------------------------------------
@fast
def test_ask_shows_question_and_answers_of_base_and_adapter(base, run, photos, capsys):
    picture = next((Path(photos) / "pictures").iterdir())
    boxes = ["--box", "10,20,40,60", "--box", "50,20,90,70"]
    code, out, err = outcome(ask, [picture, "--task", "depth", *boxes, "--name", "chair", "--name", "lamp", "--relation", "1", "--adapter", run], capsys)
    lines = out.splitlines()
    assert code == 0 and not err
    assert lines[0] == '- object 1 = "chair", highlighted by a red box.' and "Is object 1 further from the camera than object 2?" in lines
    assert any(line.startswith("base: ") for line in lines) and any(line.startswith("adapter: ") for line in lines)
    assert sum(line.startswith("  -> ") for line in lines) == 2
    code, out, _ = outcome(ask, [picture, "--task", "depth", *boxes, "--model", base, "--max-new-tokens", "4"], capsys)
    assert code == 0 and out.startswith("- object 1, highlighted by a red box.\n") and "adapter:" not in out
    assert outcome(ask, [picture, "--task", "counting", "--name", "box", "--model", base, "--max-new-tokens", "4"], capsys)[1].startswith(
        "How many boxes are visible in the image?\n")


SCRIPTS = """
import contextlib, io, json, runpy, sys
results = []
for script, *argv in json.loads(sys.argv[1]):
    sys.argv = [script, *argv]
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            code = stop.code
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def test_every_script_has_help_refuses_unknown_flags_and_runs_without_noise(base, photos, tmp_path):
    run, scores = str(tmp_path / "run"), str(tmp_path / "scores.json")
    picture = str(next((Path(photos) / "pictures").iterdir()))
    calls = [[script, "--help"] for script in ("train.py", "eval.py", "ask.py", "data.py", "pretrain.py")]
    calls += [["train.py", "--task", "depth", "--stpes", "3"], ["eval.py", "--bogus"], ["ask.py", picture, "--task", "depth", "--bogus"]]
    calls += [["train.py", *flags(base, photos, run, steps=1, eval_size=2)],
              ["eval.py", "--adapter", run, "--data", photos, "--tasks", "depth", "--out", scores],
              ["ask.py", picture, "--task", "depth", "--box", "1,2,30,40", "--box", "50,2,90,40", "--adapter", run]]
    done = subprocess.run([sys.executable, "-c", SCRIPTS, json.dumps(calls)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    for (code, out, err), call in zip(results[:5], calls):
        assert code == 0 and out.startswith(f"usage: {call[0]}") and not err
    for code, out, err in results[5:8]:
        assert code == 2 and re.fullmatch(r"error: unrecognized arguments: --(stpes 3|bogus) \(see .*--help\)\n", err) and not out
    bars = re.compile(r"(training|before training|after training|probe|SUNRGBD depth): ")
    for (code, out, err), call in zip(results[8:], calls[8:]):
        assert code == 0, (call, err)
        lines = [line.replace("\x1b[A", "").strip() for line in re.split(r"[\r\n]+", err)]
        assert all(bars.match(line) for line in lines if line), err  # nothing but progress bars
    assert json.loads(Path(scores).read_text())["sources"]["SUNRGBD"]["summary"]["depth"]["greedy_accuracy"]["n"] == 4


def test_ctrl_c_saves_says_how_to_resume_and_exits_1(base, photos, tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "train.py", *flags(base, photos, run, steps=100000)], cwd=ROOT, env=ENVIRONMENT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.time() + 240
        while time.time() < deadline and not ((run / "log.jsonl").is_file() and log_of(run)):
            assert process.poll() is None, process.communicate()
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    done = len(log_of(run))
    assert process.returncode == 1 and "Traceback" not in err
    assert out.endswith(f"stopped; go on with: python train.py --resume {run}\n")
    assert [f.name for f in (run / "checkpoints").iterdir()] == [f"step-{done:05d}"]


# --- real photos and the embedded model -------------------------------------------------------------------------------
@pytest.mark.skipif(not (MINI / "annotations").is_dir(), reason=f"no real photos in {MINI} (OMNI3D_MINI)")
def test_training_and_evaluation_run_on_real_photos_of_both_sources(base, tmp_path, capsys, quick):
    run = tmp_path / "run"
    code, out, err = outcome(train, flags(base, MINI, run, task="orientation", max_pixels=36 * 784, pairs_per_device=1), capsys)
    assert code == 0, err
    assert len(log_of(run)) == 2 and all(i.startswith("SUNRGBD") for row in log_of(run) for i in row["ids"])  # KITTI is never trained on
    code, out, err = outcome(evaluation, ["--adapter", run, "--data", MINI, "--split", "all", "--tasks", *TASKS, "--n", "2",
                                          "--diagnostics", "blind"], capsys)
    assert code == 0, err
    rows = {tuple(line.split()[:3]) for line in out.splitlines()}
    assert {("SUNRGBD", "orientation", "greedy_accuracy"), ("KITTI", "depth", "blind_consistency"),
            ("KITTI", "abs_distance", "best_constant")} <= rows


@pytest.mark.skipif(not (TINY / "model.safetensors").is_file(), reason="the embedded model tiny/ is not there yet")
def test_the_embedded_model_is_the_default_and_answers_in_format(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # found beside the scripts, not in the working directory
    code, out, err = outcome(evaluation, ["--tasks", "depth", "--n", "16", "--diagnostics"], capsys)
    assert code == 0 and out.startswith("tiny on synthetic (test)"), err
    unparsed = next(line for line in out.splitlines() if "unparsed" in line)
    assert float(unparsed.split()[2]) < 20
