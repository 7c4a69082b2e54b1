"""A vision-language model, its LoRA adapter, and prompts as tensors. The same lines load the tiny model and Qwen2.5-VL.

Qwen2-VL has the same interface and loads too; attention is torch's `sdpa`, whose fused kernels need no further package.

`make_prompt` is what Qwen's processor does, without torchvision: the chat template, one image placeholder replaced by as
many as the picture has merged patches (a 28 x 28 pixel square each), then the tokenizer.

    vlm = load_vlm("tiny", torch.device("cpu"))
    prompt = make_prompt(vlm, SYSTEM_PROMPT, "Is object 1 closer to the camera than object 2?", picture)
    prompt.input_ids.shape, prompt.grid_thw       # (P,), tensor([1, 8, 8]): 64 patches, 16 image tokens
"""
from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from verifiers import END_OF_TURN

ROOT = Path(__file__).resolve().parent
EMBEDDED = ("tiny", "small")            # checkpoint folders beside this file
MERGED_PATCH = 28            # pixels: 14-pixel patches, merged 2 x 2, give one image token
MIN_PIXELS = 4 * MERGED_PATCH**2
DEFAULT_PIXELS = 512 * MERGED_PATCH**2          # 512 image tokens
FAMILY = ("qwen2_5_vl", "qwen2_vl")            # what encode_images, embed_prompts and LORA_TARGETS were tested with
REFUSED = {name: "features of the picture enter several decoder layers there (deepstack), and a prompt that is computed once "
           "for its completions would have to carry them along" for name in ("qwen3_vl", "qwen3_vl_moe")}
NEVER_SAMPLED = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
# All seven projections of the language model. The vision tower has gate/up/down projections too, hence the prefix.
LORA_TARGETS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


class ModelError(ValueError):
    """A model, adapter or prompt that cannot be used; the message is one line that names the mend."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """One tokenised prompt with its picture (CPU tensors)."""
    input_ids: torch.Tensor      # (P,) long, image placeholders expanded
    pixel_values: torch.Tensor   # (patches, 3 * 2 * 14 * 14) float32
    grid_thw: torch.Tensor       # (3,) long: frames (1), patch rows, patch columns


@dataclass(eq=False)
class VLM:
    """A model with what is needed to talk to it. `model` is the plain model or the PeftModel around it."""
    model: torch.nn.Module
    tokenizer: object
    image_processor: Qwen2VLImageProcessorPil
    name: str                    # as given: what an adapter records as its base

    @property
    def base(self) -> torch.nn.Module:
        """The Qwen2_5_VLForConditionalGeneration itself, with LoRA layers inside if there are any."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def max_pixels(self) -> int:
        """The picture size limit in force: pixels after resizing, 784 of them are one token."""
        return self.image_processor.size["longest_edge"]

    @property
    def end_ids(self) -> list[int]:
        """Both end-of-turn tokens of the family; either ends a completion."""
        return self.tokenizer.convert_tokens_to_ids(list(END_OF_TURN))

    @property
    def forbidden(self) -> torch.Tensor:
        """(V,) bool: tokens no completion may hold. The next forward pass would look for their picture and fail."""
        never = torch.zeros(self.base.config.text_config.vocab_size, dtype=torch.bool, device=self.device)  # (V,)
        never[self.tokenizer.convert_tokens_to_ids(list(NEVER_SAMPLED))] = True
        never[len(self.tokenizer):] = True           # rows that only pad the embedding matrix
        return never


def find_model(name: str) -> str:
    """A folder as given, else one beside this file (the embedded ones), else the name as a hub id."""
    for folder in (Path(name), ROOT / name):
        if (folder / "config.json").is_file():
            return str(folder)
    if name.startswith((".", "/")) or Path(name).exists() or name.count("/") != 1:
        raise ModelError(f"--model {name}: no config.json there; give a checkpoint folder, a hub id such as "
                         "Qwen/Qwen2.5-VL-3B-Instruct, or 'tiny' or 'small' for an embedded model")
    return name


def config_of(path: str, name: str):
    """The configuration of a checkpoint folder or hub id; ModelError where it is not of the family."""
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"--model {name}: {first_line(error)}") from error
    if (kind := config.model_type) not in FAMILY:
        raise ModelError(f"--model {name}: a {kind} checkpoint; only Qwen2.5-VL and Qwen2-VL are supported, of any size"
                         + (f": {REFUSED[kind]}" if kind in REFUSED else ""))
    return config


def load_vlm(name: str, device: torch.device, dtype: torch.dtype | None = None, max_pixels: int | None = None) -> VLM:
    """Load a checkpoint folder or hub id in evaluation mode with every weight frozen.

    `dtype` None: bf16 on CUDA where the checkpoint itself is bf16 (Qwen2.5-VL is, the embedded model is not), else fp32.

    `max_pixels` bounds the picture after resizing (one image token is 784 pixels); it is the same in training and
    evaluation. None: the checkpoint's own limit, at most DEFAULT_PIXELS. Raises ModelError where it cannot be read.
    """
    path = find_model(name)
    config = config_of(path, name)
    try:
        if dtype is None:
            dtype = torch.bfloat16 if device.type == "cuda" and config.dtype == torch.bfloat16 else torch.float32
        model, info = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, attn_implementation="sdpa",
                                                                  output_loading_info=True)
        if info["missing_keys"]:         # the library would go on with random numbers in their place
            raise ModelError(f"weights are missing, such as {sorted(info['missing_keys'])[0]}; fetch the checkpoint again")
        tokenizer = AutoTokenizer.from_pretrained(path)
        own = Qwen2VLImageProcessorPil.from_pretrained(path).size
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"--model {name}: {first_line(error)}") from error
    max_pixels = max_pixels or min(own.get("longest_edge") or DEFAULT_PIXELS, DEFAULT_PIXELS)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": MIN_PIXELS, "longest_edge": max_pixels})
    model.requires_grad_(False)
    return VLM(model.to(device).eval(), tokenizer, processor, name)


# --------------------------------------------------------------------------------------------------------------- LoRA
def add_lora(vlm: VLM, rank: int, seed: int) -> VLM:
    """LoRA of this rank on the language model's seven projections: alpha = 2 rank, no dropout, fp32 weights.

    The same seed gives the same weights on every rank. The vision tower stays as it is.
    """
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, bias="none", target_modules=LORA_TARGETS,
                        task_type="CAUSAL_LM", base_model_name_or_path=vlm.name)
    vlm.model = get_peft_model(vlm.model, config, autocast_adapter_dtype=True)
    vlm.model.eval()             # no dropout anywhere; what is trainable is told by requires_grad alone
    return vlm


def load_lora(vlm: VLM, folder: str | Path, trainable: bool) -> VLM:
    """Put a saved adapter on `vlm`. Raises ModelError where it belongs to another model, rank or layer set.

    peft itself only warns about keys that do not match, and then scores the base model under the adapter's name.
    """
    folder = Path(folder)
    base = adapter_config(folder).get("base_model_name_or_path")
    mend = f"it was trained on {base}; give that one with --model"
    if run_settings(folder).get("base_fingerprint", fingerprint(vlm)) != fingerprint(vlm):
        raise ModelError(f"{folder}: the adapter belongs to another base than {vlm.name}: {mend}")
    try:
        with warnings.catch_warnings(action="ignore"):         # of keys that do not match: they are an error below
            vlm.model = PeftModel.from_pretrained(vlm.model, str(folder), is_trainable=trainable)
        saved = load_file(folder / "adapter_model.safetensors")
    except (RuntimeError, ValueError, TypeError, KeyError, OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: the adapter does not fit {vlm.name} or is damaged: {mend} ({first_line(error)})") from error
    loaded = {n.replace(".default", ""): p for n, p in vlm.model.named_parameters() if "lora_" in n}
    if set(saved) != set(loaded) or any(not torch.equal(saved[n], loaded[n].detach().cpu()) for n in saved):
        odd = sorted(set(saved) ^ set(loaded)) or ["(values)"]
        raise ModelError(f"{folder}/adapter_model.safetensors: {len(odd)} adapter weights do not match {vlm.name}: {mend} "
                         f"(first: {odd[0]})")
    vlm.model.eval()
    return vlm


def load_base_and_adapter(model: str | None, adapter: str | None, max_pixels: int | None = None) -> tuple[VLM, dict]:
    """For use, not for training: the base (default: the adapter's own, else `tiny`), with the adapter on it if one is
    given, and the settings it was trained with."""
    trained = run_settings(adapter) if adapter else {}
    base = adapter_config(adapter).get("base_model_name_or_path") if adapter else "tiny"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vlm = load_vlm(model or str(base), device, max_pixels=max_pixels or trained.get("max_pixels"))
    return (load_lora(vlm, adapter, trainable=False) if adapter else vlm), trained


def first_line(error: Exception) -> str:
    """The line of a library's message that says what is wrong: the first, or the last where sizes do not match."""
    lines = str(error).strip().splitlines() or [repr(error)]
    return lines[-1 if "size mismatch" in lines[-1] else 0].strip()


def fingerprint(vlm: VLM) -> str:
    """Tells apart checkpoints of one shape: a digest of one matrix of the last layer, the same in fp32 and bf16."""
    last = vlm.base.model.language_model.layers[-1].self_attn.o_proj
    return digest_of(getattr(last, "base_layer", last).weight)                                     # without LoRA


def digest_of(weight: torch.Tensor) -> str:
    """A digest of a matrix, the same in fp32 and bf16."""
    weight = weight.detach().to("cpu", torch.bfloat16)                                             # (H, H)
    return hashlib.sha256(weight.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def is_embedded(vlm: VLM) -> bool:
    """Whether these are the weights of an embedded model, whatever its folder is called: then completions are short."""
    return fingerprint(vlm) in [last_layer_digest(ROOT / name / "model.safetensors") for name in EMBEDDED]


def last_layer_digest(file: Path) -> str:
    """`fingerprint` of the model that a file of weights holds, without loading it."""
    with safe_open(file, "pt") as weights:
        names = [n for n in weights.keys() if n.endswith("self_attn.o_proj.weight") and "visual" not in n]
        return digest_of(weights.get_tensor(max(names, key=lambda n: int(n.split("layers.")[1].split(".")[0]))))


def default_new_tokens(vlm: VLM) -> int:
    """The completion limit where neither a flag nor the adapter's run says one."""
    return 48 if is_embedded(vlm) else 512


def adapter_config(folder: str | Path) -> dict:
    """The adapter's own configuration; raises ModelError where the folder holds none."""
    file = Path(folder) / "adapter_config.json"
    if not file.is_file() or not (Path(folder) / "adapter_model.safetensors").is_file():
        raise ModelError(f"{folder}: no adapter here (adapter_config.json and adapter_model.safetensors); give the run "
                         "folder that train.py printed")
    return read_settings(file)


def run_settings(folder: str | Path) -> dict:
    """The settings a run was trained with (its config.json), or {} where the folder has none."""
    file = Path(folder) / "config.json"
    return read_settings(file) if file.is_file() else {}


def read_settings(file: Path) -> dict:
    """A JSON file that must hold a dict."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: holds no settings")
    return content


def trainable_parameters(vlm: VLM) -> dict[str, torch.nn.Parameter]:
    """Name -> parameter of everything that is trained, in a fixed order (the same on every rank)."""
    return {n: p for n, p in vlm.model.named_parameters() if p.requires_grad}


# ------------------------------------------------------------------------------------------------- prompts as tensors
def image_tokens(width: int, height: int, max_pixels: int) -> int:
    """How many image tokens a picture becomes: both sides rounded to 28 pixels, the area at most `max_pixels`."""
    h, w = smart_resize(height, width, factor=MERGED_PATCH, min_pixels=MIN_PIXELS, max_pixels=max_pixels)
    return (h // MERGED_PATCH) * (w // MERGED_PATCH)


def chat_text(vlm: VLM, system: str, text: str) -> str:
    """The conversation in the checkpoint's own chat template, with one image placeholder, up to the model's turn."""
    messages = [{"role": "system", "content": [{"type": "text", "text": system}]},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
    return vlm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def make_prompt(vlm: VLM, system: str, text: str, picture: Image.Image) -> Prompt:
    """Tokenise one prompt with its picture. Never truncates."""
    pixels = vlm.image_processor(images=[picture], return_tensors="pt")
    grid = pixels["image_grid_thw"][0]                                              # (3,)
    n_tokens = int(grid.prod()) // 4
    chat = chat_text(vlm, system, text).replace("<|image_pad|>", "<|image_pad|>" * n_tokens)
    input_ids = vlm.tokenizer(chat, return_tensors="pt", add_special_tokens=False)["input_ids"][0]     # (P,)
    return Prompt(input_ids, pixels["pixel_values"].float(), grid)
