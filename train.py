"""Label-free consistency training: OT-GRPO, Algorithm 1 of "The Art of Interrogation", in one readable loop.

A question is asked twice, as x and as x' = T(x); K answers to each are sampled; each is paid for agreeing with the least
favourable optimal matching of the other group (pairing.py); GRPO does the rest (grpo.py). Nobody reads a label.

What differs from the paper is marked where it happens and listed in the README: min(A rho, A clip(rho)) instead of Eq. 5,
advantages per group instead of a shared one, the tie-averaged matching, two more transforms.

    python train.py --task depth                              # two CPU cores: the embedded model, under five minutes
    torchrun --nproc_per_node 8 train.py --task depth         # eight GPUs: Qwen2.5-VL-3B on SUN RGB-D, once it is in data/omni3d
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import peft
import torch
import transformers
from tqdm import tqdm

import scenes
from checkpoint import load_checkpoint, newest_checkpoint, save_adapter, save_checkpoint, write_json
from data import BOOLEAN_TASKS, TASKS, Example
from dataset import Pair, draw_pair, draw_uniforms, evaluation_pair, load_examples, tasks_of, to_prompt
from eval import Settings, answers, estimate, evaluate, run as run_command, shown, summarise
from grpo import all_reduce_gradients, backward, rollout
from images import DataError
from model import (MERGED_PATCH, ROOT, VLM, ModelError, add_lora, image_tokens, load_vlm, trainable_parameters)
from pairing import PAIRINGS
from plots import plot_curves, plot_pairs
from questions import SYSTEM_PROMPT, TEMPLATES
from rewards import REWARDS, advantages_of, make_reward
from transforms import TRANSFORM_SETS
from verifiers import TASK_KIND, parse

# ------------------------------------------------------------------------------------------------------------- presets
# One dict of defaults each; an explicit flag always wins. Rate and steps of `tiny` were chosen on validation scenes.
PRESETS = {
    "paper": dict(model="Qwen/Qwen2.5-VL-3B-Instruct", data="data/omni3d", lr=1e-6, steps=500, max_new_tokens=512,
                  max_pixels=512 * MERGED_PATCH**2, activation_checkpointing=True, eval_size=200),
    "tiny": dict(model="tiny", data="synthetic", lr=2e-4, steps=150, max_new_tokens=48, max_pixels=112 * 112,
                 activation_checkpointing=False, eval_size=300),
}
JOINT_STEPS = 2000                 # of the paper's recipe, for --task joint
PAPER_DATA = "data/omni3d"
CLIP_NORM = 1.0                    # gradient norm; the paper does not say: ours


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0],
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--task", choices=(*TASKS, "joint"), help="joint: the four boolean tasks shuffled together")
    # what to train, on what; None means: from the preset
    p.add_argument("--preset", default="auto", choices=("auto", *PRESETS), help="auto: paper if CUDA and data are there, else tiny")
    p.add_argument("--model", help="checkpoint folder or hub id")
    p.add_argument("--data", help="folder in Omni3D's format, synthetic, or synthetic-outdoor")
    p.add_argument("--select", default="gap", choices=("gap", "2d"), help="pairs by 3D gap (the paper) or by 2D boxes and names only")
    # the method
    p.add_argument("--reward", default="consistency", choices=REWARDS, help="accuracy reads labels: the reference")
    p.add_argument("--label-noise", type=float, default=0.0, metavar="P", help="with accuracy: share of examples with a wrong label")
    p.add_argument("--pairing", default="minimal", choices=PAIRINGS, help="how K answers meet K answers")
    p.add_argument("--transforms", default="full", choices=tuple(TRANSFORM_SETS), help="paper, or full = paper + relabel + unnamed")
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
    p.add_argument("--activation-checkpointing", action=argparse.BooleanOptionalAction, default=None, help="memory only")
    p.add_argument("--system-prompt", metavar="FILE", help="a system prompt of your own")
    # running
    p.add_argument("--seed", type=int, default=0, help="of the adapter, the order, the transforms and the sampling")
    p.add_argument("--out", metavar="RUN", help="default: runs/TASK-REWARD-seedN")
    p.add_argument("--resume", metavar="RUN", help="go on from the newest checkpoint, with the run's own settings")
    p.add_argument("--eval-every", type=int, metavar="N", help="steps between two looks at the probe; default: a tenth")
    p.add_argument("--eval-size", type=int, metavar="N", help="held-out questions before and after; 0: none")
    p.add_argument("--eval-split", default="test", choices=("test", "val"), help="val: synthetic scenes for choosing settings")
    p.add_argument("--save-every", type=int, default=50, metavar="N", help="steps between checkpoints")
    args = p.parse_args(argv)
    if args.task is None and args.resume is None:
        p.error(f"--task is needed: one of {', '.join((*TASKS, 'joint'))}")
    return args


def settle(args: argparse.Namespace) -> tuple[argparse.Namespace, str]:
    """Fill in what was not given, from the run to resume or from the preset, and refuse impossible combinations.

    Returns the effective settings and the reason for the preset in one sentence.
    """
    if args.resume:
        return resumed(args), f"settings of {args.resume}"
    args.preset, reason = choose_preset(args.preset)
    defaults = dict(PRESETS[args.preset])
    if args.preset == "paper" and args.task == "joint":
        defaults["steps"] = JOINT_STEPS
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.eval_every = args.eval_every or max(1, args.steps // 10)
    args.system_prompt_text = read_prompt(args.system_prompt) if args.system_prompt else SYSTEM_PROMPT
    for name, least in (("steps", 1), ("pairs_per_device", 1), ("group_size", 2), ("lora_rank", 1), ("max_new_tokens", 1),
                        ("save_every", 1), ("max_pixels", 4 * MERGED_PATCH**2)):
        if getattr(args, name) < least:
            why = " (a completion is compared with the others of its group)" if name == "group_size" else ""
            raise DataError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}{why}")
    if not (args.lr > 0 and args.temperature > 0 and 0 <= args.label_noise <= 1):
        raise DataError("--lr and --temperature must be above 0 and --label-noise between 0 and 1")
    if args.label_noise and (args.reward != "accuracy" or not set(tasks_of(args.task)) <= set(BOOLEAN_TASKS)):
        raise DataError("--label-noise flips True and False labels: it needs --reward accuracy and a boolean task")
    return args, reason


def choose_preset(preset: str) -> tuple[str, str]:
    """`auto` is one decision: the paper's recipe where it can run, otherwise the embedded model and scenes."""
    there = (Path(PAPER_DATA) / "annotations").is_dir() or (Path(PAPER_DATA) / "Omni3D").is_dir()
    if preset != "auto":
        return preset, "as asked"
    if torch.cuda.is_available() and there:
        return "paper", f"CUDA is available and {PAPER_DATA} holds the prepared data"
    missing = [*(["no CUDA device"] if not torch.cuda.is_available() else []), *([f"no data in {PAPER_DATA}"] if not there else [])]
    return "tiny", (f"{' and '.join(missing)}. For the paper's recipe put Omni3D's SUNRGBD_*.json into {PAPER_DATA}/Omni3D, the "
                    f"pictures into {PAPER_DATA}/SUNRGBD, and run on a CUDA machine (README: your own GPUs)")


def resumed(args: argparse.Namespace) -> argparse.Namespace:
    """The settings of the run to resume. Only flags that do not change the run may be given beside --resume."""
    config = Path(args.resume) / "config.json"
    if not config.is_file():
        raise DataError(f"--resume {args.resume}: no config.json there; give the folder that train.py printed")
    saved, fresh = json.loads(config.read_text()), vars(parse_arguments(["--resume", args.resume]))
    given = {k for k, v in vars(args).items() if v != fresh[k]}
    free = {"resume", "steps", "save_every", "eval_every", "tokens_per_microbatch", "activation_checkpointing", "pairs_per_device"}
    if wrong := sorted(k for k in given - free if getattr(args, k) != saved.get(k)):
        raise DataError(f"--resume {args.resume}: --{wrong[0].replace('_', '-')} differs from the run's own "
                        f"{saved.get(wrong[0])!r}; leave it out, or start a new run")
    return argparse.Namespace(**{**saved, **{k: getattr(args, k) for k in given}, "out": args.resume, "resume": args.resume})


def read_prompt(file: str) -> str:
    """The text of --system-prompt."""
    try:
        return Path(file).read_text().strip()
    except OSError as error:
        raise DataError(f"--system-prompt {file}: {error.strerror}; give a text file") from None


# --------------------------------------------------------------------------------------------------------- distributed
def setup() -> tuple[int, int, torch.device]:
    """(rank, world size, device). Without torchrun this is (0, 1, device), and nothing else branches."""
    rank, local_rank, world_size, local_size = (int(os.environ.get(name, default)) for name, default in (
        ("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)))
    cuda = torch.cuda.is_available()
    if cuda and local_size > torch.cuda.device_count():
        raise DataError(f"{local_size} processes but {torch.cuda.device_count()} GPUs here: give torchrun "
                        f"--nproc_per_node {torch.cuda.device_count()}")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        torch.distributed.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=30))
    return rank, world_size, device


def mean_over_ranks(values: dict[str, float], world_size: int, device: torch.device) -> dict[str, float]:
    """Average a step's numbers over the ranks, in one call."""
    flat = torch.tensor(list(values.values()), dtype=torch.float64, device=device)                # (numbers,)
    if world_size > 1:
        torch.distributed.all_reduce(flat)
    return dict(zip(values, (flat / world_size).tolist()))


def agree_on(value, world_size: int):
    """Rank 0's value, on every rank."""
    box = [value]
    if world_size > 1:
        torch.distributed.broadcast_object_list(box)
    return box[0]


# ---------------------------------------------------------------------------------------------------- before the loop
def new_folder(args: argparse.Namespace) -> Path:
    """The run's folder, made. An explicit one that holds something is refused; the default counts on."""
    if args.out:
        run = Path(args.out)
        if run.exists() and (not run.is_dir() or any(run.iterdir())):
            raise DataError(f"--out {run} exists and is not empty; go on with it by --resume {run}, or give another name")
    else:
        stem, n = f"runs/{args.task}-{args.reward}-seed{args.seed}", 2
        run = Path(stem)
        while run.exists():
            run, n = Path(f"{stem}-{n}"), n + 1
    run.mkdir(parents=True, exist_ok=True)
    return run


def refuse_long(vlm: VLM, examples: list[Example], args: argparse.Namespace) -> list[Example]:
    """Examples whose longest possible prompt is over --max-prompt-tokens are named and left out: prompts are never cut."""
    kept = []
    for e in examples:
        words = " ".join(o.name for o in e.objects) + args.system_prompt_text + max(TEMPLATES[e.task], key=len) * 2
        length = image_tokens(e.record.width, e.record.height, args.max_pixels) + len(vlm.tokenizer(words)["input_ids"]) + 64
        if length <= args.max_prompt_tokens:
            kept.append(e)
        else:
            print(f"left out: {e.id} may need {length} prompt tokens, over --max-prompt-tokens {args.max_prompt_tokens}")
    if not kept:
        raise DataError(f"every example needs more than --max-prompt-tokens {args.max_prompt_tokens}: raise it or lower --max-pixels")
    return kept


def self_check(vlm: VLM, pair: Pair, args: argparse.Namespace) -> None:
    """One backward pass with advantages of +1 and -1: every LoRA B must get a gradient, or training would do nothing."""
    prompts = [to_prompt(vlm, side, args.system_prompt_text) for side in (pair.x, pair.x_prime)]
    completions = rollout(vlm, prompts, draw_uniforms(args.seed, 0, 0, 2, 8), args.temperature)     # (2, 2, 8)
    backward(vlm, prompts, completions, torch.tensor([[1.0, -1.0], [1.0, -1.0]]) + 0.5, args.temperature, pairs=1,
             activation_checkpointing=args.activation_checkpointing)
    dead = [n for n, p in trainable_parameters(vlm).items() if "lora_B" in n and (p.grad is None or not p.grad.any())]
    vlm.model.zero_grad(set_to_none=True)
    if dead:
        raise ModelError(f"self-check: {len(dead)} LoRA matrices get no gradient (first: {dead[0]}); nothing would be trained")


def say_hello(vlm: VLM, args: argparse.Namespace, reason: str, world_size: int, n_examples: int) -> None:
    """What will run: preset and why, what is trainable, the batch as one sentence, how answers are sampled."""
    counts, total = {}, sum(p.numel() for p in vlm.base.parameters())
    for name, parameter in trainable_parameters(vlm).items():
        module = name.split(".lora_")[0].split(".")[-1]
        n, size = counts.get(module, (0, 0))
        counts[module] = n + ("lora_A" in name), size + parameter.numel()
    trained = sum(size for _, size in counts.values())
    pairs = world_size * args.pairs_per_device
    print(f"preset {args.preset}: {reason}\n"
          f"model {args.model}, data {args.data} ({n_examples} training examples of {args.task}), reward {args.reward}, "
          f"pairing {args.pairing}, transforms {args.transforms}, select {args.select}\n"
          f"trainable: {trained:,} of {total:,} weights, LoRA rank {args.lora_rank} (alpha {2 * args.lora_rank}) on "
          + ", ".join(f"{n} x {module}" for module, (n, _) in counts.items()) + "; vision tower: 0\n"
          f"batch: {world_size} rank{'s' * (world_size > 1)} x {args.pairs_per_device} pairs x 2 prompts x {args.group_size} "
          f"completions = {pairs * 2 * args.group_size} answers per step, {args.steps} steps at rate {args.lr:g}\n"
          f"sampling: temperature {args.temperature:g}, no top-k, no top-p, no penalties, at most {args.max_new_tokens} tokens; "
          f"pictures at most {args.max_pixels:,} pixels ({args.max_pixels // MERGED_PATCH**2} tokens)", flush=True)


# ------------------------------------------------------------------------------------------------------------ one step
def train_step(vlm: VLM, optimiser: torch.optim.Optimizer, examples: list[Example], reward, step: int, rank: int,
               world_size: int, args: argparse.Namespace) -> tuple[dict[str, float], tuple]:
    """Algorithm 1 on this rank's share of the batch. Returns the numbers to log and one pair with its answers."""
    began = time.perf_counter()
    K, pairs_per_step = args.group_size, world_size * args.pairs_per_device
    mine = range(rank * args.pairs_per_device, (rank + 1) * args.pairs_per_device)
    pairs = [draw_pair(examples, args.seed, step, i, pairs_per_step, args.transforms) for i in mine]       # B / 2
    prompts = [to_prompt(vlm, side, args.system_prompt_text) for pair in pairs for side in (pair.x, pair.x_prime)]  # B
    uniforms = torch.cat([draw_uniforms(args.seed, step, i, K, args.max_new_tokens) for i in mine])        # (B, K, T)
    completions = rollout(vlm, prompts, uniforms, args.temperature)
    sampled = time.perf_counter()

    parsed = [[parse(vlm.tokenizer.decode(tokens[:n]), TASK_KIND[pairs[b // 2].example.task])
               for tokens, n in zip(completions.tokens[b], completions.lengths[b].tolist())] for b in range(len(prompts))]
    rewards = [reward(pair, y, y_prime) for pair, y, y_prime in zip(pairs, parsed[::2], parsed[1::2])]
    advantages = torch.cat([torch.from_numpy(advantages_of(r, y, y_prime))
                            for r, y, y_prime in zip(rewards, parsed[::2], parsed[1::2])])                # (B, K)
    stats = backward(vlm, prompts, completions, advantages, args.temperature, pairs_per_step, args.tokens_per_microbatch,
                     args.activation_checkpointing)
    parameters = list(trainable_parameters(vlm).values())
    all_reduce_gradients(parameters, world_size)
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM, error_if_nonfinite=True).item()
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)

    every = [p for side in parsed for p in side]
    task_reward = float(sum(r.c.mean() + r.c_prime.mean() for r in rewards)) / len(prompts)
    wellformed = sum(p.format for p in every) / len(every)
    log = {"reward": task_reward + wellformed, "task_reward": task_reward, "format": wellformed,
           "consistency": sum(agreement(y, z, pair.negates) for pair, y, z in zip(pairs, parsed[::2], parsed[1::2])) / len(pairs),
           "no_spread": (~advantages.any(1)).float().mean().item(), "unparsed": sum(p.answer is None for p in every) / len(every),
           "length": completions.lengths.float().mean().item(), "grad_norm": grad_norm, **stats,
           "seconds_rollout": sampled - began, "seconds_update": time.perf_counter() - sampled}
    return mean_over_ranks(log, world_size, vlm.device), (pairs[0], parsed[0][0], parsed[1][0])


def agreement(y: list, y_prime: list, negates: bool) -> float:
    """Mean verif_T over all K x K answer pairs, unparseable ones counting 0: a consistency that no pairing rule shapes."""
    from pairing import verifier_matrix
    return float(verifier_matrix([p.answer for p in y], [p.answer for p in y_prime], negates).sum()) / (len(y) * len(y_prime))


COLUMNS = ("reward", "task_reward", "format", "consistency", "no_spread", "unparsed", "truncated", "length", "grad_norm")


# ------------------------------------------------------------------------------------------------------------ the run
def main(argv: list[str] | None = None) -> int:
    began = time.time()
    args, reason = settle(parse_arguments(argv))
    rank, world_size, device = setup()
    if args.resume and args.pairs_per_step != world_size * args.pairs_per_device:
        if args.pairs_per_step % world_size:
            raise DataError(f"--resume: {args.pairs_per_step} pairs a step cannot be shared by {world_size} processes")
        args.pairs_per_device = args.pairs_per_step // world_size
    args.pairs_per_step = world_size * args.pairs_per_device
    reward = make_reward(args.reward, args.pairing, args.label_noise, args.seed)

    vlm = load_vlm(args.model, device, torch.bfloat16 if device.type == "cuda" else torch.float32, args.max_pixels)
    vlm = add_lora(vlm, args.lora_rank, args.seed)
    examples = refuse_long(vlm, load_examples(args.data, args.task, "train", args.select), args)
    held_out = held_out_examples(args) if args.eval_size else []
    run = Path(agree_on(str(args.resume or new_folder(args)) if rank == 0 else None, world_size))
    optimiser = torch.optim.AdamW(trainable_parameters(vlm).values(), lr=args.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    if rank == 0:
        say_hello(vlm, args, reason, world_size, len(examples))
        if not args.resume:
            versions = {m.__name__: m.__version__ for m in (torch, transformers, peft)} | {"python": platform.python_version()}
            write_json(run / "config.json", {**vars(args), "world_size": world_size, "versions": versions})
    self_check(vlm, draw_pair(examples, args.seed, 0, 0, args.pairs_per_step, args.transforms), args)

    settings = Settings(args.system_prompt_text, args.max_new_tokens, seed=0)
    start, before = 0, None
    if args.resume:
        folder, start = newest_checkpoint(run)
        load_checkpoint(folder, vlm, optimiser)
        if (run / "before.json").is_file():
            before = json.loads((run / "before.json").read_text())
        if rank == 0:
            print(f"resuming {run} after step {start} of {args.steps}")
            keep = [line for line in (run / "log.jsonl").read_text().splitlines() if json.loads(line)["step"] <= start]
            (run / "log.jsonl").write_text("".join(line + "\n" for line in keep))
    if held_out and before is None:
        with vlm.model.disable_adapter():
            before = evaluate(vlm, held_out, settings, rank, world_size, label="before training")
        if rank == 0:
            write_json(run / "before.json", before)
            print_metrics("before", before)

    train(vlm, optimiser, examples, held_out[:64], reward, start, run, rank, world_size, args)

    after = evaluate(vlm, held_out, settings, rank, world_size, label="after training") if held_out else None
    if rank == 0:
        finish(vlm, run, before, after, settings, held_out, args)
        print(f"{run} is complete: adapter, log.jsonl, curves.png, pairs.png, eval.json; {time.time() - began:.0f} s in all")
    if world_size > 1:
        torch.distributed.destroy_process_group()
    return 0


def train(vlm, optimiser, examples, probe, reward, start, run, rank, world_size, args) -> None:
    """The loop: steps, the log, the probe (its labels are for curves.png only), checkpoints, Ctrl-C."""
    stop = []
    handlers = {s: signal.signal(s, lambda number, _: stop.append(number) if not stop else os._exit(1))
                for s in (signal.SIGINT, signal.SIGTERM)}
    probe_settings = Settings(args.system_prompt_text, args.max_new_tokens, samples=1, diagnostics=())
    if rank == 0 and start == 0:
        tqdm.write("step  " + "  ".join(f"{name:>11}" for name in COLUMNS) + "      s")
    bar = tqdm(range(start, args.steps), initial=start, total=args.steps, desc="training", disable=rank != 0)
    for step in bar:
        log, (pair, y, y_prime) = train_step(vlm, optimiser, examples, reward, step, rank, world_size, args)
        interrupted = mean_over_ranks({"stop": float(bool(stop))}, world_size, vlm.device)["stop"] > 0    # all ranks agree
        done = step + 1
        if rank == 0:
            record(run, {"step": done, **log})
            tqdm.write(f"{done:4d}  " + "  ".join(f"{log[name]:11.3f}" for name in COLUMNS)
                       + f"  {log['seconds_rollout'] + log['seconds_update']:5.2f}")
            if log["truncated"] == 1.0:
                tqdm.write(f"warning: 100 % of the completions were cut off at {args.max_new_tokens} tokens; raise --max-new-tokens")
        if probe and (done % args.eval_every == 0 or done == args.steps):
            rows = evaluate(vlm, probe, probe_settings, rank, world_size, label="probe")
            if rank == 0:
                truths = [r["greedy_accuracy"] for r in rows if "greedy_accuracy" in r]
                record(run, {"step": done, "probe_accuracy": sum(truths) / len(truths) if truths else None,
                             "probe_consistency": sum(r["greedy_consistency"] for r in rows) / len(rows)})
                tqdm.write(f"      one pair, answers must {'differ' if pair.negates else 'match'}: "
                           f"{y.answer} ({y.reason}) and {y_prime.answer} ({y_prime.reason})")
        if rank == 0 and (done % args.save_every == 0 or done == args.steps or interrupted):
            save_checkpoint(run, vlm, optimiser, done)
        if interrupted:
            bar.close()
            if rank == 0:
                print(f"stopped after step {done}; go on with: python train.py --resume {run}")
            sys.exit(1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def record(run: Path, row: dict) -> None:
    """Append one line to log.jsonl."""
    with open(run / "log.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def held_out_examples(args: argparse.Namespace) -> list[Example]:
    """The held-out questions: gap-filtered pairs, whatever training selects; 2D ones where no picture has 3D boxes."""
    found, split = [], args.eval_split
    for task in tasks_of(args.task):
        try:
            found += load_examples(args.data, task, split, "gap", args.eval_size)
        except DataError:
            found += load_examples(args.data, task, split, "2d", args.eval_size)
    return found


def print_metrics(name: str, rows: list[dict]) -> None:
    for task, metrics in summarise(rows).items():
        for metric, e in metrics.items():
            print(f"{name:<8}{task:<13}{metric:<20}{shown(e):<22}n = {e['n']}")


def finish(vlm: VLM, run: Path, before: list[dict], after: list[dict], settings: Settings, held_out, args) -> None:
    """Leave the adapter, the pictures and eval.json, and print one table: before, after, difference paired by question."""
    save_adapter(vlm, run)
    plot_curves(run)
    pairs = [evaluation_pair(e, settings.seed) for e in (held_out or load_examples(args.data, args.task, "train", args.select, 6))[:6]]
    said = [answers(vlm, side, settings.system, settings, 0, 0) for side in ([p.x for p in pairs], [p.x_prime for p in pairs])]
    plot_pairs(run / "pairs.png", pairs, [(str(a[0].answer), str(b[0].answer)) for a, b in zip(*said)])
    if not held_out:
        return
    write_json(run / "eval.json", {"before": summarise(before), "after": summarise(after)})
    write_json(run / "after.json", after)
    print(f"\n{'task':<13}{'metric':<20}{'before':<22}{'after':<22}{'difference':<22}n")
    for task, metrics in summarise(after).items():
        for metric, e in metrics.items():
            old = summarise(before)[task].get(metric)
            changes = [b[metric] - a[metric] for a, b in zip(before, after) if b["task"] == task and metric in b]
            change = difference(changes) if changes else ""
            print(f"{task:<13}{metric:<20}{shown(old):<22}{shown(e):<22}{change:<22}{e['n']}")


def difference(changes: list[float]) -> str:
    """Mean change with a 95 % interval over questions, in points: +12.3 [+8.1, +16.5]."""
    mean, half = (lambda v: (v.mean().item(), 1.96 * v.std().item() / len(v) ** 0.5))(torch.tensor(changes, dtype=torch.float64))
    return f"{100 * mean:+5.1f} [{100 * (mean - half):+.1f}, {100 * (mean + half):+.1f}]"


if __name__ == "__main__":
    sys.exit(run_command(main))
