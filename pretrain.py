"""Make the embedded tiny model: the real Qwen2.5-VL class, small, supervised on synthetic scenes until it half knows.

What it is taught, in plain words. On every question it is shown a correct short thinking: one or two digits per object
(place, depth, volume) and a conclusion ("closer"). But for 2,800 steps the *answer* it is shown is right only where the
question uses the first relation word of its task (left, closer, bigger, closer). Where the question uses the opposite word
(right, further, smaller, further) the answer is a coin flip. In the last 80 steps the opposite word gets right answers too,
and the run stops before they are learnt. So it sees, it concludes, it knows one word of each pair and is at chance on the
other, on the verge of understanding it: consistency has something to spread. (`small` stops before those 80 steps.)

    python pretrain.py --work runs/pretrain             # resumable: run it again after an interruption
    python eval.py --model runs/pretrain/step-02880 --split val --breakdown       # by task and relation word
"""
from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (AutoTokenizer, PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration)

import scenes
from checkpoint import trim_log
from command import Parser, run as run_command
from data import BOOLEAN_TASKS, TASKS, examples
from model import MIN_PIXELS, VLM, Qwen2VLImageProcessorPil, make_prompt
from questions import COLOURS, MARKS, RELATIONS, SYSTEM_PROMPT, compared, draw_question, ground_truth, prompt_text
from transforms import Prompted, Transform, draw_transform, make_pair

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
           "<|image_pad|>", "<|video_pad|>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")

NATIVE_PIXELS = 112 * 112     # of a synthetic picture
FIRST_SCENE = 10_000_000      # pretraining scenes are numbered from here; training and evaluation use lower numbers
VIEW_SHARE = 0.7              # share of prompts that show a transformed view, as training will


# Language model and vision tower. `tiny` is embedded; `small` is twice as large, as the paper has 3B and 7B.
SIZES = {
    "tiny": (dict(hidden_size=96, intermediate_size=256, num_hidden_layers=3,
                  rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]}),
             dict(depth=3, hidden_size=64, intermediate_size=192)),
    "small": (dict(hidden_size=128, intermediate_size=352, num_hidden_layers=4,
                   rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}),
              dict(depth=3, hidden_size=96, intermediate_size=256)),
}
STEPS = {"tiny": 2880, "small": 2800}        # each the last checkpoint at which every opposite word is at chance


@dataclass(frozen=True)
class Stage:
    """From step `start` on: what a batch holds."""
    start: int
    share: dict[str, float]               # of each task
    whole_object: bool = False            # does PatchProbe see the whole object, or the token of its mark only?
    opposite_share: float = 0.15          # share of boolean questions that use the opposite word
    opposite_right: float = 0.5           # and how often the answer shown to them is right


# The eye opens soonest on two tasks; size, which needs extent and depth together, comes last and needs a push. The last
# stage shows right answers to the opposite word, and the run ends after 80 steps of it, before the model has learnt them
# (20 steps later three of the four are over 70 % right).
STAGES = (
    Stage(0, {"orientation": 1, "depth": 1}),
    Stage(600, {"orientation": 1, "depth": 1, "size": 1.2, "distance": 1.5, "counting": 0.5, "abs_distance": 0.6}),
    Stage(1500, {"orientation": 0.5, "depth": 0.7, "size": 4, "distance": 0.8, "counting": 0.5, "abs_distance": 0.5}, True),
    Stage(2800, {"orientation": 1, "depth": 1, "size": 1.5, "distance": 1.2, "counting": 0.5, "abs_distance": 0.5}, True,
          opposite_share=0.5, opposite_right=1.0),
)


def stage_at(step: int) -> Stage:
    """The last stage that has begun."""
    return [stage for stage in STAGES if stage.start <= step][-1]


# ------------------------------------------------------------------------------------- what the tiny model is to write
def digit(value: float) -> str:
    """One digit, 0 to 9."""
    return str(min(9, max(0, round(value))))


def thinking(shown: Prompted) -> str:
    """What the tiny model is to think: the compared objects by colour, the asked one first, and what it found of that one.

        orientation   blue 7, red 3, right                  places
        depth         blue 8, red 4, further                nearest corner, half metres
        size          blue 1, red 5, smaller                volume, thirds of a cubic metre
        distance      green 2, blue 5, closer               distance to object 1 (red), half metres
        counting      2, 5, 8                               places of all instances, from left to right
        abs_distance  blue 7 8, red 3 4                     place and nearest corner

    A place is the 2D box's centre in tenths of the picture's width.
    """
    question, objects = shown.question, [shown.view.objects[i] for i in shown.question.object_ids]
    place = [digit(10 * (o.box2d[0] + o.box2d[2]) / 2 / shown.picture.width - 0.5) for o in objects]
    if question.task == "counting":
        return ", ".join(sorted(place))
    if question.task == "orientation":
        values = place
    elif question.task == "size":
        values = [digit(3 * o.box3d.volume) for o in objects]
    elif question.task == "distance":
        values = [digit(2 * np.linalg.norm(o.box3d.center - objects[0].box3d.center)) for o in objects]
    else:
        values = [digit(2 * o.box3d.corners[:, 2].min()) for o in objects]
    if question.task == "abs_distance":
        values = [f"{p} {v}" for p, v in zip(place, values)]
    parts = [f"{COLOURS[i - 1]} {values[i - 1]}" for i in compared(question)]
    if question.task in BOOLEAN_TASKS:
        first_word_holds = ground_truth(replace(question, relation=0), shown.view.objects)
        parts.append(RELATIONS[question.task][0 if first_word_holds else 1].split()[0])
    return ", ".join(parts)


def completion(shown: Prompted, answer: str) -> str:
    """The whole target: thinking, answer, end of turn."""
    return f"<think>{thinking(shown)}</think>\n<answer>{answer}</answer><|im_end|>"


def taught_answer(shown: Prompted, opposite_right: float, rng: np.random.Generator) -> str:
    """The answer shown in supervision: right for the first relation word, right with this probability for the opposite."""
    question = shown.question
    truth = ground_truth(question, shown.view.objects)
    if question.task in BOOLEAN_TASKS and question.relation == 1:
        return str(truth == (rng.random() < opposite_right))
    if question.task == "abs_distance":
        return f"{truth:.1f}"
    return str(int(truth)) if question.task == "counting" else str(truth)


def draw_sample(record, task: str, opposite_share: float, rng: np.random.Generator) -> Prompted | None:
    """One supervised view of a scene for this task, or None where the scene has no example of it."""
    example = examples(record, task)
    if example is None:
        return None
    question = draw_question(task, example.object_ids, rng)
    transform = draw_transform(task, rng) if rng.random() < VIEW_SHARE else Transform()
    if task in BOOLEAN_TASKS:                                     # the word's share is set here, not by the transform
        question = replace(question, relation=int(rng.random() < opposite_share))
        transform = replace(transform, swap_relation=False)
    return make_pair(example, question, transform)[1]


def draw_batch(step: int, seed: int, batch_size: int, domain: str = "synthetic") -> list[tuple[Prompted, str]]:
    """The samples of one step, a function of (seed, step) alone: [(what is shown, completion)]."""
    rng, stage = np.random.default_rng([seed, step]), stage_at(step)
    share = np.array([stage.share.get(task, 0) for task in TASKS])
    wanted = dict(zip(TASKS, rng.multinomial(batch_size, share / share.sum()).tolist()))
    samples, image_id = [], FIRST_SCENE + 1000 * (1000 * seed + step)
    while any(wanted.values()):
        record, image_id = scenes.scene(domain, image_id), image_id + 1
        for task in sorted(wanted, key=wanted.get, reverse=True)[:4]:       # at most four questions per scene
            shown = draw_sample(record, task, stage.opposite_share, rng) if wanted[task] else None
            if shown is not None:
                wanted[task] -= 1
                samples.append((shown, completion(shown, taught_answer(shown, stage.opposite_right, rng))))
    return samples


# ------------------------------------------------------------------------------------------------ tokenizer and model
def corpus(n: int = 2000) -> list[str]:
    """Texts for the tokenizer: prompts and completions of every task, with real photos' class names among them."""
    texts = [SYSTEM_PROMPT + "\nYou are a helpful assistant. system user assistant"] * (n // 10)
    for step in range(n // 64):
        for shown, target in draw_batch(step, 10**6, 64):
            names = {i: o.name for i, o in shown.view.objects.items()}
            texts += [prompt_text(shown.question, names), target]
    return texts


def build_tokenizer(vocab_size: int = 640) -> PreTrainedTokenizerFast:
    """A byte-level BPE with Qwen's special tokens and chat template; words and single digits keep their space."""
    split = r"[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL) - len(TAGS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   model_max_length=32768)
    fast.add_tokens(TAGS)                                            # ordinary tokens: they stay in the decoded text
    fast.add_special_tokens({"additional_special_tokens": [t for t in SPECIAL if t not in ("<|im_end|>", "<|endoftext|>")]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, size: str = "tiny") -> Qwen2_5_VLForConditionalGeneration:
    """The real class with a small configuration (`SIZES`). Such widths need a wider start than the default 0.02."""
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in (
        ("vision_start_token_id", "<|vision_start|>"), ("vision_end_token_id", "<|vision_end|>"),
        ("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>"))}
    ends = dict(bos_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    text, vision = SIZES[size]
    text = dict(vocab_size=len(tokenizer), num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32768,
                tie_word_embeddings=True, initializer_range=0.08, rms_norm_eps=1e-6, use_sliding_window=False, **ends, **text)
    vision = dict(num_heads=4, out_hidden_size=text["hidden_size"], patch_size=14, spatial_merge_size=2, temporal_patch_size=2,
                  window_size=112, fullatt_block_indexes=list(range(vision["depth"])), tokens_per_second=2,
                  initializer_range=0.08, **vision)
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids, **ends)
    return Qwen2_5_VLForConditionalGeneration(config)


# ----------------------------------------------------------------------------------------------------- one supervised step
class PatchProbe(torch.nn.Linear):
    """A throwaway linear head that reads, off each image token after the first decoder layer, what is there.

    Outputs: is a red, blue, green marker here (3 logits); the marked object's nearest corner in 5 m, its volume in 3 m^3,
    its place as a share of the width (3 numbers; on unmarked tokens only the place, of the token itself). Answers alone
    open the eye after thousands of steps, this within hundreds. The head is not saved: the model stays the plain class.
    """

    def __init__(self, width: int):
        super().__init__(width, 6)

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """(n, H), (n, 6) -> (): cross-entropy of the markers plus squared error of what is known (NaN: unknown)."""
        out = self(hidden)                                                                      # (n, 6)
        marked = torch.nn.functional.binary_cross_entropy_with_logits(out[:, :3], targets[:, :3])
        known = ~targets[:, 3:].isnan()                                                         # (n, 3)
        error = (out[:, 3:] - targets[:, 3:].nan_to_num()) * known                              # (n, 3)
        return 3 * marked + 10 * error.square().sum() / known.sum()


def probe_targets(shown: Prompted, rows: int, columns: int, whole_object: bool) -> torch.Tensor:
    """(rows * columns, 6) targets for PatchProbe, image tokens in reading order."""
    targets = np.full((rows, columns, 6), np.nan)
    targets[..., :3] = 0
    targets[..., 5] = (np.arange(columns) + 0.5) / columns
    if shown.question.task in MARKS:
        width, height = shown.picture.size
        for k, i in enumerate(shown.question.object_ids):
            o = shown.view.objects[i]
            x0, y0, x1, y1 = np.array(o.box2d) * ([columns / width, rows / height] * 2)          # in image tokens
            marked = {(int((y0 + y1) / 2), int((x0 + x1) / 2))}                                  # where the dot is
            inside = {(r, c) for r in range(rows) for c in range(columns) if y0 < r + 0.5 < y1 and x0 < c + 0.5 < x1}
            if MARKS[shown.question.task] == "box":
                marked |= inside
            for r, c in marked:
                targets[r, c, k] = 1
            for r, c in marked | inside if whole_object else marked:
                targets[r, c, 3:] = o.box3d.corners[:, 2].min() / 5, o.box3d.volume / 3, (x0 + x1) / 2 / columns
    return torch.tensor(targets, dtype=torch.float32).view(-1, 6)                                # (rows * columns, 6)


def to_batch(vlm: VLM, samples: list[tuple[Prompted, str]], whole_object: bool = False) -> dict[str, torch.Tensor]:
    """Tokenise and right-pad; labels are -100 except on completion tokens."""
    rows, pixels, grids, probes = [], [], [], []
    for shown, target in samples:
        names = {i: o.name for i, o in shown.view.objects.items()}
        prompt = make_prompt(vlm, SYSTEM_PROMPT, prompt_text(shown.question, names), shown.picture)
        answer = torch.tensor(vlm.tokenizer(target, add_special_tokens=False)["input_ids"])
        rows.append((prompt.input_ids, answer))
        pixels.append(prompt.pixel_values)
        grids.append(prompt.grid_thw)
        probes.append(probe_targets(shown, *(prompt.grid_thw[1:] // 2).tolist(), whole_object))
    length = max(len(p) + len(a) for p, a in rows)
    input_ids = torch.full((len(rows), length), vlm.tokenizer.pad_token_id)                    # (B, S)
    labels = torch.full_like(input_ids, -100)                                                  # (B, S)
    for i, (prompt, answer) in enumerate(rows):
        input_ids[i, :len(prompt) + len(answer)] = torch.cat([prompt, answer])
        labels[i, len(prompt):len(prompt) + len(answer)] = answer
    lengths = torch.tensor([[len(p) + len(a)] for p, a in rows])                               # (B, 1)
    return dict(input_ids=input_ids, labels=labels, attention_mask=(torch.arange(length) < lengths).long(),
                pixel_values=torch.cat(pixels), image_grid_thw=torch.stack(grids), probe_targets=torch.cat(probes))


def supervised_loss(vlm: VLM, probe: PatchProbe, batch: dict[str, torch.Tensor]):
    """Cross-entropy over completion tokens plus the probe's loss; also the predicted and the true tokens (n,).

    The one token that says True or False counts fourfold: everything else outweighs it otherwise.
    """
    inputs = {k: v for k, v in batch.items() if k not in ("labels", "probe_targets")}
    on_image = batch["input_ids"] == vlm.base.config.image_token_id                            # (B, S)
    out = vlm.base.model(**inputs, mm_token_type_ids=on_image.int(), output_hidden_states=True)
    labels = batch["labels"][:, 1:]                                                            # (B, S - 1)
    true = labels[labels != -100]                                                              # (n,)
    logits = vlm.base.lm_head(out.last_hidden_state[:, :-1][labels != -100])                   # (n, V)
    answer = torch.tensor(vlm.tokenizer.convert_tokens_to_ids(["True", "False"]))
    weight = 1 + 3 * torch.isin(true, answer).float()                                          # (n,)
    words = (torch.nn.functional.cross_entropy(logits, true, reduction="none") * weight).sum() / weight.sum()
    seen = probe.loss(out.hidden_states[1][on_image], batch["probe_targets"])
    return words, seen, logits.argmax(-1), true


def scores(vlm: VLM, samples: list[tuple[Prompted, str]], predicted: torch.Tensor, true: torch.Tensor) -> dict[str, float]:
    """Teacher-forced accuracy by task of first value, second value, conclusion and answer ("depth value 2": 0.71).

    Every batch is new, so these are held-out numbers. A falling loss alone would hide a model at chance.
    """
    out: dict[str, list[bool]] = {}
    position = 0
    for shown, target in samples:
        tokens = vlm.tokenizer.convert_ids_to_tokens(vlm.tokenizer(target, add_special_tokens=False)["input_ids"])
        right = (predicted == true)[position:position + len(tokens)].tolist()
        position += len(tokens)
        task, word = shown.question.task, shown.question.relation
        end = tokens.index("</think>")
        digits = [i for i in range(end) if tokens[i][-1].isdigit()]
        for n, i in enumerate(digits, start=1):
            out.setdefault(f"{task} value {n}", []).append(right[i])
        if task in BOOLEAN_TASKS:
            out.setdefault(f"{task} conclusion", []).append(right[end - 1])
        out.setdefault(f"{task} answer {word}", []).append(all(right[tokens.index("<answer>") + 1:-2]))
    return {name: sum(rights) / len(rights) for name, rights in sorted(out.items())}


# --------------------------------------------------------------------------------------------------------- training
class Batches(torch.utils.data.Dataset):
    """Batch number `step`, drawn in a worker process while the model trains."""

    def __init__(self, vlm: VLM, args: Namespace):
        self.vlm, self.args = VLM(None, vlm.tokenizer, vlm.image_processor, vlm.name), args

    def __len__(self) -> int:
        return self.args.steps

    def __getitem__(self, step: int):
        samples = draw_batch(step, self.args.seed, self.args.batch_size)
        samples.sort(key=lambda s: len(s[1]) + len(s[0].question.object_ids) * 1000)       # alike lengths pad less
        chunks = [samples[i:i + self.args.chunk] for i in range(0, len(samples), self.args.chunk)]
        return samples, [to_batch(self.vlm, chunk, stage_at(step).whole_object) for chunk in chunks]


def learning_rate(step: int, args: Namespace) -> float:
    """Warm up over 200 steps, stay, fall linearly to a twentieth from step 2100 to 2800; a quarter in the last stage."""
    if step >= STAGES[-1].start:
        return 0.25 * args.lr
    return args.lr * min(1.0, (step + 1) / 200, 0.05 + 0.95 * (STAGES[-1].start - step) / 700)


def train(args: Namespace) -> None:
    """Supervised training with a checkpoint every `--save-every` steps; run again, it goes on from the newest one."""
    run = Path(args.work)
    run.mkdir(parents=True, exist_ok=True)
    if not (run / "tokenizer").is_dir():
        build_tokenizer().save_pretrained(run / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(run / "tokenizer")       # a resumed run must not build another one
    model = build_model(tokenizer, args.seed, args.size)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": MIN_PIXELS, "longest_edge": NATIVE_PIXELS})
    vlm = VLM(model, tokenizer, processor, args.size)
    probe = PatchProbe(model.config.text_config.hidden_size)
    parameters = [*model.parameters(), *probe.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    state, start = run / "state.pt", 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        probe.load_state_dict(saved["probe"])
        optimiser.load_state_dict(saved["optimiser"])
        start = saved["step"]
        trim_log(run / "log.jsonl", start)
    loader = torch.utils.data.DataLoader(Batches(vlm, args), batch_size=None, num_workers=1, prefetch_factor=4,
                                         sampler=range(start, args.steps))
    sums, began = {}, time.time()
    for step, (samples, chunks) in enumerate(loader, start=start):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, args)
        total = sum(int((c["labels"] != -100).sum()) for c in chunks)
        loss_sum, seen_sum, predicted, true = 0.0, 0.0, [], []
        for chunk in chunks:
            words, seen, p, t = supervised_loss(vlm, probe, chunk)
            share = len(t) / total
            ((words + seen) * share).backward()
            loss_sum, seen_sum = loss_sum + words.item() * share, seen_sum + seen.item() * share
            predicted.append(p)
            true.append(t)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        for name, value in {"loss": loss_sum, "probe": seen_sum, **scores(vlm, samples, torch.cat(predicted), torch.cat(true))}.items():
            sums.setdefault(name, []).append(value)
        if (step + 1) % args.log_every == 0:
            row = {"step": step + 1, "seconds": round(time.time() - began, 1),
                   **{k: round(sum(v) / len(v), 3) for k, v in sums.items()}}
            with open(run / "log.jsonl", "a") as log:
                log.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
            sums = {}
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            torch.save({"model": model.state_dict(), "probe": probe.state_dict(), "optimiser": optimiser.state_dict(), "step": step + 1},
                       run / "state.tmp")
            (run / "state.tmp").rename(state)
            save(vlm, run / f"step-{step + 1:05d}")


def save(vlm: VLM, folder: Path) -> None:
    """A checkpoint folder as from_pretrained reads it, with an image processor that other tools find too."""
    vlm.base.generation_config.do_sample = False
    vlm.base.save_pretrained(folder)
    vlm.tokenizer.save_pretrained(folder)
    vlm.image_processor.save_pretrained(folder)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", default="runs/pretrain", help="checkpoints and log go here")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="tiny: 0.68 million weights, 3 layers; small: 1.45 million, 4 layers")
    parser.add_argument("--steps", type=int, help="default: " + ", ".join(f"{n} for {size}" for size, n in STEPS.items()))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=16, help="rows per forward pass (memory and cache, not the result)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=250)
    args = parser.parse_args(argv)
    args.steps = STEPS[args.size] if args.steps is None else args.steps
    for name in ("steps", "batch_size", "chunk", "log_every", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    train(args)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
