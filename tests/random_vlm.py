"""A Qwen2.5-VL of random weights and a few thousand parameters: the real class, small enough for a test of seconds."""

from dataclasses import dataclass, field

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from model import LORA_TARGETS, Prompt

VOCABULARY = 320
END_OF_TURN, END_OF_TEXT, VISION_START, VISION_END, IMAGE, VIDEO = range(310, 316)
PROCESSOR = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=512 * 784)


@dataclass
class RandomVLM:
    model: torch.nn.Module
    end_ids: list[int] = field(default_factory=lambda: [END_OF_TURN, END_OF_TEXT])
    tokenizer: None = None
    image_processor: object = PROCESSOR

    @property
    def base(self):
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def device(self):
        return self.base.device

    @property
    def forbidden(self):
        forbidden = torch.zeros(VOCABULARY, dtype=torch.bool)  # (V,)
        forbidden[[VISION_START, VISION_END, IMAGE, VIDEO]] = True
        return forbidden


def random_vlm(hidden=32, layers=2, heads=4, kv_heads=2, vision=32, seed=0, rank=4, dtype=torch.float32, scale=0.1):
    """Random weights; rank=0 leaves out LoRA, otherwise *both* A and B are random so that the adapter matters."""
    config = Qwen2_5_VLConfig(
        text_config=dict(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            intermediate_size=2 * hidden, vocab_size=VOCABULARY, initializer_range=scale, max_position_embeddings=2048,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=mrope_section(hidden // heads)),
            bos_token_id=END_OF_TEXT, eos_token_id=END_OF_TURN, pad_token_id=END_OF_TEXT,
        ),
        vision_config=dict(
            hidden_size=vision, depth=layers, num_heads=2, intermediate_size=2 * vision, out_hidden_size=hidden,
            patch_size=14, fullatt_block_indexes=[layers - 1], initializer_range=scale,
        ),
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=dtype).eval().requires_grad_(False)
    if rank:
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LORA_TARGETS, init_lora_weights=False)
        model = get_peft_model(model, lora)
    return RandomVLM(model)


def mrope_section(head_dim):
    """Rotary pairs for time, height and width: a quarter, the rest shared evenly."""
    side = 3 * head_dim // 16
    return [head_dim // 2 - 2 * side, side, side]


def random_prompt(text_tokens, width, height, seed=0):
    """[vision start, image, vision end, text]: the image in front, as the chat template has it."""
    rng = np.random.default_rng(seed)
    picture = Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))
    pixels = PROCESSOR(images=[picture], return_tensors="pt")
    grid_thw = pixels["image_grid_thw"][0]  # (3,)
    image = [VISION_START, *[IMAGE] * (int(grid_thw.prod()) // 4), VISION_END]
    text = rng.integers(0, 300, text_tokens).tolist()
    return Prompt(torch.tensor(text[:3] + image + text[3:]), pixels["pixel_values"], grid_thw)


def mixed_prompts():
    """Three prompts of different lengths and image sizes: nothing lines up by accident."""
    return [random_prompt(9, 56, 84, seed=1), random_prompt(20, 112, 56, seed=2), random_prompt(5, 84, 84, seed=3)]
