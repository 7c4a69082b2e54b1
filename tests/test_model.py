"""Claims about model.py: prompts are the library's, LoRA sits where it should, and an adapter is never loaded wrongly."""
import json
import shutil

import numpy as np
import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, BertConfig, Qwen2_5_VLProcessor

from checkpoint import save_adapter
from grpo import backward, completion_logprobs, rollout
from model import (DEFAULT_PIXELS, MERGED_PATCH, ModelError, add_lora, fingerprint, image_tokens, load_lora, load_vlm,
                   make_prompt, trainable_parameters)
from questions import SYSTEM_PROMPT
from sampling import encode_images

CPU = torch.device("cpu")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
fast = pytest.mark.fast


def picture(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def uniforms(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def prompts_for(vlm):
    return [make_prompt(vlm, SYSTEM_PROMPT, f"Is object {i} closer?", picture(56 + 28 * i, 84, i)) for i in (1, 2)]


def scores(vlm, seed=3):
    """Log-probabilities of fixed tokens: what an adapter changes."""
    prompts = prompts_for(vlm)
    tokens = torch.randint(10, 200, (2, 2, 5), generator=torch.Generator().manual_seed(seed))  # (B, K, T)
    with torch.no_grad():
        return completion_logprobs(vlm, prompts, encode_images(vlm, prompts), tokens, torch.ones_like(tokens).bool(), 1.0)


def one_update(vlm, lr=1e-2):
    """One step of AdamW on a rollout with advantages of both signs."""
    optimiser = torch.optim.AdamW(trainable_parameters(vlm).values(), lr=lr)
    prompts = prompts_for(vlm)
    completions = rollout(vlm, prompts, uniforms(2, 2, 6), 1.0)
    backward(vlm, prompts, completions, torch.tensor([[1.0, -1.0], [1.5, -0.5]]), 1.0, pairs=1)
    optimiser.step()
    optimiser.zero_grad()


@pytest.fixture
def adapter(lora_vlm, base, tmp_path):
    """A saved adapter with the settings file that a run leaves beside it."""
    folder = tmp_path / "run"
    folder.mkdir()
    save_adapter(lora_vlm, folder)
    (folder / "config.json").write_text(json.dumps({"model": base, "base_fingerprint": fingerprint(lora_vlm)}))
    return folder


def fresh(base, dtype=torch.float32):
    return load_vlm(base, CPU, dtype)


# --- prompts ----------------------------------------------------------------------------------------------------------
@fast
@pytest.mark.parametrize("size", [(112, 112), (168, 84), (57, 100), (640, 480)])
def test_a_prompt_is_what_the_librarys_own_processor_makes(vlm, size):
    processor = Qwen2_5_VLProcessor.__new__(Qwen2_5_VLProcessor)  # its __init__ wants torchvision for videos
    processor.image_processor, processor.tokenizer, processor.video_processor = vlm.image_processor, vlm.tokenizer, None
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.image_token_id, processor.video_token_id = vlm.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    processor.chat_template = vlm.tokenizer.chat_template
    image = picture(*size)
    chat = [{"role": "system", "content": [{"type": "text", "text": SYSTEM_PROMPT}]},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?\nAnswer with a number."}]}]
    text = processor.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = processor(images=[image], text=[text], return_tensors="pt")
    found = make_prompt(vlm, SYSTEM_PROMPT, "How many?\nAnswer with a number.", image)
    assert torch.equal(found.input_ids, expected["input_ids"][0])
    assert torch.equal(found.pixel_values, expected["pixel_values"])
    assert torch.equal(found.grid_thw, expected["image_grid_thw"][0])


@fast
def test_the_pixel_limit_takes_effect_and_is_predicted(base):
    assert image_tokens(1242, 375, 256 * 784) == 232  # requirement 8
    assert image_tokens(1242, 375, 10**9) == 44 * 13 == 572
    for limit, size in [(256 * 784, (1242, 375)), (16 * 784, (1242, 375)), (DEFAULT_PIXELS, (640, 480)), (784 * 64, (30, 700))]:
        prompt = make_prompt(load_vlm(base, CPU, max_pixels=limit), SYSTEM_PROMPT, "?", picture(*size))
        assert int(prompt.grid_thw.prod()) // 4 == image_tokens(*size, limit) <= limit // 784


@fast
def test_image_tokens_predicts_the_processor_for_many_sizes(vlm):
    rng = np.random.default_rng(0)
    for width, height in rng.integers(28, 300, (60, 2)).tolist():
        grid = vlm.image_processor(images=[picture(width, height)], return_tensors="pt")["image_grid_thw"][0]
        assert int(grid.prod()) // 4 == image_tokens(width, height, vlm.max_pixels)


@fast
def test_without_a_limit_the_checkpoints_own_counts_and_never_more_than_512_tokens(base, tmp_path):
    assert fresh(base).max_pixels == 112 * 112
    copy = shutil.copytree(base, tmp_path / "copy")
    settings = json.loads((copy / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] = 10**8
    (copy / "preprocessor_config.json").write_text(json.dumps(settings))
    assert fresh(str(copy)).max_pixels == 512 * MERGED_PATCH**2


@fast
def test_sampling_is_ours_alone_whatever_the_checkpoints_defaults_say(base, vlm):
    assert vlm.base.generation_config.top_k == 1 and vlm.base.generation_config.temperature == 1e-6  # requirement 1
    done = rollout(vlm, prompts_for(vlm)[:1], uniforms(1, 64, 8), 1.0)
    assert len({tuple(tokens) for tokens in done.tokens[0].tolist()}) >= 60


@fast
def test_special_vision_tokens_and_rows_beyond_the_tokenizer_are_forbidden(vlm):
    names = {vlm.tokenizer.convert_ids_to_tokens(i) for i in vlm.forbidden.nonzero()[:, 0].tolist()}
    assert names - {None} == {"<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"}
    assert not vlm.forbidden[vlm.end_ids].any() and len(vlm.end_ids) == 2


# --- what is trained --------------------------------------------------------------------------------------------------
@fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_seven_projections_a_layer_are_adapted_in_fp32_and_nothing_in_the_vision_tower(base, dtype):
    vlm = add_lora(fresh(base, dtype), rank=4, seed=0)
    adapted = [n.split(".lora_A")[0] for n in trainable_parameters(vlm) if "lora_A" in n]
    layers = vlm.base.config.text_config.num_hidden_layers
    assert sorted(n.split("layers.")[1].replace(".self_attn", "").replace(".mlp", "") for n in adapted) == sorted(
        f"{layer}.{projection}" for layer in range(layers) for projection in PROJECTIONS)
    assert all("language_model" in n and "visual" not in n for n in adapted)
    assert any("visual" in n and "gate_proj" in n for n, _ in vlm.base.named_parameters())  # there to be adapted by mistake
    trainable = trainable_parameters(vlm)
    assert len(trainable) == 2 * 7 * layers and all(p.dtype == torch.float32 for p in trainable.values())
    assert {p.dtype for n, p in vlm.base.named_parameters() if "lora" not in n} == {dtype}
    assert vlm.model.peft_config["default"].lora_alpha == 8


@fast
def test_training_moves_the_adapter_and_leaves_every_other_weight_bitwise_untouched(base):
    vlm = add_lora(fresh(base), rank=4, seed=0)
    before = {n: p.detach().clone() for n, p in vlm.model.named_parameters()}
    for _ in range(2):
        one_update(vlm)
    moved = {n for n, p in vlm.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(trainable_parameters(vlm))


@fast
def test_the_seed_alone_decides_the_adapters_start(base):
    start = lambda seed: trainable_parameters(add_lora(fresh(base), 4, seed))
    a, b, c = start(0), start(0), start(1)
    assert all(torch.equal(a[n], b[n]) for n in a) and not all(torch.equal(a[n], c[n]) for n in a)


# --- adapters on disk -------------------------------------------------------------------------------------------------
@fast
def test_a_loaded_adapter_is_bitwise_the_saved_one_scores_the_same_and_stays_trainable(lora_vlm, adapter, base):
    saved, expected = load_file(adapter / "adapter_model.safetensors"), scores(lora_vlm)
    vlm = load_lora(fresh(base), adapter, trainable=True)
    loaded = {n.replace(".default", ""): p for n, p in trainable_parameters(vlm).items()}
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[n], saved[n]) for n in saved)
    assert torch.equal(scores(vlm), expected) and not torch.allclose(scores(fresh(base)), expected, atol=1e-3)
    one_update(vlm)
    assert not any(torch.equal(loaded[n], saved[n]) for n in saved)  # requirement 11
    assert not trainable_parameters(load_lora(fresh(base), adapter, trainable=False))


@fast
def test_peft_itself_loads_the_adapter(lora_vlm, adapter, base):
    model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32), str(adapter))
    ours = {n: p for n, p in lora_vlm.model.named_parameters() if "lora_" in n}
    theirs = {n: p for n, p in model.named_parameters() if "lora_" in n}
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@fast
def test_saving_an_adapter_asks_nobody_on_the_network(lora_vlm, tmp_path, monkeypatch):
    lora_vlm.model.peft_config["default"].base_model_name_or_path = "tiny"  # no such folder here
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *a, **k: pytest.fail("asked the hub"))
    save_adapter(lora_vlm, tmp_path)
    assert {f.name for f in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def other_rank(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))


def other_keys(folder):
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({n.replace("layers.0", "layers.7"): w for n, w in weights.items()}, folder / "adapter_model.safetensors")


def fewer_keys(folder):
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({n: w for n, w in weights.items() if "layers.2" not in n}, folder / "adapter_model.safetensors")


def vision_keys(folder):
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({n.replace("language_model", "visual"): w for n, w in weights.items()}, folder / "adapter_model.safetensors")


def half_a_file(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:999])


def no_json(folder):
    (folder / "adapter_config.json").write_text("{")


def no_weights(folder):
    (folder / "adapter_model.safetensors").unlink()


def no_config(folder):
    (folder / "adapter_config.json").unlink()


@fast
@pytest.mark.parametrize("spoil", [other_rank, other_keys, fewer_keys, vision_keys, half_a_file, no_json, no_weights, no_config])
def test_an_adapter_that_does_not_fit_is_refused_in_one_line_and_never_scored_as_the_base(adapter, base, spoil):
    spoil(adapter)
    with pytest.raises(ModelError) as error:
        load_lora(fresh(base), adapter, trainable=False)
    assert str(adapter) in str(error.value) and "\n" not in str(error.value)


@fast
def test_an_adapter_of_another_base_is_refused_even_where_every_shape_fits(adapter, base, other_base):
    with pytest.raises(ModelError, match=f"another base than .*{base}; give that one"):
        load_lora(fresh(other_base), adapter, trainable=False)
    load_lora(fresh(base, torch.bfloat16), adapter, trainable=False)  # the same base in another precision is the same


# --- checkpoints that cannot be used ----------------------------------------------------------------------------------
@fast
def test_a_checkpoint_that_is_missing_or_broken_is_refused_in_one_line(base, tmp_path):
    def refused(name, pattern):
        with pytest.raises(ModelError, match=pattern) as error:
            load_vlm(str(name), CPU)
        assert "\n" not in str(error.value)

    refused(tmp_path / "nothing", "no config.json there")
    refused("nothing", "no config.json there; give a checkpoint folder, a hub id")
    for file, pattern in [("model.safetensors", "model.safetensors"), ("tokenizer.json", "tokenizer"),
                          ("preprocessor_config.json", "preprocessor")]:
        copy = shutil.copytree(base, tmp_path / f"without-{file}")
        (copy / file).unlink()
        refused(copy, pattern)
    copy = shutil.copytree(base, tmp_path / "torn")
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:5000])
    refused(copy, "torn")
    copy = shutil.copytree(base, tmp_path / "partial")
    weights = load_file(copy / "model.safetensors")
    lost = next(n for n in weights if "layers.1" in n)
    save_file({n: w for n, w in weights.items() if n != lost}, copy / "model.safetensors", metadata={"format": "pt"})
    refused(copy, "weights are missing")  # the library would fill in random numbers
    BertConfig().save_pretrained(tmp_path / "bert")
    refused(tmp_path / "bert", "a bert checkpoint; only Qwen2.5-VL")
