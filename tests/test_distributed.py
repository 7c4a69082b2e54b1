"""Claims about several processes (gloo, CPU): the same run however many ranks share it, and a failure ends it quickly."""
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.run import get_args_parser
from toy import ROOT, flags, log_of, shortcuts, write_photos

import eval as evaluation
import ranks
import train
from dataset import draw_uniforms, load_examples
from grpo import rollout
from images import DataError
from model import make_prompt

fast = pytest.mark.fast
TESTS = Path(__file__).resolve().parent

# What torchrun starts: runs of train.py one after the other in one process group, with a parser that reads an answer out
# of anything. Every rank notes its weights after every step, so that they can be compared.
DRIVER = """
import hashlib, json, os, sys, time
sys.path[:0] = sys.argv[1:3]
import torch
import eval as evaluation, toy, train
from model import trainable_parameters
from verifiers import Parsed

group, leave = train.setup(), torch.distributed.destroy_process_group
train.setup, torch.distributed.destroy_process_group = lambda: group, lambda: None
train.plot_curves = train.plot_pairs = lambda *_: None
rank, original = int(os.environ["RANK"]), train.train_step

def noted_step(vlm, *arguments):
    result = original(vlm, *arguments)
    weights = b"".join(p.detach().numpy().tobytes() for p in trainable_parameters(vlm).values())
    with open(arguments[-1].out + f".rank{rank}", "a") as file:
        file.write(hashlib.sha256(weights).hexdigest() + "\\n")
    return result

def planted_step(vlm, optimiser, examples, methods, step, *rest):
    if rank == 1 and step == 1:
        os.write(2, f"planted at {time.time()}\\n".encode())      # in one piece: the other rank writes there too
        raise RuntimeError("a bug of rank 1")
    return noted_step(vlm, optimiser, examples, methods, step, *rest)

for mode, argv in json.loads(sys.argv[3]):
    train.train_step = planted_step if mode == "failing" else noted_step
    train.parse = evaluation.parse = (lambda text, kind: Parsed(True, True, "ok")) if mode == "silent" and rank == 1 else toy.parity
    code = train.main(argv)
    assert code == 0, code
leave()
"""


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def torchrun(tmp_path, calls, *options):
    """The process of `torchrun OPTIONS driver.py`."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    return launched(tmp_path, *options, str(driver), str(ROOT), str(TESTS), json.dumps(calls))


def launched(tmp_path, *arguments):
    """The process of `torchrun ARGUMENTS`."""
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *arguments], cwd=tmp_path,
                            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process, timeout=600):
    """What it printed, once it has ended. The agent is asked to end its workers where it does not."""
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        process.terminate()
        process.wait(60)


def finished(process):
    out = output_of(process)
    assert process.returncode == 0, out[-6000:]
    return out


def adapter_of(run):
    return load_file(Path(run) / "adapter_model.safetensors")


def furthest(a, b):
    """The largest difference of a weight of B, relative to the largest such weight (A starts alike and hides it)."""
    a, b = ({n: w for n, w in x.items() if "lora_B" in n} for x in (a, b))
    largest = max(w.abs().max() for w in a.values())
    assert a.keys() == b.keys() and largest > 0
    return max((a[n] - b[n]).abs().max() for n in a) / largest


def weights_of_ranks(run, world_size):
    return [Path(f"{run}.rank{r}").read_text().split() for r in range(world_size)]


OPTIONS = dict(steps=2, eval_size=4, eval_every=2)


@pytest.fixture(scope="module")
def alone(base, photos, tmp_path_factory):
    """One rank with four pairs a step."""
    run = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        shortcuts(patch)
        assert train.main(flags(base, photos, run, pairs_per_device=4, **OPTIONS)) == 0
        longer = shutil.copytree(run, run.parent / "longer")
        assert train.main(["--resume", str(longer), "--steps", "3"]) == 0
    return run


def assert_same_run(run, alone, tolerance=1e-4):
    assert [r["ids"] for r in log_of(run)] == [r["ids"] for r in log_of(alone)]
    for row, expected in zip(log_of(run), log_of(alone)):
        for name in {"reward", "consistency", "no_spread", "length", "grad_norm", "entropy", "completion_tokens", "probe_accuracy"} & expected.keys():
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert furthest(adapter_of(run), adapter_of(alone)) < tolerance


def test_two_ranks_with_two_pairs_are_one_rank_with_four(alone, base, photos, tmp_path):
    six, broken = write_photos(tmp_path / "six", train=6), tmp_path / "six/pictures"
    next(broken.iterdir()).write_bytes(b"")
    resumed = shutil.copytree(alone, tmp_path / "resumed")
    runs = {name: str(tmp_path / name) for name in ("two", "again", "five", "silent")}
    calls = [("plain", flags(base, photos, runs["two"], **OPTIONS)), ("plain", flags(base, photos, runs["again"], **OPTIONS)),
             ("plain", flags(base, six, runs["five"], steps=3)), ("silent", flags(base, photos, runs["silent"])),
             ("plain", ["--resume", str(resumed), "--steps", "3"])]
    out = finished(torchrun(tmp_path, calls, "--standalone", "--nproc_per_node", "2"))
    assert out.count("batch: 2 ranks x 2 pairs x 2 prompts x 4 completions = 32 answers per step") == 5  # only rank 0 prints

    assert_same_run(runs["two"], alone)
    assert (tmp_path / "two/eval.json").read_text() == (alone / "eval.json").read_text()
    assert len(set(log_of(runs["two"])[0]["ids"])) == 4  # requirement 9: different data on different ranks, within an epoch
    a, b = adapter_of(runs["two"]), adapter_of(runs["again"])
    assert all(torch.equal(a[n], b[n]) for n in a)

    # requirements 18 and 23: one file of six is broken, five pairs on two ranks of two
    assert out.count("is an empty file") == 1 and "(5 training examples" in out
    assert len(log_of(runs["five"])) == 3 and len({i for r in log_of(runs["five"]) for i in r["ids"]}) == 5
    # requirement 24: rank 1 has no group with spread and takes part all the same
    assert all(row["no_spread"] >= 0.5 and row["grad_norm"] > 0 for row in log_of(runs["silent"]))
    for run in (*runs.values(), str(resumed)):
        first, second = weights_of_ranks(run, 2)
        assert first == second and len(first) == len(set(first))
    # a run begun by one process, continued by two
    assert_same_run(resumed, alone.parent / "longer")
    assert json.loads((resumed / "config.json").read_text())["world_size"] == 2


def test_four_ranks_with_one_pair_each_are_one_rank_with_four_for_groups_of_four_and_run_with_eight(alone, base, photos, tmp_path):
    runs = [str(tmp_path / name) for name in ("four", "eight")]
    calls = [("plain", flags(base, photos, runs[0], pairs_per_device=1, **OPTIONS)),
             ("silent", flags(base, photos, runs[1], pairs_per_device=1, group_size=8, steps=1))]
    finished(torchrun(tmp_path, calls, "--standalone", "--nproc_per_node", "4"))
    assert_same_run(runs[0], alone)
    for run in runs:
        assert len({tuple(weights) for weights in weights_of_ranks(run, 4)}) == 1


def test_two_agents_on_one_machine_meet_and_run_the_same_training(alone, base, photos, tmp_path):
    run, port = str(tmp_path / "run"), free_port()
    options = ("--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}",
               "--rdzv_id", "test")
    agents = [torchrun(tmp_path, [("plain", flags(base, photos, run, **OPTIONS))], *options) for _ in range(2)]
    out = "".join(map(finished, agents))
    assert out.count("batch: 2 ranks x 2 pairs") == 1
    assert_same_run(run, alone)


def test_an_exception_on_one_rank_ends_the_job_within_a_minute_and_shows_its_traceback(base, photos, tmp_path):
    run = str(tmp_path / "run")
    process = torchrun(tmp_path, [("failing", flags(base, photos, run, steps=1000))], "--standalone", "--nproc_per_node", "2")
    out = output_of(process)
    assert process.returncode != 0
    assert "RuntimeError: a bug of rank 1" in out and "in planted_step" in out
    planted = float(out.split("planted at ")[1].split()[0])
    assert time.time() - planted < 60  # requirement 23
    assert len(log_of(run)) <= 2


# --- in one process ---------------------------------------------------------------------------------------------------
def test_an_evaluation_shared_by_two_ranks_is_that_of_one_and_is_written_and_printed_once(tmp_path, capsys):
    asked = ["--tasks", "depth", "--n", "40", "--max-new-tokens", "24", "--diagnostics"]  # 40: more than one rank's batch of 32
    out = finished(launched(tmp_path, "--standalone", "--nproc_per_node", "2", "--", str(ROOT / "eval.py"), *asked,
                            "--out", str(tmp_path / "two.json")))
    assert evaluation.main([*asked, "--out", str(tmp_path / "one.json")]) == 0
    one, two = (json.loads((tmp_path / f"{name}.json").read_text())["sources"] for name in ("one", "two"))
    assert one == two and out.count("greedy_accuracy") == 1
    assert [line for line in capsys.readouterr().out.splitlines() if "_accuracy" in line] == [
        line for line in out.splitlines() if "_accuracy" in line]


@fast
def test_torchrun_takes_no_flag_of_training_for_its_own(capsys):
    own = [option for action in get_args_parser()._actions for option in action.option_strings]
    with pytest.raises(SystemExit):
        train.main(["--help"])
    for flag in set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}:
        assert not [option for option in own if option.startswith(flag)], flag


@fast
def test_without_torchrun_there_is_one_rank_and_the_calls_between_ranks_are_identities(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ranks.setup() == (0, 1, cpu)
    assert ranks.mean_over_ranks({"a": 1.5, "b": 2}, 1, cpu) == {"a": 1.5, "b": 2.0}
    assert ranks.gather("x", 1) == ["x"] and ranks.agree_on("x", 1) == "x"


@fast
def test_more_processes_than_gpus_are_refused_with_the_mend(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in dict(RANK="3", LOCAL_RANK="3", WORLD_SIZE="4", LOCAL_WORLD_SIZE="4").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match="4 processes but 2 GPUs here: give torchrun --nproc_per_node 2"):
        ranks.setup()


@fast
def test_each_rank_gets_its_own_gpu_and_speaks_nccl(monkeypatch):
    used = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.update(device=device))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: used.update(backend=backend))
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # restored afterwards: rank 1 is silenced
    for name, value in dict(RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2").items():
        monkeypatch.setenv(name, value)
    assert ranks.setup() == (3, 4, torch.device("cuda", 1))
    assert used == {"device": torch.device("cuda", 1), "backend": "nccl"}


@fast
def test_a_resumed_run_keeps_its_pairs_per_step_and_names_the_numbers_of_processes_that_fit():
    args = Namespace(resume="run", pairs_per_step=4, pairs_per_device=4)
    train.share_pairs(args, 2)
    assert (args.pairs_per_device, args.pairs_per_step) == (2, 4)
    with pytest.raises(DataError, match="4 pairs a step cannot be shared by 3 processes; use 1, 2, 4"):
        train.share_pairs(args, 3)


@fast
def test_one_prompt_forced_on_two_ranks_gets_different_completions_reproducibly(vlm, photos):
    picture = load_examples(photos, "depth", "train")[0].record.load()
    prompt = make_prompt(vlm, "Answer.", "Is object 1 closer?", picture)
    completions = lambda index: rollout(vlm, [prompt], draw_uniforms(0, 3, index, 4, 8)[:1], 1.0).tokens
    assert torch.equal(completions(0), completions(0)) and not torch.equal(completions(0), completions(2))  # requirement 9
