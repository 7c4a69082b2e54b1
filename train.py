"""Label-free consistency training: OT-GRPO, Algorithm 1 of "The Art of Interrogation", in one readable loop.

A question is asked twice, as x and as x' = T(x); K answers to each are sampled; each is paid for agreeing with the least
favourable optimal matching of the other group (pairing.py); GRPO does the rest (grpo.py). Nobody reads a label.

What differs from the paper is marked where it happens and listed in the README: min(A rho, A clip(rho)) instead of Eq. 5,
advantages per group instead of a shared one, the tie-averaged matching, two more transforms.

    python train.py --task depth                              # two CPU cores: the embedded model, under five minutes
    torchrun --nproc_per_node 8 train.py --task depth         # eight GPUs: Qwen2.5-VL-3B on SUN RGB-D, once it is in data/omni3d
"""
from __future__ import annotations

import json
import platform
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import peft
import torch
import transformers
from tqdm import tqdm

import constraints
import judge
import lenguard
from checkpoint import load_checkpoint, newest_checkpoint, save_adapter, save_checkpoint, trim_log, write_json
from command import interruptions, one_line, run as run_command
from data import Example
from dataset import Pair, draw_pair, draw_uniforms, evaluation_pair, load_examples, tasks_of, to_prompt
from dry_run import dry_run
from eval import Settings, answers, evaluate, held_out_examples, print_summary, shown, summarise
from grpo import all_reduce_gradients, backward, rollout
from images import DataError
from model import VLM, ModelError, add_lora, fingerprint, load_vlm, trainable_parameters
from pairing import verifier_matrix
from plots import plot_curves, plot_pairs
from preflight import refuse_long, same_examples, say_hello, self_check
from questions import prompt_text
from ranks import agree_on, gather, mean_over_ranks, setup
from rewards import Advantages, Batch, Reward, entropy_rewards, make_reward, over_pairs, plain_advantages
from settings import parse_arguments, settle, share_pairs
from verifiers import TASK_KIND, parse

CLIP_NORM = 1.0                    # gradient norm; the paper does not say: ours


# ---------------------------------------------------------------------------------------------------- before the loop
def new_folder(args: Namespace) -> Path:
    """Make the run's folder: --out, else runs/TASK-REWARD-seedN, else that with -2, -3 ..."""
    stem, n = args.out or f"runs/{args.task}-{args.reward}-seed{args.seed}", 2
    run = Path(stem)
    while not args.out and run.exists():
        run, n = Path(f"{stem}-{n}"), n + 1
    run.mkdir(parents=True, exist_ok=True)
    return run


def choose_methods(args: Namespace, state: dict) -> tuple[Reward, Advantages]:
    """The two functions that make one method differ from another, chosen here and not in the loop.

    `state` is what they carry from step to step (JSON), the same on all ranks; checkpoints keep it.
    """
    verdicts = judge.from_arguments(args)
    if args.reward == "entropy":
        reward = entropy_rewards
    elif args.reward == "judge":
        reward = judge.judge_rewards(verdicts, args.judge_score)
    else:
        reward = over_pairs(make_reward(args.reward, args.pairing, args.label_noise, args.seed))
    advantages = constraints.from_arguments(args, partial(plain_advantages, format_weight=args.format_weight), state)
    return lenguard.from_arguments(args, reward), judge.reject_by_sign(advantages, verdicts) if args.reject_by_judge else advantages


# ------------------------------------------------------------------------------------------------------------ one step
def train_step(vlm: VLM, optimiser: torch.optim.Optimizer, examples: list[Example], methods: tuple[Reward, Advantages],
               step: int, rank: int, world_size: int, args: Namespace) -> tuple[dict, str]:
    """Algorithm 1 on this rank's share of the batch. Returns the numbers to log and one pair with its answers."""
    began = time.perf_counter()
    K, mine = args.group_size, range(rank * args.pairs_per_device, (rank + 1) * args.pairs_per_device)
    pairs = [draw_pair(examples, args.seed, step, i, args.pairs_per_step, args.transforms) for i in mine]          # B / 2
    prompts = [to_prompt(vlm, side, args.system_prompt_text) for pair in pairs for side in (pair.x, pair.x_prime)]  # B
    uniforms = torch.cat([draw_uniforms(args.seed, step, i, K, args.max_new_tokens) for i in mine])        # (B, K, T)
    drawn = time.perf_counter()
    completions = rollout(vlm, prompts, uniforms, args.temperature)
    sampled = time.perf_counter()

    texts = [[vlm.tokenizer.decode(tokens[:n]) for tokens, n in zip(*group)]
             for group in zip(completions.tokens, completions.lengths.tolist())]                           # B x K
    parsed = [[parse(text, TASK_KIND[pairs[b // 2].example.task]) for text in texts[b]] for b in range(len(texts))]
    batch = Batch(vlm, pairs, prompts, completions, texts, parsed, args.temperature, world_size)
    reward_of, advantages_of = methods
    rewards = reward_of(batch)
    advantages = torch.from_numpy(advantages_of(batch, rewards))                                           # (B, K)
    stats = backward(vlm, prompts, completions, advantages, args.temperature, args.pairs_per_step,
                     args.tokens_per_microbatch, args.activation_checkpointing)
    stats["entropy"] *= stats["completion_tokens"]                 # a sum for now: ranks differ in tokens
    parameters = list(trainable_parameters(vlm).values())
    all_reduce_gradients(parameters, world_size)
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM, error_if_nonfinite=True).item()
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)

    every = [p for side in parsed for p in side]
    task_reward = float(sum(r.c.mean() + r.c_prime.mean() for r in rewards)) / len(prompts)
    wellformed = sum(p.format for p in every) / len(every)
    log = {"reward": task_reward + args.format_weight * wellformed, "task_reward": task_reward, "format": wellformed,
           "consistency": sum(agreement(y, z, pair.negates) for pair, y, z in batch.answered) / len(pairs),
           "no_spread": (~advantages.any(1)).float().mean().item(), "unparsed": sum(p.answer is None for p in every) / len(every),
           "length": completions.lengths.float().mean().item(), "grad_norm": grad_norm, **stats, **batch.log,
           "seconds_data": drawn - began, "seconds_rollout": sampled - drawn, "seconds_update": time.perf_counter() - sampled}
    log = mean_over_ranks(log, world_size, vlm.device)
    log["entropy"] /= max(1, log["completion_tokens"])
    log |= {name: log[name] * world_size for name in ("loss", "completion_tokens")}      # these are sums over the ranks
    log["ids"] = sum(gather([pair.example.id for pair in pairs], world_size), [])
    return log, in_words(pairs[0], texts[:2], parsed[:2])


def agreement(y: list, y_prime: list, negates: bool) -> float:
    """Mean verif_T over all K x K answer pairs, unparseable ones counting 0: a consistency that no pairing rule shapes."""
    return float(verifier_matrix([p.answer for p in y], [p.answer for p in y_prime], negates).sum()) / (len(y) * len(y_prime))


def in_words(pair: Pair, texts: list[list[str]], parsed: list[list]) -> str:
    """One pair to look at: both questions, the first completion of each, what was read from it and why."""
    lines = [f"      {pair.example.id}, T = {', '.join(pair.transform.parts) or 'identity'}: answers must "
             f"{'differ' if pair.negates else 'match'}"]
    for side, said, verdicts in zip((pair.x, pair.x_prime), texts, parsed):
        question = prompt_text(side.question, {i: o.name for i, o in side.view.objects.items()}).splitlines()[-2]
        lines.append(f"        {question}  ->  {one_line(said[0])}  [{verdicts[0].answer}: {verdicts[0].reason}]")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ the run
COLUMNS = ("reward", "task_reward", "format", "consistency", "no_spread", "unparsed", "truncated", "length", "grad_norm")


def main(argv: list[str] | None = None) -> int:
    began = time.time()
    args, reason = settle(parse_arguments(argv))
    rank, world_size, device = setup()
    share_pairs(args, world_size)
    print(f"preset {args.preset}: {reason}", flush=True)
    if args.dry_run:
        return dry_run(args, world_size, device)
    state: dict = {}
    methods = choose_methods(args, state)
    examples = load_examples(args.data, args.task, "train", args.select, args.examples)
    reads_labels = [f"--reward {args.reward}"] * (args.reward in ("accuracy", "judge")) + ["--reject-by-judge"] * args.reject_by_judge
    if reads_labels and any(lacks_label(e) for e in examples):
        raise DataError(f"{reads_labels[0]}: {next(filter(lacks_label, examples)).id} has no 3D box, so there is no label; use "
                        "--select gap, or --reward consistency")
    held_out = held_out_questions(args) if args.eval_size else []
    vlm = load_vlm(args.model, device, max_pixels=args.max_pixels)
    if args.resume and fingerprint(vlm) != args.base_fingerprint:
        raise ModelError(f"--resume {args.resume}: --model {args.model} is no longer the base it was begun with; start a new run")
    args.base_fingerprint = fingerprint(vlm)
    add_lora(vlm, args.lora_rank, args.seed)
    say_hello(vlm, args, world_size, len(examples))
    examples, held_out = refuse_long(vlm, examples, args), refuse_long(vlm, held_out, args) if held_out else []
    same_examples(examples, args, world_size)
    self_check(vlm, draw_pair(examples, args.seed, 0, 0, args.pairs_per_step, args.transforms), args)
    optimiser = torch.optim.AdamW(trainable_parameters(vlm).values(), lr=args.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)

    run, start = Path(agree_on(str(args.resume or new_folder(args)) if rank == 0 else None, world_size)), 0
    if args.resume:
        folder, start = agree_on(newest_checkpoint(run) if rank == 0 else None, world_size)
        if folder is not None:
            state |= load_checkpoint(folder, vlm, optimiser)
        if start > args.steps:
            raise DataError(f"--resume {run}: its newest checkpoint is of step {start}, beyond --steps {args.steps}")
        print(f"resuming {run} after step {start} of {args.steps}")
    args.out = str(run)
    if rank == 0:
        trim_log(run / "log.jsonl", start)
        versions = {m.__name__: m.__version__ for m in (torch, transformers, peft)} | {"python": platform.python_version()}
        write_json(run / "config.json", {**vars(args), "resume": None, "world_size": world_size, "versions": versions})
    try:
        finished = measured_training(vlm, optimiser, examples, held_out, methods, state, start, run, rank, world_size, args)
    except KeyboardInterrupt:
        finished = False
    print(f"{run} is complete: adapter, log.jsonl, curves.png, pairs.png, eval.json; {time.time() - began:.0f} s in all"
          if finished else f"stopped; go on with: python train.py --resume {run}", flush=True)
    if world_size > 1:
        torch.distributed.destroy_process_group()
    return 0 if finished else 1


def measured_training(vlm, optimiser, examples, held_out, methods, state, start, run, rank, world_size, args) -> bool:
    """Measure, train, measure again, leave everything in `run`. False if a signal stopped it."""
    settings = Settings(args.system_prompt_text, args.max_new_tokens, rows=args.eval_rows)
    file = run / "before.json"
    before = agree_on(json.loads(file.read_text()) if rank == 0 and file.is_file() else None, world_size)
    if held_out and before is None:
        with vlm.model.disable_adapter():
            before = evaluate(vlm, held_out, settings, rank, world_size, label="before training")
        if rank == 0:
            write_json(file, before)
        print_summary(summarise(before), title="before  ")
    if not train(vlm, optimiser, examples, held_out, methods, state, start, run, rank, world_size, args):
        return False
    after = evaluate(vlm, held_out, settings, rank, world_size, label="after training")
    if rank == 0:
        save_adapter(vlm, run)
        plot_curves(run)
        draw_pairs(vlm, run / "pairs.png", held_out or examples, settings)
        if held_out:
            write_json(run / "after.json", after)
            write_json(run / "eval.json", {"before": summarise(before), "after": summarise(after)})
            print_comparison(before, after)
    return True


def train(vlm, optimiser, examples, held_out, methods, state, start, run, rank, world_size, args) -> bool:
    """The loop: steps, the log, the probe (its labels are for curves.png only), checkpoints. False if a signal stopped it."""
    probe = held_out[::max(1, len(held_out) // 64)][:64]
    probe_settings = Settings(args.system_prompt_text, args.max_new_tokens, samples=1, diagnostics=(), rows=args.eval_rows)
    tqdm.write("step  " + "  ".join(f"{name:>11}" for name in COLUMNS) + "      s")
    bar = tqdm(range(start, args.steps), initial=start, total=args.steps, desc="training", disable=rank != 0)
    with bar, interruptions() as signals:
        for step in bar:
            log, pair = train_step(vlm, optimiser, examples, methods, step, rank, world_size, args)
            stop = mean_over_ranks({"signals": len(signals)}, world_size, vlm.device)["signals"] > 0      # all ranks agree
            done = step + 1
            tqdm.write(f"{done:4d}  " + "  ".join(f"{log[name]:11.3f}" for name in COLUMNS)
                       + f"  {log['seconds_data'] + log['seconds_rollout'] + log['seconds_update']:5.2f}")
            if log["truncated"] == 1.0:
                tqdm.write(f"warning: 100 % of the completions were cut off at {args.max_new_tokens} tokens; raise --max-new-tokens")
            if done % args.eval_every == 0 or done == args.steps:
                tqdm.write(pair)
                rows = evaluate(vlm, probe, probe_settings, rank, world_size, label="probe")
                for name in ("accuracy", "consistency"):
                    values = [r[f"greedy_{name}"] for r in rows if f"greedy_{name}" in r]
                    log |= {f"probe_{name}": sum(values) / len(values)} if values else {}
            if rank == 0:
                with open(run / "log.jsonl", "a") as file:
                    file.write(json.dumps({"step": done, **log}) + "\n")
                if done % args.save_every == 0 or done == args.steps or stop:
                    save_checkpoint(run, vlm, optimiser, done, state)
            if stop:
                return False
    return True


def lacks_label(example: Example) -> bool:
    """Whether the answer to this example needs a 3D box that it does not have."""
    return example.task not in ("orientation", "counting") and any(o.box3d is None for o in example.objects)


def held_out_questions(args: Namespace) -> list[Example]:
    """--eval-size questions of each task that training never sees."""
    try:
        return [e for task in tasks_of(args.task) for e in held_out_examples(args.data, task, args.eval_split, args.eval_size)]
    except DataError as error:
        raise DataError(f"{error}; or train without evaluation: --eval-size 0") from None


def draw_pairs(vlm: VLM, file: Path, examples: list[Example], settings: Settings) -> None:
    """pairs.png: six pairs with the trained model's greedy answers."""
    pairs = [evaluation_pair(e, settings.seed) for e in examples[::max(1, len(examples) // 6)][:6]]
    said = [answers(vlm, side, settings.system, settings, 0, 0) for side in ([p.x for p in pairs], [p.x_prime for p in pairs])]
    plot_pairs(file, pairs, [(y.answer, y_prime.answer) for (y,), (y_prime,) in zip(*said)])


def print_comparison(before: list[dict], after: list[dict]) -> None:
    """The final table: before, after, and the difference paired by question."""
    old, new = summarise(before), summarise(after)
    print(f"\n{'task':<13}{'metric':<20}{'before':<22}{'after':<22}{'difference':<22}n")
    for task, metrics in new.items():
        for metric, e in metrics.items():
            changes = [b[metric] - a[metric] for a, b in zip(before, after) if b["task"] == task and metric in b]
            print(f"{task:<13}{metric:<20}{shown(old[task][metric]):<22}{shown(e):<22}"
                  f"{difference(changes) if changes else '':<22}{e['n']}")


def difference(changes: list[float]) -> str:
    """Mean change with a 95 % interval over questions, in points: +12.3 [+8.1, +16.5]."""
    v = 100 * torch.tensor(changes, dtype=torch.float64)                                          # (n,)
    mean, half = v.mean().item(), 1.96 * v.std().item() / len(v) ** 0.5 if len(v) > 1 else float("inf")
    return f"{mean:+5.1f} [{mean - half:+.1f}, {mean + half:+.1f}]"


if __name__ == "__main__":
    sys.exit(run_command(main))
