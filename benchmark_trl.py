"""TRL's GRPOTrainer as a contestant of benchmark.py: the same model, prompts, K and completion length, at its best here.

It lives in an environment of its own, because nothing else in this project needs TRL or torchvision:

    python -m venv trl-env
    trl-env/bin/pip install torch==2.14.1 torchvision==0.29.1 trl transformers==5.24.0 peft==0.21.2 scipy pillow numpy matplotlib
    OMP_NUM_THREADS=1 trl-env/bin/python benchmark.py --parts long short

What is set for its sake, each measured or needed: one batch of all B K rows (accumulating would load every picture again),
no activation checkpointing (its default; the update takes over 1.5 times as long), no reference model (beta 0), no
evaluation, logging or saving; fp32, since there is no fast bf16 on this CPU. LoRA targets are given as our expression:
bare names would also catch the vision tower's projections.
"""
from __future__ import annotations

import random
import tempfile
import warnings
from typing import Callable

import torch
import torchvision  # noqa: F401  (missing, it fails clearly here instead of obscurely inside the processor)
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmark_steps import LORA_RANK, SYSTEM, Shape, now, peak_memory, questions, random_vlm, small_config
from model import DEFAULT_PIXELS, LORA_TARGETS, MIN_PIXELS

CPU = torch.device("cpu")


class TimedTrainer(GRPOTrainer):
    """Notes when the rollout, rewards included, is over; measures the memory of the last step's update."""
    measured_step, peak = -1, 0

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        self.sampled = now(CPU)
        return inputs

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.lengths = inputs["completion_mask"].sum(1)                                           # (B*K,)
        self.prompt_tokens = inputs["prompt_mask"].sum(1)                                         # (B*K,)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step != self.measured_step:
            return super().training_step(model, inputs, num_items_in_batch)
        inputs = self._prepare_inputs(inputs)                                                     # the rollout
        with peak_memory(CPU) as peak:
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
        self.peak = peak[0]
        return loss.detach()


class Turns(TrainerCallback):
    """Before each of the trainer's steps the other contestants do one; then the clock runs until its weights are new."""
    def __init__(self, others: Callable[[int], None]):
        self.others, self.rows, self.trainer = others, [], None

    def on_step_begin(self, args, state, control, **_):
        self.others(state.global_step)
        self.began = now(CPU)

    def on_step_end(self, args, state, control, **_):
        ended, sampled = now(CPU), self.trainer.sampled
        self.rows.append({"step": ended - self.began, "rollout": sampled - self.began, "update": ended - sampled})


def coin(completions, **_) -> list[float]:
    """Rewards with spread in every group, as cheap as they come."""
    return [float(random.random() < 0.5) for _ in completions]


def run_trl(shape: Shape, rounds: int, others: Callable[[int], None]) -> tuple[list[dict], int]:
    """`rounds` steps of GRPOTrainer, each after one of the others; then one more for the peak memory of its update."""
    vlm = random_vlm(small_config(), CPU)
    size = dict(min_pixels=MIN_PIXELS, max_pixels=DEFAULT_PIXELS)
    processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessor(**size), vlm.tokenizer, Qwen2VLVideoProcessor(**size),
                                    chat_template=vlm.tokenizer.chat_template)
    rows = [{"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}], "image": picture}
            for text, picture in questions(vlm, shape)]
    model = vlm.model.unload()
    turns = Turns(lambda step: others(step) if step < rounds else None)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=rounds + 1, beta=0.0,
            per_device_train_batch_size=shape.B * shape.K, gradient_accumulation_steps=1, num_generations=shape.K,
            max_completion_length=shape.C, temperature=1.0, learning_rate=1e-6, lr_scheduler_type="constant",
            generation_kwargs={"min_new_tokens": shape.C, "suppress_tokens": vlm.forbidden.nonzero()[:, 0].tolist()},
            logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False)
        lora = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
        trainer = TimedTrainer(model, coin, config, train_dataset=Dataset.from_list(rows), processing_class=processor,
                               peft_config=lora, callbacks=[turns])
        trainer.remove_callback(PrinterCallback)
        turns.trainer, trainer.measured_step = trainer, rounds
        trainer.train()
    assert (trainer.lengths == shape.C).all() and (trainer.prompt_tokens == shape.P).all(), "TRL did other work than ours"
    return turns.rows[:rounds], trainer.peak
