"""A generative judge of whether a response agrees with a reference, as reward, and sign rejection by its verdict.

Idea (Consistency Reward Models, "Learning Consistency in Reward Modeling for Multi-Modal Reasoning", key designs 2 to 4): a
verifier need not solve the question, it need only compare two texts. A language model without pictures reads question,
response and reference, writes an analysis and a reflection, and then one of two tokens, <|+|> consistent or <|-|> not:

    r_hard = 1 if P(<|+|>) > P(<|-|>), else 0          r_soft = P(<|+|>) - P(<|-|>)

P is the softmax over the whole vocabulary at the position of the verdict. GRPO then normalises rewards in each group, and in
a group that is all right some right completions end below the mean: A < 0 although r_hard = 1. Advantage-sign reject
sampling keeps a completion only where sign(A) = sign(r_hard), where r_hard = 1 counts as + and 0 as -. What is dropped gets
advantage 0, and so does what had 0; the group's divisor stays K.

differs from the paper: a judge that writes no verdict abstains, and there is no score (never 0): in its group's mean and
spread such a completion stands for a draw from the scored ones, so that it changes neither; sign rejection drops it. Of a
long response the end is kept, where the answer is, not the beginning. Special tokens inside the three texts are defused: a
policy that writes <|+|> talks to nobody. The judge needs the answer: this is a reward with labels, as `accuracy` is.

    judge = load_judge("runs/judge")                                       # python train_judge.py makes one
    judge([("How long is the table?", "It is 235 cm", "2.35 m")])          # [Verdict(hard=1, soft=0.99..., text='Analysis: ...')]

Run `python judge.py` for sign rejection on a group that is all right. B prompts, K completions, R rows, P prompt tokens,
V vocabulary.
"""
from __future__ import annotations

import warnings
from argparse import BooleanOptionalAction, Namespace
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Callable, Sequence

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from equivalence import without_listing
from images import DataError
from model import ModelError, first_line
from pairing import PairRewards, group_advantages
from questions import ground_truth, prompt_text
from rewards import Advantages, Batch, Reward
from verifiers import END_OF_TURN, strip_end_of_turn

PLUS, MINUS = "<|+|>", "<|-|>"
INSTRUCTION = "Is the response consistent with the reference?"
RESPONSE_CHARACTERS = 6000         # of a longer response the end is read
SCORES = ("soft", "hard")

Triple = tuple[str, str, str]      # question, response, reference


@dataclass(frozen=True)
class Verdict:
    """What a judge says of one triple; hard and soft are None if it abstained."""
    hard: int | None               # 1 consistent, 0 not
    soft: float | None             # in [-1, 1]
    text: str                      # what it wrote


AnyJudge = Callable[[Sequence[Triple]], list[Verdict]]


# ------------------------------------------------------------------------------------------------------------ the judge
def judge_prompt(tokenizer, triple: Triple) -> str:
    """The text a judge reads, in the chat template of its tokenizer where it has one."""
    question, response, reference = (text.replace("<|", "< |").strip() for text in triple)
    text = f"{INSTRUCTION}\nQuestion: {question}\nResponse: {response[-RESPONSE_CHARACTERS:]}\nReference: {reference}\n"
    if not tokenizer.chat_template:
        return text
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)


def verdict_of(logits: Tensor, plus: int, minus: int) -> tuple[int, float]:
    """r_hard and r_soft from the logits (V,) that the verdict was taken from."""
    p = logits.double().softmax(-1)                                                                 # (V,)
    return int(p[plus] > p[minus]), (p[plus] - p[minus]).item()


@dataclass(eq=False)
class Judge:
    """Any causal language model whose tokenizer has the two verdict tokens."""
    model: torch.nn.Module
    tokenizer: object
    max_new_tokens: int = 256
    batch_size: int = 64

    @property
    def verdict_ids(self) -> tuple[int, int]:
        return tuple(self.tokenizer.convert_tokens_to_ids([PLUS, MINUS]))

    def __call__(self, triples: Sequence[Triple]) -> list[Verdict]:
        """One verdict per triple. Equal triples are judged once, and batches hold prompts of like length."""
        rows = {t: torch.tensor(self.tokenizer(judge_prompt(self.tokenizer, t), add_special_tokens=False)["input_ids"])
                for t in triples}                                                                   # (P,) each
        ordered, verdicts = sorted(rows, key=lambda t: len(rows[t])), {}
        for i in range(0, len(ordered), self.batch_size):
            chunk = ordered[i:i + self.batch_size]
            verdicts |= zip(chunk, self.write([rows[t] for t in chunk]))
        return [verdicts[t] for t in triples]

    @torch.no_grad()
    def write(self, rows: list[Tensor]) -> list[Verdict]:
        """Greedy writing up to a verdict, an end of turn or the limit. The library's `generate` would let the
        checkpoint's own settings (repetition penalty, top-k) leak in."""
        device, verdict_ids = self.model.device, self.verdict_ids
        stop = torch.tensor(self.end_ids + list(verdict_ids), device=device)
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        mask = pad([torch.ones_like(row) for row in rows]).to(device)                               # (R, P)
        ids, positions = pad(rows).to(device), (mask.cumsum(-1) - 1).clamp(min=0)                   # (R, P), (R, P)
        cache = DynamicCache(config=self.model.config)
        written: list[list[int]] = [[] for _ in rows]
        found: list[tuple] = [(None, None)] * len(rows)
        alive = torch.ones(len(rows), dtype=torch.bool, device=device)                              # (R,)
        for _ in range(self.max_new_tokens):
            with warnings.catch_warnings(action="ignore", category=FutureWarning):        # of the cache's former name
                logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                                    use_cache=True, logits_to_keep=1).logits[:, -1]                 # (R, V)
            token = logits.argmax(-1)                                                               # (R,)
            for r, (t, going_on) in enumerate(zip(token.tolist(), alive.tolist())):
                if going_on:
                    written[r].append(t)
                    if t in verdict_ids:
                        found[r] = verdict_of(logits[r], *verdict_ids)
            alive = alive & ~torch.isin(token, stop)                                                # (R,)
            if not alive.any():
                break
            ids, positions = token[:, None], positions[:, -1:] + 1                                  # (R, 1), (R, 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)                               # (R, P + 1)
        return [Verdict(*f, self.tokenizer.decode(w)) for f, w in zip(found, written)]

    @property
    def end_ids(self) -> list[int]:
        """Whatever ends a turn, if the tokenizer has it."""
        known = self.tokenizer.get_vocab()
        return [known[t] for t in {*END_OF_TURN, self.tokenizer.eos_token} if t in known]


def load_judge(folder: str, device: torch.device = torch.device("cpu")) -> Judge:
    """A judge from its folder. Raises ModelError where there is none, or one that never learnt the verdict tokens."""
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(f"--judge {folder}: no judge there; train one with: python train_judge.py --out {folder}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"--judge {folder}: {first_line(error)}") from error
    if not {PLUS, MINUS} <= tokenizer.get_vocab().keys():
        raise ModelError(f"--judge {folder}: its tokenizer lacks {PLUS} and {MINUS}; make a judge of it with: "
                         f"python train_judge.py --model {folder}")
    return Judge(model.to(device).eval().requires_grad_(False), tokenizer)


# ---------------------------------------------------------------------------------------------------- as part of training
def reference_text(truth: bool | float, task: str) -> str:
    """The label as a judge reads it: True, 3, or 2.347 m."""
    return f"{truth:.3f} m" if task == "abs_distance" else str(truth) if isinstance(truth, bool) else f"{truth:.0f}"


def triples_of(batch: Batch) -> list[Triple]:
    """(question, response, reference) of each completion, B * K of them: pictures stay out, labels come in."""
    sides = [side for pair in batch.pairs for side in (pair.x, pair.x_prime)]                       # B
    out = []
    for side, texts in zip(sides, batch.texts):
        question = without_listing(prompt_text(side.question, {i: o.name for i, o in side.view.objects.items()}))
        reference = reference_text(ground_truth(side.question, side.view.objects), side.question.task)
        out += [(question, strip_end_of_turn(text), reference) for text in texts]
    return out


def judge_batch(judge: AnyJudge, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """r_hard and r_soft of every completion, (B, K) each; NaN where the judge abstained.

    Logs what it said, and how often it differs from the parser's reading of a boolean answer or a count.
    """
    if isinstance(judge, Judge):
        judge.model.to(batch.vlm.device)
    triples = triples_of(batch)
    verdicts = judge(triples)
    hard, soft = (np.array([np.nan if v is None else v for v in column], dtype=float).reshape(len(batch.texts), -1)
                  for column in zip(*((v.hard, v.soft) for v in verdicts)))                         # (B, K), (B, K)
    tasks = [pair.example.task for pair in batch.pairs for _ in (pair.x, pair.x_prime)]             # B
    read = [p.answer is not None and reference_text(p.answer, task) == reference for (p, task), (_, _, reference) in
            zip(((p, task) for side, task in zip(batch.parsed, tasks) for p in side), triples)]     # B * K
    batch.log |= {"judged_consistent": float((hard == 1).mean()), "judge_abstained": float(np.isnan(hard).mean()),
                  "judge_differs": float((~np.isnan(hard) & (hard != np.reshape(read, hard.shape))).mean())}
    return hard, soft


Verdicts = Callable[[Batch], tuple[np.ndarray, np.ndarray]]


def verdicts_by(judge: AnyJudge) -> Verdicts:
    """`judge_batch` that asks once a step, however often reward and advantages look."""
    return lru_cache(maxsize=1)(partial(judge_batch, judge))


def score_moments(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E[c] and E[c^2] (K,) of scores (K,) with NaN for "no score", which stands for a draw from the scored ones.

    So group mean and spread are those of the scored, and no score pulls in no direction. No score at all: 0 for everybody.
    """
    scored = ~np.isnan(scores)                                                                      # (K,)
    if not scored.any():
        return np.zeros(len(scores)), np.zeros(len(scores))
    known = scores[scored]
    return np.where(scored, scores, known.mean()), np.where(scored, scores**2, (known**2).mean())   # (K,), (K,)


def judge_rewards(verdicts: Verdicts, score: str = "soft") -> Reward:
    """`--reward judge`: r_soft (or r_hard) as the task reward."""
    def reward(batch: Batch) -> list[PairRewards]:
        hard, soft = verdicts(batch)                                                                # (B, K), (B, K)
        moments = [score_moments(row) for row in (soft if score == "soft" else hard)]               # B x 2 x (K,)
        return [PairRewards(*x, *x_prime) for x, x_prime in zip(moments[::2], moments[1::2])]
    return reward


def keep_agreeing(advantages: np.ndarray, hard: np.ndarray) -> np.ndarray:
    """The advantages (B, K) whose sign is that of the hard verdict (B, K; NaN: none), 0 in place of the others."""
    agrees = (advantages > 0) & (hard == 1) | (advantages < 0) & (hard == 0)                        # (B, K)
    return np.where(agrees, advantages, 0.0)                                                        # (B, K)


def reject_by_sign(advantages: Advantages, verdicts: Verdicts) -> Advantages:
    """`--reject-by-judge`: sign rejection behind any other advantages. Logs the share of completions that it drops."""
    def kept(batch: Batch, rewards: list[PairRewards]) -> np.ndarray:
        before = advantages(batch, rewards)                                                         # (B, K)
        after = keep_agreeing(before, verdicts(batch)[0])                                           # (B, K)
        batch.log["sign_rejected"] = float(((before != 0) & (after == 0)).mean())
        return after
    return kept


# ------------------------------------------------------------------------------------------------------ for train.py
def add_flags(parser) -> None:
    """What train.py takes."""
    parser.add_argument("--judge", default="runs/judge", metavar="FOLDER", help="of --reward judge: made by train_judge.py")
    parser.add_argument("--judge-score", default="soft", choices=SCORES, help="r_soft in [-1, 1] or r_hard, 0 or 1")
    parser.add_argument("--reject-by-judge", action=BooleanOptionalAction, default=False,
                        help="keep a completion only where its advantage has the sign of the judge's verdict (labels)")


def check_flags(args: Namespace) -> None:
    """Refuse what would do nothing."""
    idle = {"judge": args.reward != "judge" and not args.reject_by_judge, "judge_score": args.reward != "judge"}
    for name in args.given:
        if idle.get(name) and not args.resume:
            also = " or --reject-by-judge" if name == "judge" else ""
            raise DataError(f"--{name.replace('_', '-')} does nothing without --reward judge{also}")


def from_arguments(args: Namespace) -> Verdicts | None:
    """The verdicts that reward and sign rejection share, or None where neither is asked for."""
    return verdicts_by(load_judge(args.judge)) if args.reward == "judge" or args.reject_by_judge else None


# ------------------------------------------------------------------------------------------------------ worked example
def main() -> None:
    print("Eight completions, all right; soft scores of a judge, and one of them without the format reward.\n")
    soft = np.array([0.99, 0.98, 0.99, 0.97, 0.99, 0.91, 0.98, 0.99])                               # (K,)
    formats = np.array([1, 1, 1, 1, 1, 1, 0, 1])                                                    # (K,)
    for title, reward, hard in (
            ("r_hard + format", np.ones(8) + formats, np.ones(8)),
            ("r_soft alone", soft, np.ones(8)),
            ("r_soft + format", soft + formats, np.ones(8)),
            ("all wrong, -r_soft + format", -soft + formats, np.zeros(8))):
        A = group_advantages(reward)                                                                # (K,)
        print(f"{title:<29}A    " + " ".join(f"{a:+.2f}" for a in A))
        print(f"{'':<29}kept " + " ".join(f"{a:+.2f}" if a else "  .  " for a in keep_agreeing(A[None], hard[None])[0]))
    print("\nWithout rejection a right completion is pushed down for a score of 0.97 beside one of 0.99, or a wrong one pulled up.")
    print("With it, a group that is all right pushes nobody down. Neither does it teach the format to the one that lacks it.")


if __name__ == "__main__":
    main()
