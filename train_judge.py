"""Fine-tune a causal language model into a judge (judge.py) on the consistency set of equivalence.py, and measure it.

Idea (Consistency Reward Models, "Loss & Training"): supervised fine-tuning on analysis, reflection and verdict, cosine rate.
`--model` takes any causal language model folder or hub id; the paper takes Qwen2.5-Instruct at 2e-5. The default, `tiny`, is
a Qwen2 of 0.4 million weights trained from nothing, with a tokenizer of its own, in minutes on one CPU core.

differs from the paper: items are drawn anew for every step, so there are no epochs; a short warm-up; one process.

What is measured, on items that training never saw (equivalence.in_test) and on kinds of equivalence that it never saw, half
of them consistent: accuracy (an abstention is an error), beside exact match and a rule checker (rule_judge.py).

    python train_judge.py --out runs/judge                                # trains, then measures; runs/judge/judge.json
    python train_judge.py --measure runs/judge --n 200                    # measures only
    python train_judge.py --model Qwen/Qwen2.5-1.5B-Instruct --out runs/judge-1.5b
"""
from __future__ import annotations

import json
import math
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, Namespace
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from command import Parser, run
from equivalence import HELD_OUT, NEW_COMBINATIONS, TRAINED, Item, draw_set
from images import DataError
from judge import MINUS, PLUS, AnyJudge, Judge, judge_prompt, load_judge
from model import ModelError, first_line
from rule_judge import exact_match, rule_judge
from verifiers import TAG_ORDER

END, PAD = "<|im_end|>", "<|endoftext|>"
DEFAULTS = {True: dict(lr=3e-3, steps=2000, batch_size=16), False: dict(lr=2e-5, steps=1000, batch_size=32)}   # tiny? else
MAX_LENGTH = 4096                  # tokens of one item, as in the paper; the generated ones have about 100
CLIP_NORM = 1.0
CHUNK = 16                         # items per forward pass: memory and padding, not the result


# ------------------------------------------------------------------------------------------------- model and tokenizer
def build_tokenizer(vocab_size: int = 768) -> PreTrainedTokenizerFast:
    """A byte-level BPE. Every digit and every punctuation mark is a token of its own, with or without a space before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}|[^\s\p{L}\p{N}]|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    texts = [judge_prompt(bare, triple(item)) + item.thinking for item in draw_set(TRAINED, 2000, seed=10**6)]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=MAX_LENGTH)
    fast.add_tokens(TAG_ORDER)
    return fast


def tiny_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """0.4 million weights, random. A width of 96 needs a wider start than the default 0.02."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=MAX_LENGTH, tie_word_embeddings=True, initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}))


def base_judge(name: str, seed: int, device: torch.device) -> Judge:
    """The model to fine-tune, its tokenizer grown by the two verdict tokens."""
    torch.manual_seed(seed)                                          # rows of new tokens are drawn
    if name != "tiny" and not (Path(name) / "config.json").is_file() and (name.count("/") != 1 or Path(name).exists()):
        raise ModelError(f"--model {name}: no config.json there; give a checkpoint folder, a hub id such as "
                         "Qwen/Qwen2.5-1.5B-Instruct, or 'tiny'")
    try:
        tokenizer = build_tokenizer() if name == "tiny" else AutoTokenizer.from_pretrained(name)
        tokenizer.add_tokens([PLUS, MINUS], special_tokens=True)
        model = tiny_model(tokenizer, seed) if name == "tiny" else AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"--model {name}: {first_line(error)}") from error
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:             # some checkpoints have rows to spare
        model.resize_token_embeddings(len(tokenizer))
    return Judge(model.to(device), tokenizer)


# ------------------------------------------------------------------------------------------------------------ training
def triple(item: Item) -> tuple[str, str, str]:
    return item.question, item.response, item.reference


def to_batch(judge: Judge, items: list[Item]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, padded on the right, and labels: -100 except on analysis, reflection, verdict and end of turn. (R, S) each."""
    ids, labels = [], []
    end = judge.tokenizer.eos_token
    for item in items:
        prompt, target = (judge.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (
            judge_prompt(judge.tokenizer, triple(item)), item.thinking + (PLUS if item.consistent else MINUS) + end))
        assert len(prompt) + len(target) <= MAX_LENGTH, item
        ids.append(torch.tensor(prompt + target))
        labels.append(torch.tensor([-100] * len(prompt) + target))
    return pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)       # (R, S)


def sft_loss(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of the target tokens: (). Right padding needs no mask, nothing before it can see it."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]             # (R, S - 1, H)
    wanted = labels[:, 1:]                                                                          # (R, S - 1)
    logits = model.get_output_embeddings()(hidden[wanted != -100])                                  # (n, V)
    return F.cross_entropy(logits.float(), wanted[wanted != -100], reduction="sum")                 # ()


def rate_at(step: int, args: Namespace) -> float:
    """Linear warm-up over the first 4 %, then a cosine to zero."""
    warm = max(1, args.steps // 25)
    return args.lr * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, args.steps - warm))))


def train(judge: Judge, args: Namespace, folder: Path) -> None:
    """Leaves the judge in `folder`, every 100 steps and at the end, with a log."""
    device = judge.model.device
    optimiser = torch.optim.AdamW(judge.model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    judge.model.train()
    bar, began, recent = tqdm(range(args.steps), desc="training"), time.time(), []
    for step in bar:
        items = draw_set(TRAINED, args.batch_size, seed=step + 10**7 * args.seed)
        items.sort(key=lambda item: len(item.question + item.response))
        chunks = [to_batch(judge, items[i:i + CHUNK]) for i in range(0, len(items), CHUNK)]        # alike lengths pad less
        total, loss = sum(int((labels != -100).sum()) for _, labels in chunks), 0.0
        for ids, labels in chunks:                                                                  # (R, S), (R, S)
            part = sft_loss(judge.model, ids.to(device), labels.to(device)) / total                 # ()
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(judge.model.parameters(), CLIP_NORM, error_if_nonfinite=True)
        for group in optimiser.param_groups:
            group["lr"] = rate_at(step, args)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        recent = [*recent[-49:], loss]
        bar.set_postfix_str(f"loss {sum(recent) / len(recent):.3f}", refresh=False)
        if (step + 1) % 50 == 0 or step + 1 == args.steps:
            with open(folder / "log.jsonl", "a") as file:
                file.write(json.dumps({"step": step + 1, "loss": sum(recent) / len(recent), "seconds": time.time() - began}) + "\n")
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            judge.model.save_pretrained(folder)
            judge.tokenizer.save_pretrained(folder)
    judge.model.eval()


# ----------------------------------------------------------------------------------------------------------- measuring
def measure(judges: dict[str, AnyJudge], n: int, seed: int) -> list[dict]:
    """One row per kind of equivalence, on n test items each: the accuracy of each judge, and what it abstains from."""
    rows = []
    for kind in tqdm((*TRAINED, *HELD_OUT), desc="measuring"):
        items = draw_set((kind,), n, seed, split="test")
        row = {"kind": kind, "group": "new items" if kind in TRAINED else "new combination" if kind in NEW_COMBINATIONS
               else "new part", "n": n}
        for name, judge in judges.items():
            verdicts = judge([triple(item) for item in items])
            right = [v.hard == item.consistent for v, item in zip(verdicts, items)]
            row |= {name: sum(right) / n, f"{name}_abstains": sum(v.hard is None for v in verdicts) / n}
            for key, wanted in (("sure_right", True), ("sure_wrong", False)):                # |r_soft| of each verdict
                row[f"{name}_{key}"] = [abs(v.soft) for v, r in zip(verdicts, right) if r is wanted and v.soft is not None]
        rows.append(row)
    return rows


def print_table(rows: list[dict], names: list[str]) -> None:
    """Accuracy in %, by kind, and the mean over the kinds of a group with a 95 % interval over items."""
    print(f"\n{'':<20}" + "".join(f"{name:>15}" for name in names) + f"{'n':>8}")
    for group in ("new items", "new combination", "new part"):
        own = [row for row in rows if row["group"] == group]
        for row in own:
            print(f"  {row['kind']:<18}" + "".join(f"{100 * row[name]:>15.1f}" for name in names) + f"{row['n']:>8}")
        n = sum(row["n"] for row in own)
        means = [sum(row[name] for row in own) / len(own) for name in names]
        halves = [1.96 * sum(row[name] * (1 - row[name]) / row["n"] for row in own) ** 0.5 / len(own) for name in names]
        print(f"{group:<20}" + "".join(f"{100 * m:>8.1f} +- {100 * h:<3.1f}" for m, h in zip(means, halves)) + f"{n:>8}\n")
    print("abstained, all kinds  " + ", ".join(
        f"{name} {100 * sum(row[f'{name}_abstains'] for row in rows) / len(rows):.1f} %" for name in names))
    for key, when in (("sure_right", "right"), ("sure_wrong", "wrong")):
        sure = sorted(x for row in rows for x in row[f"judge_{key}"])
        if sure:
            print(f"judge, |r_soft| where it is {when}: mean {sum(sure) / len(sure):.3f}, lowest tenth below "
                  f"{sure[len(sure) // 10]:.3f}, n = {len(sure)}")


# ----------------------------------------------------------------------------------------------------------------- run
def parse_arguments(argv: list[str] | None = None) -> Namespace:
    p = Parser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    p.add_argument("--model", default="tiny", help="causal language model to fine-tune: folder, hub id, or tiny (from nothing)")
    p.add_argument("--out", default="runs/judge", metavar="FOLDER", help="the judge, its log and its measurement")
    p.add_argument("--measure", metavar="FOLDER", help="measure this judge instead of training one")
    p.add_argument("--steps", type=int, help=f"updates; {DEFAULTS[True]['steps']} for tiny, else {DEFAULTS[False]['steps']}")
    p.add_argument("--batch-size", type=int, help="items a step")
    p.add_argument("--lr", type=float, help=f"peak rate; {DEFAULTS[True]['lr']} for tiny, else the paper's {DEFAULTS[False]['lr']}")
    p.add_argument("--n", type=int, default=100, help="items per kind to measure on")
    p.add_argument("--seed", type=int, default=0, help="of the weights and the training items; measured items are the same for all")
    args = p.parse_args(argv)
    for name, value in DEFAULTS[args.model == "tiny"].items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    for name, least in (("steps", 1), ("batch_size", 2), ("n", 2), ("seed", 0)):
        if getattr(args, name) < least:
            raise DataError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    if not args.lr > 0:
        raise DataError(f"--lr {args.lr}: must be above 0")
    if not args.measure and Path(args.out).exists() and (not Path(args.out).is_dir() or any(Path(args.out).iterdir())):
        raise DataError(f"--out {args.out} exists and is not empty; give another name, or measure it by --measure {args.out}")
    return args


def main(argv: list[str] | None = None) -> int:
    args, began = parse_arguments(argv), time.time()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(args.measure or args.out)
    if args.measure:
        judge = load_judge(args.measure, device)
    else:
        judge = base_judge(args.model, args.seed, device)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{args.model}: {sum(p.numel() for p in judge.model.parameters()) / 1e6:.2f} million weights, {args.steps} steps of "
              f"{args.batch_size} items, rate {args.lr}, seed {args.seed}", flush=True)
        train(judge, args, folder)
        print(f"trained in {time.time() - began:.0f} s")
    judges = {"exact": exact_match, "rules": rule_judge, "judge": judge}
    rows = measure(judges, args.n, seed=1)
    (folder / "judge.json").write_text(json.dumps({"settings": vars(args), "rows": rows}, indent=1))
    print_table(rows, list(judges))
    print(f"{folder}: judge, log.jsonl, judge.json; {time.time() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
