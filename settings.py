"""Every knob of a training run: the two presets, the command line, and what cannot be combined.

`parse_arguments` reads, `settle` fills in (an explicit flag wins over the preset, a resumed run keeps its own settings) and
refuses before anything long begins. Flags of a sibling method are defined in that method's file.

    args, reason = settle(parse_arguments(["--task", "depth"]))       # args.lr 0.0005, "no CUDA device and ..."
    python settings.py --task depth                                   # prints the effective settings and runs nothing
"""
from __future__ import annotations

import sys
from argparse import ArgumentDefaultsHelpFormatter, BooleanOptionalAction, Namespace
from pathlib import Path

import torch

import constraints
import judge
import lenguard
from command import Parser, read_text, run
from data import BOOLEAN_TASKS, TASKS
from dataset import tasks_of
from images import DataError
from model import EMBEDDED, MERGED_PATCH, MIN_PIXELS, find_model, run_settings
from pairing import PAIRINGS
from questions import SYSTEM_PROMPT
from rewards import REWARDS
from transforms import TRANSFORM_SETS

# ------------------------------------------------------------------------------------------------------------- presets
# One dict of defaults each; an explicit flag always wins. Rate and steps of `tiny` were chosen on validation scenes.
PRESETS = {
    "paper": dict(model="Qwen/Qwen2.5-VL-3B-Instruct", data="data/omni3d", lr=1e-6, steps=500, max_new_tokens=512,
                  max_pixels=512 * MERGED_PATCH**2, activation_checkpointing=True, eval_size=200, eval_rows=64,
                  lenguard_lengths=[*lenguard.STAGES["paper"][:3]]),
    "tiny": dict(model="tiny", data="synthetic", lr=5e-4, steps=300, max_new_tokens=48, max_pixels=112 * 112,
                 activation_checkpointing=False, eval_size=300, eval_rows=256, lenguard_lengths=[*lenguard.STAGES["tiny"][:3]]),
}
JOINT_STEPS = 2000                 # of the paper's recipe, for --task joint
PAPER_DATA = "data/omni3d"
METHODS = (judge, lenguard, constraints)


def parse_arguments(argv: list[str] | None = None) -> Namespace:
    """The command line as given; `given` lists what was."""
    description = "Label-free consistency training (OT-GRPO); README.md says how, and what the log means."
    p = Parser(description=description, formatter_class=ArgumentDefaultsHelpFormatter)
    p.add_argument("--task", choices=(*TASKS, "joint"), help="joint: the four boolean tasks shuffled together")
    # what to train, on what; None means: from the preset
    p.add_argument("--preset", default="auto", choices=("auto", *PRESETS), help="auto: paper if CUDA and data are there, else tiny")
    p.add_argument("--model", help="checkpoint folder or hub id")
    p.add_argument("--data", help="folder in Omni3D's format, synthetic, or synthetic-outdoor")
    p.add_argument("--select", default="gap", choices=("gap", "2d"), help="pairs by 3D gap (the paper) or by 2D boxes and names only")
    p.add_argument("--examples", type=int, metavar="N", help="train on the first N examples only; default: all")
    # the method
    p.add_argument("--reward", default="consistency", choices=REWARDS, help="accuracy reads labels: the reference")
    p.add_argument("--label-noise", type=float, default=0.0, metavar="P", help="with accuracy: share of examples with a wrong label")
    p.add_argument("--pairing", default="minimal", choices=PAIRINGS, help="how K answers meet K answers")
    p.add_argument("--transforms", default="full", choices=tuple(TRANSFORM_SETS), help="paper, or full = paper + relabel + unnamed")
    p.add_argument("--format-weight", type=float, default=1.0, metavar="W", help="of the format reward; LenGuard's paper: 0.2")
    for method in METHODS:
        method.add_flags(p)
    # size of a step
    p.add_argument("--steps", type=int, help="updates; joint with the paper preset: 2000")
    p.add_argument("--pairs-per-device", type=int, default=4, help="pairs of prompts per process and step")
    p.add_argument("--group-size", type=int, default=8, metavar="K", help="completions per prompt")
    p.add_argument("--lr", type=float, help="AdamW, constant")
    p.add_argument("--lora-rank", type=int, default=32, metavar="R", help="alpha is 2 R")
    p.add_argument("--temperature", type=float, default=1.0, help="of sampling and of the scored log-probabilities")
    # lengths and memory
    p.add_argument("--max-new-tokens", type=int, help="completion limit")
    p.add_argument("--max-prompt-tokens", type=int, default=2048, help="longer prompts are refused by id, never cut")
    p.add_argument("--max-pixels", type=int, help="picture size after resizing; 784 pixels are one token")
    p.add_argument("--tokens-per-microbatch", type=int, default=16384, help="memory only; the update does not depend on it")
    p.add_argument("--activation-checkpointing", action=BooleanOptionalAction, default=None, help="memory only")
    p.add_argument("--system-prompt", metavar="FILE", help="a system prompt of your own")
    # running
    p.add_argument("--seed", type=int, default=0, help="of the adapter, the order, the transforms and the sampling")
    p.add_argument("--out", metavar="RUN", help="default: runs/TASK-REWARD-seedN")
    p.add_argument("--resume", metavar="RUN", help="go on from the newest checkpoint, with the run's own settings")
    p.add_argument("--resume-if-there", action="store_true", help="go on with --out if it holds a run, else begin it: for restarts")
    p.add_argument("--eval-every", type=int, metavar="N", help="steps between two looks at the probe; default: a tenth")
    p.add_argument("--eval-size", type=int, metavar="N", help="held-out questions before and after; 0: none")
    p.add_argument("--eval-rows", type=int, metavar="N", help="completions that evaluation samples at a time; memory only")
    p.add_argument("--eval-split", default="test", choices=("test", "val"), help="val: synthetic scenes for choosing settings")
    p.add_argument("--save-every", type=int, default=50, metavar="N", help="steps between checkpoints")
    p.add_argument("--dry-run", action="store_true", help="train nothing: predict prompt lengths and memory (dry_run.py)")
    p.add_argument("--random-weights", action="store_true", help="with --dry-run: one real step of this size with random weights")
    p.add_argument("--memory-gib", type=float, metavar="GIB", help="with --dry-run: refuse what needs more; default: the GPU's own")
    args = p.parse_args(argv)
    if (args.random_weights or args.memory_gib is not None) and not args.dry_run:
        p.error("--random-weights and --memory-gib need --dry-run")
    if args.resume_if_there and (args.resume or not args.out):
        p.error("--resume-if-there needs --out RUN, and no --resume")
    if args.task is None and args.resume is None:
        p.error(f"--task is needed: one of {', '.join((*TASKS, 'joint'))}")
    marked = vars(p.parse_args(argv, Namespace(**dict.fromkeys(vars(args), p))))    # what is not given keeps its mark
    args.given = sorted(name for name, value in marked.items() if value is not p)
    return args


def settle(args: Namespace) -> tuple[Namespace, str]:
    """Fill in what was not given, from the run to resume or from the preset, and refuse impossible combinations.

    Returns the effective settings and the reason for the preset in one sentence.
    """
    if args.resume_if_there and (Path(args.out) / "config.json").is_file():
        args.resume = args.out
    if args.resume:
        args, reason = resumed(args), f"settings of {args.resume}"
    else:
        args.preset, reason = choose_preset(args)
        defaults = dict(PRESETS[args.preset])
        if args.preset == "paper" and args.task == "joint":
            defaults["steps"] = JOINT_STEPS
        for name, value in defaults.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        args.eval_every = max(1, args.steps // 10) if args.eval_every is None else args.eval_every
        args.system_prompt_text = read_text(args.system_prompt, "--system-prompt") if args.system_prompt else SYSTEM_PROMPT
        if args.out and Path(args.out).exists() and (not Path(args.out).is_dir() or any(Path(args.out).iterdir())):
            raise DataError(f"--out {args.out} exists and is not empty; go on with it by --resume {args.out}, or give another name")
    for name, least in (("steps", 1), ("pairs_per_device", 1), ("group_size", 2), ("lora_rank", 1), ("max_new_tokens", 1),
                        ("save_every", 1), ("eval_every", 1), ("eval_size", 0), ("eval_rows", 1), ("tokens_per_microbatch", 1), ("seed", 0),
                        ("max_prompt_tokens", 1), ("max_pixels", MIN_PIXELS), ("examples", 1)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            why = " (a completion is compared with the others of its group)" if name == "group_size" else ""
            raise DataError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}{why}")
    if not (args.lr > 0 and args.temperature > 0 and 0 <= args.label_noise <= 1):
        raise DataError("--lr and --temperature must be above 0 and --label-noise between 0 and 1")
    if args.label_noise and (args.reward != "accuracy" or not set(tasks_of(args.task)) <= set(BOOLEAN_TASKS)):
        raise DataError("--label-noise flips True and False labels: it needs --reward accuracy and a boolean task")
    if not args.format_weight >= 0:
        raise DataError(f"--format-weight {args.format_weight}: must be at least 0")
    for method in METHODS:
        method.check_flags(args)
    return args, reason


def choose_preset(args: Namespace) -> tuple[str, str]:
    """`auto` is one decision: the paper's recipe where it can run, otherwise the embedded model and scenes.

    The embedded model's rate would wreck a real one, so any other --model gets the paper's settings.
    """
    data, cuda, folder = args.data or PAPER_DATA, torch.cuda.is_available(), bool(args.model) and Path(find_model(args.model)).is_dir()
    there = (Path(data) / "annotations").is_dir() or (Path(data) / "Omni3D").is_dir()
    chosen, reason = args.preset, "as asked"
    if chosen == "auto" and args.dry_run:
        chosen, reason = "paper", "what --dry-run is for"
    elif chosen == "auto" and args.model not in (None, *EMBEDDED):
        chosen, reason = "paper", f"--model {args.model} is no embedded model, so the paper's settings"
    elif chosen == "auto" and args.model is None and cuda and there:
        chosen, reason = "paper", f"CUDA is available and {data} holds the prepared data"
    if chosen == "paper" and not (cuda or folder or args.dry_run):
        raise DataError("the paper's recipe needs a CUDA device, and there is none: add --dry-run to see what it would take, or "
                        "give --preset tiny, or a small checkpoint folder with --model")
    if chosen != "auto":
        return chosen, reason
    missing = [*(["no CUDA device"] if not cuda else []), *([f"no data in {data}"] if not there else []),
               *([f"--model {args.model}"] if args.model else [])]
    return "tiny", (f"{' and '.join(missing)}. For the paper's recipe put Omni3D's SUNRGBD_*.json into {PAPER_DATA}/Omni3D, the "
                    f"pictures into {PAPER_DATA}/SUNRGBD, and run on a CUDA machine (README: your own GPUs)")


def resumed(args: Namespace) -> Namespace:
    """The settings of the run to resume. Only flags that do not change the run may be given beside --resume."""
    saved = run_settings(args.resume)
    if not {"task", "model", "pairs_per_step", "base_fingerprint"} <= saved.keys():
        raise DataError(f"--resume {args.resume}: no config.json of a run there; give the folder that train.py printed")
    free = {"resume", "resume_if_there", "steps", "save_every", "eval_every", "eval_rows", "tokens_per_microbatch",
            "activation_checkpointing", *(["out"] if args.resume_if_there else [])}
    for name in args.given:
        if name not in free and getattr(args, name) != saved.get(name):
            raise DataError(f"--resume {args.resume}: --{name.replace('_', '-')} {getattr(args, name)} differs from the run's "
                            f"own {saved.get(name)}; leave it out, or start a new run")
    given = {name: getattr(args, name) for name in args.given}
    return Namespace(**{**vars(args), **saved, **given, "out": args.resume, "resume": args.resume})


def share_pairs(args: Namespace, world_size: int) -> None:
    """A resumed run keeps its pairs per step, however many processes share them now."""
    if args.resume:
        if args.pairs_per_step % world_size:
            fit = [n for n in range(1, args.pairs_per_step + 1) if args.pairs_per_step % n == 0]
            raise DataError(f"--resume: {args.pairs_per_step} pairs a step cannot be shared by {world_size} processes; "
                            f"use {', '.join(map(str, fit))}")
        args.pairs_per_device = args.pairs_per_step // world_size
    args.pairs_per_step = world_size * args.pairs_per_device


def main(argv: list[str] | None = None) -> int:
    settled, why = settle(parse_arguments(argv))
    print(why)
    for name, value in sorted(vars(settled).items()):
        print(f"{name:<26}{value}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
