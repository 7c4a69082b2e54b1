"""Checkpoints that are whole or not there: adapter, optimiser, step and what a method carries along, written atomically.

Everything random in training is a function of (seed, step, index), so there is no random state to save. A checkpoint is
written under a temporary name, its files' digests last, and then renamed; one whose digests do not match is passed over
by name and the one before it is used.

    RUN/checkpoints/step-00050/{adapter_config.json, adapter_model.safetensors, optimiser.pt, state.json, manifest.json}

    python checkpoint.py RUN      # which checkpoints a run has, and whether they are whole
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from command import Parser, run as run_command
from images import DataError
from model import VLM, ModelError, trainable_parameters


def digest(file: Path) -> str:
    """SHA-256 of a file's content."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def write_json(file: Path, content) -> None:
    """Write JSON so that the file is the old one or the new one, never half of it."""
    draft = file.with_name(file.name + ".tmp")
    draft.write_text(json.dumps(content, indent=1))
    draft.replace(file)


def save_adapter(vlm: VLM, folder: Path) -> None:
    """PEFT's own two files into `folder` (no model card), each atomically."""
    draft = folder / "adapter.tmp"
    shutil.rmtree(draft, ignore_errors=True)
    vlm.model.save_pretrained(draft, save_embedding_layers=False)      # "auto" would ask the hub about the base's name
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (draft / name).replace(folder / name)
    shutil.rmtree(draft)


def save_checkpoint(run: Path, vlm: VLM, optimiser: torch.optim.Optimizer, step: int, state: dict) -> Path:
    """Save the state after `step` steps; the newest two are kept."""
    folder = run / "checkpoints" / f"step-{step:05d}"
    draft = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_adapter(vlm, draft)
    torch.save(optimiser.state_dict(), draft / "optimiser.pt")
    write_json(draft / "state.json", state)
    write_json(draft / "manifest.json", {"step": step, "sha256": {f.name: digest(f) for f in sorted(draft.iterdir())}})
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    for old in checkpoints(run)[:-2]:
        shutil.rmtree(old)
    return folder


def checkpoints(run: Path) -> list[Path]:
    """All checkpoint folders of a run, oldest first."""
    return sorted(f for f in (run / "checkpoints").glob("step-*") if not f.name.endswith(".tmp"))


def fault_of(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, expected in manifest["sha256"].items():
            if digest(folder / name) != expected:
                return f"{name} is damaged"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"incomplete ({type(error).__name__}: {error})"
    return None


def newest_checkpoint(run: Path) -> tuple[Path | None, int]:
    """The newest usable checkpoint and its step. Damaged ones are named and passed over; ModelError if none is left.

    A run that was stopped before its first checkpoint gives (None, 0): begun again, it is the same run.
    """
    found = checkpoints(run)
    for folder in reversed(found):
        fault = fault_of(folder)
        if fault is None:
            return folder, json.loads((folder / "manifest.json").read_text())["step"]
        print(f"passed over {folder}: {fault}")
    if found:
        raise ModelError(f"--resume {run}: no usable checkpoint in {run}/checkpoints; start again without --resume")
    return None, 0


def load_checkpoint(folder: Path, vlm: VLM, optimiser: torch.optim.Optimizer) -> dict:
    """Put a checkpoint's adapter and optimiser state into freshly made ones, bit for bit; returns the method's own state."""
    saved = load_file(folder / "adapter_model.safetensors")
    parameters = {name.replace(".default", ""): p for name, p in trainable_parameters(vlm).items()}
    if saved.keys() != parameters.keys() or any(saved[n].shape != p.shape for n, p in parameters.items()):
        raise ModelError(f"{folder}: the adapter does not fit this model and LoRA rank; resume with the run's own settings")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    optimiser.load_state_dict(torch.load(folder / "optimiser.pt", map_location="cpu", weights_only=True))
    return json.loads((folder / "state.json").read_text())


def trim_log(file: Path, step: int) -> None:
    """Cut log.jsonl back to the first `step` steps: those after the checkpoint are made again, half a line is dropped."""
    draft = file.with_name(file.name + ".tmp")
    draft.write_text("".join(json.dumps(row) + "\n" for row in whole_rows(file) if row["step"] <= step))
    draft.replace(file)


def read_log(run: Path) -> list[dict]:
    """What a run has logged, one row per step. DataError where there is nothing yet."""
    rows = whole_rows(run / "log.jsonl")
    if not rows:
        raise DataError(f"{run / 'log.jsonl'} is missing or holds no step; give the folder of a run that train.py has begun")
    return rows


def whole_rows(file: Path) -> list[dict]:
    """The rows of a file of JSON lines, none if there is no file; half a line (its writer was killed, or is at it) is passed over."""
    rows = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    run = parser.parse_args(argv).run
    if not (found := checkpoints(run)):
        raise DataError(f"{run} has no checkpoints; give the folder of a run that train.py has begun")
    for checkpoint in found:
        print(checkpoint, fault_of(checkpoint) or "whole")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
