"""What computing each prompt once saves: seconds and memory of a training step, against repeated prompts and TRL.

GRPO draws K completions of one prompt. The usual form repeats the prompt, picture included, K times, in the rollout and
again in the update: K (P + C) tokens a prompt, where sampling.py and grpo.py compute P + K C. Here the two
(benchmark_steps.py) and TRL's GRPOTrainer (benchmark_trl.py, where it can be imported) do one and the same step in turns,
in one process on one thread. The model is the embedded architecture, widened, with random weights: what is measured is
work, not learning.

Seconds are the processor's on a CPU, so that other programs do not count, and wall time on a GPU and between ranks.
Ratios are medians of ratios within a round. Memory is the most bytes of tensors alive at a time during the update,
beyond those before it, from torch's own allocation records (CUDA: its counter): unlike the size of the process it does
not depend on what the C library gives back, and it repeats exactly.

    OMP_NUM_THREADS=1 python benchmark.py                     # everything below; keeps results/benchmark.{txt,json}
    OMP_NUM_THREADS=1 python benchmark.py --parts short        # one shape alone
    python benchmark.py --real-size 3B                        # needs a CUDA GPU: Qwen2.5-VL-3B's shape, random weights

Letters: B prompts, K completions per prompt, P prompt tokens, C completion tokens.
"""
from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from timeit import repeat

import numpy as np
import torch
import transformers
from scipy.optimize import linear_sum_assignment

from benchmark_steps import FORMS, Shape, Stepper, pair_advantages, random_vlm
from command import Parser, run
from grpo import completion_logprobs
from images import DataError
from pairing import pair_rewards, verifier_matrix
from ranks import setup

LONG, SHORT = Shape(293, 64), Shape(66, 24, pixels=168)
SHAPES = {"long": LONG, "short": SHORT}
BASE = replace(SHORT, B=2)                                                   # of the sweeps
SWEEPS = {"K": [replace(BASE, K=K) for K in (2, 4, 8, 16, 32)],
          "P": [replace(BASE, P=P, pixels=side) for P, side in ((66, 168), (133, 280), (293, 448), (549, 616))],
          "C": [replace(BASE, C=C) for C in (8, 24, 72, 216)]}
GROUP_SIZES = (2, 4, 8, 16, 32, 64)
ONE_PROMPT = dict(tokens_per_microbatch=1)           # fewer than any prompt has, so that each is a micro-batch of its own
REAL = Shape(P=640, C=256, pixels=616)               # 484 image tokens, near the limit of 512 in training
NO_TRL = ("TRL was not measured: {}. It needs an environment of its own; benchmark_trl.py says which, and\n"
          "`TRL-ENV/bin/python benchmark.py --parts long short` measures it.")


# -------------------------------------------------------------------------------------------------------- measurements
def measure_shape(shape: Shape, rounds: int, trl: bool) -> dict:
    """Rows of seconds and the peak memory of each contestant; the first turn of each warms up and is not counted."""
    steppers = {form: Stepper(form, shape) for form in FORMS} | {"ours, prompt by prompt": Stepper("ours", shape, **ONE_PROMPT)}
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)

    def turn(number: int) -> None:
        for name, stepper in steppers.items():
            rows[name].append(stepper.step(number))

    if trl:
        from benchmark_trl import run_trl
        rows["TRL"], trl_memory = run_trl(shape, rounds + 1, turn)
    else:
        for number in range(rounds + 1):
            turn(number)
    memory = {name: stepper.update_memory() for name, stepper in steppers.items()} | ({"TRL": trl_memory} if trl else {})
    return {"shape": asdict(shape), "contestants": {name: {"rows": rows[name][1:], "memory": memory[name]} for name in rows}}


def measure_sweeps(rounds: int) -> dict:
    """Ours against the repeated form, one of K, P, C at a time."""
    return {letter: [measure_sweep_point(shape, rounds) for shape in shapes] for letter, shapes in SWEEPS.items()}


def measure_sweep_point(shape: Shape, rounds: int) -> dict:
    steppers = {form: Stepper(form, shape) for form in FORMS}
    rows = {form: [] for form in FORMS}
    for number in range(rounds):
        for form, stepper in steppers.items():
            rows[form].append(stepper.step(number))
    best = {form: {part: min(r[part] for r in rows[form]) for part in ("step", "rollout", "update")} for form in FORMS}
    return {"shape": asdict(shape), "best": best}


def measure_pairing(rounds: int) -> list[dict]:
    """Microseconds to pair K random boolean answers with K: solvers on a matrix that is there already, ours from answers."""
    try:
        from ot import emd
    except ImportError:
        emd = None
    coins, found = random.Random(0), []
    for K in GROUP_SIZES:
        y, y_prime = ([coins.random() < 0.5 for _ in range(K)] for _ in range(2))
        V, even = verifier_matrix(y, y_prime, False), np.full(K, 1 / K)                           # (K, K), (K,)
        jobs = {"matrix": lambda: verifier_matrix(y, y_prime, False), "scipy": lambda: linear_sum_assignment(V),
                "ours": lambda: pair_rewards(y, y_prime, False), "ours, with advantages": lambda: pair_advantages(y, y_prime)}
        jobs |= {"POT": lambda: emd(even, even, V)} if emd else {}
        found.append({"K": K} | {name: 1e4 * min(repeat(job, timer=time.process_time, number=100, repeat=rounds))
                                 for name, job in jobs.items()})                                  # microseconds a call
    return found


def measure_ranks(rounds: int) -> list[dict]:
    """Strong scaling: the same 8 prompts on one process and shared by two (gloo, one thread each). Wall time."""
    found = []
    for n in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n), __file__]
        done = subprocess.run([*command, "--as-rank", "--rounds", str(rounds)], capture_output=True, text=True,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise RuntimeError(done.stderr)
        found.append({"ranks": n, "seconds": json.loads(done.stdout.splitlines()[-1])})
    return found


def as_rank(rounds: int) -> None:
    """One of the processes of `measure_ranks`: its share of the prompts; a step ends when the slowest rank's has."""
    _, world_size, _ = setup()
    torch.set_num_threads(1)
    stepper, walls = Stepper("ours", replace(LONG, B=LONG.B // world_size), world_size=world_size), []
    for number in range(rounds + 1):
        torch.distributed.barrier() if world_size > 1 else None
        began = time.perf_counter()
        stepper.step(number)
        torch.distributed.barrier() if world_size > 1 else None
        walls.append(time.perf_counter() - began)
    print(json.dumps(walls[1:]))
    if world_size > 1:
        torch.distributed.destroy_process_group()


def real_size(config, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16, steps: int = 3) -> dict:
    """Training steps of a model of any size: seconds, memory, and how far the update's log-probabilities are from the
    rollout's. They are the same in exact arithmetic; bf16 rounds a token at a time and a row at once differently."""
    stepper = Stepper("ours", shape, random_vlm(config, device, dtype), activation_checkpointing=True)
    rows = []
    for number in range(steps):
        rows.append(stepper.step(number) | {"ratio_deviation": stepper.stats["ratio_deviation"]})
        print(f"  step {number + 1}: " + ", ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    gap = logprob_gap(stepper)                                                                    # (B*K*C,)
    return {"shape": asdict(shape), "rows": rows, "gap_mean": gap.mean().item(), "gap_max": gap.max().item(),
            "rollout_share": sum(r["rollout"] for r in rows) / sum(r["step"] for r in rows),
            "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None}


@torch.no_grad()
def logprob_gap(stepper: Stepper) -> torch.Tensor:
    """|log pi of a rollout - log pi of the update's forward pass| of every token, prompt by prompt: (B*K*C,)."""
    prompts = stepper.prompts()
    c, gaps = stepper.sample(stepper.vlm, prompts, stepper.shape, seed=99), []
    for b in range(len(prompts)):
        one = slice(b, b + 1)
        logp = completion_logprobs(stepper.vlm, prompts[one], c.features[one], c.tokens[one], c.mask[one], 1.0)  # (1, K, C)
        gaps.append((logp - c.logp[one]).abs().flatten())                                         # (K*C,)
    return torch.cat(gaps)


# -------------------------------------------------------------------------------------------------------------- report
def table(found: dict) -> list[str]:
    """One shape: seconds, memory, and ours as a share of each of the others."""
    shape, contestants = Shape(**found["shape"]), found["contestants"]
    ours, lines = contestants["ours"], [f"{shape}; tokens {shape.tokens('repeated'):,} against {shape.tokens('ours'):,}: "
                                        f"ratio {shape.token_ratio:.2f}"]
    lines.append(f"{'':<24}{'step':>8}{'rollout':>9}{'update':>8} s  {'update MB':>9}   ours / it: {'step':>6}{'rollout':>9}"
                 f"{'update':>8}{'memory':>8}{'prompt by prompt':>18}")
    for name, c in contestants.items():
        ratios = [median(a[part] / b[part] for a, b in zip(ours["rows"], c["rows"])) for part in ("step", "rollout", "update")]
        least = contestants["ours, prompt by prompt"]["memory"]
        lines.append(f"{name:<24}" + "".join(f"{median(r[part] for r in c['rows']):>{w}.2f}"
                     for part, w in (("step", 8), ("rollout", 9), ("update", 8))) + f"    {c['memory'] / 1e6:>9.1f}"
                     + f"              {ratios[0]:>6.3f}{ratios[1]:>9.3f}{ratios[2]:>8.3f}{ours['memory'] / c['memory']:>8.3f}"
                     f"{least / c['memory']:>18.3f}")
    saving = median(b["update"] / a["update"] for a, b in zip(ours["rows"], contestants["repeated"]["rows"]))
    lines.append(f"update: {saving:.2f} times faster than repeated, {saving / shape.token_ratio:.2f} of the token ratio; "
                 f"rewards and pairing {100 * median(r['reward'] / r['step'] for r in ours['rows']):.2f} % of a step, decoding "
                 f"and parsing included; {len(ours['rows'])} rounds")
    return lines


def report(results: dict) -> str:
    """All that has been measured so far, as text."""
    lines = []
    for name in SHAPES:
        lines += [*table(results[name]), ""] if name in results else []
    for letter, points in results.get("sweeps", {}).items():
        lines.append(f"sweep of {letter}, 2 prompts: token ratio, and how many times faster than repeated")
        for p in points:
            shape, ours, repeated = Shape(**p["shape"]), p["best"]["ours"], p["best"]["repeated"]
            faster = "".join(f"   {part} {repeated[part] / ours[part]:5.2f}" for part in ("step", "rollout", "update"))
            lines.append(f"  {letter} = {getattr(shape, letter):<4} tokens {shape.token_ratio:5.2f}{faster}")
        lines.append("")
    if "pairing" in results:
        lines.append("pairing K boolean answers with K, microseconds; the solvers start from the verifier matrix")
        lines += ["  " + "   ".join(f"{name} {value:{'.0f' if name == 'K' else '.1f'}}" for name, value in row.items())
                  for row in results["pairing"]] + [pairing_share(results), ""]
    if "ranks" in results:
        one, two = (median(r["seconds"]) for r in results["ranks"])
        lines += [f"strong scaling, {LONG}: one process {one:.2f} s a step, two processes {two:.2f} s: {one / two:.2f} times "
                  "faster", ""]
    return "\n".join([*lines, f"{results['machine']}", ""])


def pairing_share(results: dict) -> str:
    """Pairing and advantages of all pairs as a share of the shorter step."""
    us = next(row["ours, with advantages"] for row in results["pairing"] if row["K"] == SHORT.K)
    if "short" not in results:
        return ""
    step = median(r["step"] for r in results["short"]["contestants"]["ours"]["rows"])
    return (f"  {SHORT.B // 2} pairs with their advantages at K = {SHORT.K}: {us * SHORT.B / 2:.0f} us, "
            f"{100 * us * 1e-6 * SHORT.B / 2 / step:.3f} % of a step of P = {SHORT.P}, C = {SHORT.C}")


def draw(results: dict, file: Path) -> None:
    """The idea (what is computed in both forms) beside what it saves."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), width_ratios=(1.25, 1, 1), constrained_layout=True)
    draw_idea(left)
    points = results["sweeps"]["P"]
    P = [p["shape"]["P"] for p in points]
    middle.plot(P, [Shape(**p["shape"]).token_ratio for p in points], "k--", label="token ratio K (P+C) / (P+K C)")
    for part, style in (("update", "o-"), ("step", "s-")):
        middle.plot(P, [p["best"]["repeated"][part] / p["best"]["ours"][part] for p in points], style, label=part)
    middle.set(title=f"times faster than repeated (K = {BASE.K}, C = {BASE.C})", xlabel="prompt tokens P", ylim=(0, None))
    middle.legend()
    names = [n for n in ("ours", "repeated", "TRL") if all(n in results[s]["contestants"] for s in SHAPES)]
    for i, found in enumerate(results[s] for s in SHAPES):
        base = found["contestants"][names[-1]]["rows"]
        heights = [median(a["step"] / b["step"] for a, b in zip(found["contestants"][n]["rows"], base)) for n in names]
        label = "P = {P}, C = {C}".format(**found["shape"])
        bars = right.bar(np.arange(len(names)) + 0.4 * i - 0.2, heights, 0.38, label=label)
        right.bar_label(bars, [f"{h:.2f}" for h in heights])
    right.set_xticks(range(len(names)), names)
    right.set(title=f"seconds of a whole step, {names[-1]} = 1", ylim=(0, 1.45))
    right.legend(loc="upper left")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def draw_idea(axes, K: int = 4) -> None:
    """K completions of one prompt: what the repeated form computes again and again is hatched; ours has it once."""
    parts = (("picture", 0.0, 3.2, "#9ecae1"), ("question", 3.2, 1.3, "#c6dbef"), ("completion", 4.9, 1.6, "#fdae6b"))
    for top, title, form in ((0, "repeated: K (P + C) tokens", "repeated"), (-K - 2.2, "ours: P + K C tokens", "ours")):
        axes.text(0, top + 0.35, title, fontsize=10)
        middle = top - (K - 1) / 2
        for name, x, width, colour in parts:
            once = form == "ours" and name != "completion"
            for k, y in enumerate([middle] if once else [top - k for k in range(K)]):
                again = form == "repeated" and name != "completion" and k > 0
                axes.bar(x, -0.85, width - 0.06, bottom=y, align="edge", color=colour, edgecolor="white",
                         hatch="///" if again else None)
                axes.text(x + width / 2, y - 0.45, name, ha="center", va="center", fontsize=9) if k == 0 else None
        for k in range(K):
            axes.plot([4.46, 4.88], [(middle if form == "ours" else top - k) - 0.43, top - k - 0.43], color="grey", lw=0.8)
    axes.set(xlim=(0, 6.6), ylim=(-2 * K - 2.4, 1.4), title="what is computed, in rollout and update")
    axes.axis("off")


# ---------------------------------------------------------------------------------------------------------------- main
PARTS = (*SHAPES, "sweeps", "pairing", "ranks")


def main(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure; the rest is kept from earlier")
    p.add_argument("--rounds", type=int, default=5, help="counted turns of each contestant")
    p.add_argument("--trl", action="store_true", help="fail where TRL cannot be imported, instead of leaving it out")
    p.add_argument("--out", default="results/benchmark", metavar="FILE", help="FILE.json and FILE.txt are written")
    p.add_argument("--picture", default="docs/shared_prefix.png", metavar="FILE")
    p.add_argument("--real-size", choices=("3B", "7B"), help="three steps of Qwen2.5-VL's shape on a CUDA GPU, nothing else")
    p.add_argument("--as-rank", action="store_true", help="used by --parts ranks itself")
    args = p.parse_args(argv)
    if args.rounds < 1:
        raise DataError(f"--rounds {args.rounds}: must be at least 1")
    if args.real_size:
        return main_real_size(args.real_size)
    if args.as_rank:
        as_rank(args.rounds)
        return 0
    torch.set_num_threads(1)
    missing = why_no_trl() if set(args.parts) & set(SHAPES) else None
    if missing:
        if args.trl:
            raise DataError(f"--trl: {missing}; use the environment that benchmark_trl.py describes")
        print(NO_TRL.format(missing), flush=True)
    file = Path(args.out).with_suffix(".json")
    results = json.loads(file.read_text()) if file.is_file() else {}
    for part in args.parts:
        print(f"measuring {part} ...", flush=True)
        results[part] = {"long": lambda: measure_shape(SHAPES["long"], args.rounds, trl=not missing),
                         "short": lambda: measure_shape(SHAPES["short"], args.rounds, trl=not missing),
                         "sweeps": lambda: measure_sweeps(args.rounds), "pairing": lambda: measure_pairing(args.rounds),
                         "ranks": lambda: measure_ranks(args.rounds)}[part]()
        results["machine"] = machine()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results))
        file.with_suffix(".txt").write_text(report(results))
    print(report(results))
    if {*SHAPES, "sweeps"} <= results.keys():
        draw(results, Path(args.picture))
    return 0


def main_real_size(size: str) -> int:
    """The model of `size` on the GPU. Refuses without one: on a CPU a step would take hours and tell nothing."""
    if not torch.cuda.is_available():
        raise DataError(f"--real-size {size} needs a CUDA GPU, and there is none here; without it leave the flag out")
    from dry_run import real_config
    print(f"Qwen2.5-VL-{size}, random weights, bf16, {REAL}, activation checkpointing, {torch.cuda.get_device_name()}")
    found = real_size(real_config(size), REAL, torch.device("cuda"))
    print(f"last step {found['rows'][-1]['step']:.2f} s; rollout {100 * found['rollout_share']:.0f} % of all; peak memory "
          f"{found['peak_bytes'] / 2**30:.1f} GiB; |log pi of rollout - of update|: mean {found['gap_mean']:.2g}, "
          f"largest {found['gap_max']:.2g}")
    return 0


def why_no_trl() -> str | None:
    """None where TRL and what its Qwen2.5-VL needs can be imported, else what is missing."""
    try:
        import torchvision, trl  # noqa: E401, F401
    except ImportError as error:
        return str(error)
    return None


def machine() -> str:
    """Where this was measured."""
    chip = next((line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
                platform.processor()) if Path("/proc/cpuinfo").exists() else platform.processor()
    return (f"{chip}, {os.cpu_count()} cores, one thread; python {platform.python_version()}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}")


if __name__ == "__main__":
    sys.exit(run(main))
