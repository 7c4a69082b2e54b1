"""Small things to run the scripts on: a random model in a folder, a folder of pictures, and flags for runs of seconds."""

import json
from pathlib import Path

import eval as evaluation
import pretrain
import scenes
import train
from data import examples, hashed
from model import MIN_PIXELS, VLM, Qwen2VLImageProcessorPil
from verifiers import Parsed

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = dict(do_sample=True, top_k=1, top_p=0.001, temperature=1e-6, repetition_penalty=1.05)


def save_base(folder, seed, tokenizer):
    """The embedded model's class, configuration and tokenizer with random weights; its defaults try to leak in."""
    model = pretrain.build_model(tokenizer, seed)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": MIN_PIXELS, "longest_edge": pretrain.NATIVE_PIXELS})
    pretrain.save(VLM(model, tokenizer, processor, "random"), folder)
    file = Path(folder) / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **HOSTILE}))
    return str(folder)


def write_photos(folder, train=6, test=0, source="SUNRGBD", task="depth", boxes3d=True, first=0, domain="synthetic"):
    """Synthetic scenes as an Omni3D folder: so many pictures per split, each with an example of the task."""
    folder, wanted = Path(folder), {True: test, False: train}
    images, rows, image_id = [], [], first
    while any(wanted.values()):
        image, annotations = scenes.annotate(domain, image_id)
        in_test = hashed("split", image_id) < 0.2
        if wanted[in_test] and examples(scenes.scene(domain, image_id), task):
            wanted[in_test] -= 1
            file = folder / "pictures" / f"{image_id}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            scenes.render(domain, image_id).save(file)
            images.append({**image, "file_path": f"pictures/{image_id}.png"})
            rows += annotations if boxes3d else [without_3d(row) for row in annotations]
        image_id += 1
    (folder / "annotations").mkdir(exist_ok=True)
    content = {"info": {"name": source}, "images": images, "annotations": rows}
    (folder / "annotations" / f"{source}_toy.json").write_text(json.dumps(content))
    return str(folder)


def without_3d(row):
    """What a detector knows: a name, a box, how much is hidden."""
    keys = ("id", "image_id", "category_name", "bbox2D_trunc", "visibility", "truncation")
    return {key: row[key] for key in keys}


def flags(base, data, out, /, **changed):
    """Command line of a training run of seconds."""
    options = dict(task="depth", preset="tiny", model=base, data=data, out=out, steps=2, pairs_per_device=2, group_size=4, lora_rank=4,
                   max_new_tokens=6, max_pixels=112 * 112, lr=1e-3, eval_size=0) | changed
    return [part for name, value in options.items() if value is not None
            for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))]


def parity(text, kind):
    """A stand-in for the parser that reads an answer out of anything, so that a random model earns unequal rewards."""
    return Parsed(len(text) % 2 == 0 if kind == "boolean" else float(1 + len(text) % 3), True, "ok")


def shortcuts(patch):
    """A learning signal for a random model, and no pictures at the end of a run."""
    for module in (train, evaluation):
        patch.setattr(module, "parse", parity)
    for name in ("plot_curves", "plot_pairs"):
        patch.setattr(train, name, lambda *_: None)


def log_of(run):
    """The rows of log.jsonl."""
    return [json.loads(line) for line in (Path(run) / "log.jsonl").read_text().splitlines()]
