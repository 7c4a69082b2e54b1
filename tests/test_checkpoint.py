"""Claims about checkpoint.py: a checkpoint is whole or not there, and what is loaded is bitwise what was saved."""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import checkpoint
from checkpoint import checkpoints, fault_of, load_checkpoint, newest_checkpoint, save_checkpoint, trim_log, write_json
from images import DataError
from model import ModelError, add_lora, load_vlm, trainable_parameters

fast = pytest.mark.fast


def optimiser_of(vlm):
    return torch.optim.AdamW(trainable_parameters(vlm).values(), lr=1e-2)


def take_a_step(vlm, optimiser, seed):
    """A step of AdamW along random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for p in trainable_parameters(vlm).values():
        p.grad = torch.randn(p.shape, generator=generator)
    optimiser.step()


@pytest.fixture
def run(lora_vlm, tmp_path):
    """A run with checkpoints after steps 1, 2 and 3."""
    optimiser = optimiser_of(lora_vlm)
    for step in (1, 2, 3):
        take_a_step(lora_vlm, optimiser, step)
        save_checkpoint(tmp_path, lora_vlm, optimiser, step, {"multiplier": step / 3})
    return tmp_path


@fast
def test_the_newest_two_checkpoints_are_kept_whole_and_without_drafts(run):
    assert [f.name for f in checkpoints(run)] == ["step-00002", "step-00003"]
    for folder in checkpoints(run):
        assert fault_of(folder) is None
        assert {f.name for f in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "optimiser.pt", "state.json",
                                                  "manifest.json"}
    assert newest_checkpoint(run) == (run / "checkpoints/step-00003", 3)


@fast
def test_loading_restores_adapter_and_optimiser_so_that_the_next_step_is_bitwise_the_same(run, lora_vlm, base):
    saved = {n: p.detach().clone() for n, p in trainable_parameters(lora_vlm).items()}
    vlm = add_lora(load_vlm(base, torch.device("cpu")), rank=4, seed=9)
    optimiser = optimiser_of(vlm)
    assert load_checkpoint(run / "checkpoints/step-00003", vlm, optimiser) == {"multiplier": 1.0}
    assert all(torch.equal(p, saved[n]) and p.requires_grad for n, p in trainable_parameters(vlm).items())
    original = optimiser_of(lora_vlm)
    original.load_state_dict(torch.load(run / "checkpoints/step-00003/optimiser.pt", weights_only=True))
    take_a_step(vlm, optimiser, 4)
    take_a_step(lora_vlm, original, 4)
    assert all(torch.equal(p, trainable_parameters(lora_vlm)[n]) for n, p in trainable_parameters(vlm).items())
    assert not any(torch.equal(p, saved[n]) for n, p in trainable_parameters(vlm).items())


def flip_a_byte(folder):
    content = bytearray((folder / "adapter_model.safetensors").read_bytes())
    content[-3] ^= 1
    (folder / "adapter_model.safetensors").write_bytes(content)


@fast
@pytest.mark.parametrize("damage", [
    flip_a_byte,
    lambda folder: (folder / "optimiser.pt").write_bytes((folder / "optimiser.pt").read_bytes()[:100]),
    lambda folder: (folder / "optimiser.pt").unlink(),
    lambda folder: (folder / "manifest.json").unlink(),
    lambda folder: (folder / "manifest.json").write_text('{"step": 3, "sha'),
    lambda folder: (folder / "manifest.json").write_text("[3]"),
    lambda folder: [f.unlink() for f in folder.iterdir()],
])
def test_a_half_written_or_damaged_newest_checkpoint_is_passed_over_by_name(run, capsys, damage):
    damage(run / "checkpoints/step-00003")
    assert newest_checkpoint(run) == (run / "checkpoints/step-00002", 2)
    assert capsys.readouterr().out.startswith(f"passed over {run}/checkpoints/step-00003: ")


@fast
def test_a_process_killed_while_saving_leaves_the_previous_checkpoints_as_they_were(run, lora_vlm, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(run, lora_vlm, optimiser_of(lora_vlm), 4, {})
    assert (run / "checkpoints/step-00004.tmp").is_dir()
    assert newest_checkpoint(run) == (run / "checkpoints/step-00003", 3)
    monkeypatch.undo()
    save_checkpoint(run, lora_vlm, optimiser_of(lora_vlm), 4, {})  # the draft is no obstacle
    assert newest_checkpoint(run)[1] == 4 and not (run / "checkpoints/step-00004.tmp").exists()


@fast
def test_no_usable_checkpoint_is_an_error_and_none_at_all_means_the_beginning(run, tmp_path):
    for folder in checkpoints(run):
        (folder / "manifest.json").unlink()
    with pytest.raises(ModelError, match="no usable checkpoint in .*; start again without --resume"):
        newest_checkpoint(run)
    shutil.rmtree(run / "checkpoints")
    assert newest_checkpoint(run) == (None, 0)


@fast
def test_a_checkpoint_of_another_rank_is_refused(run, base):
    vlm = add_lora(load_vlm(base, torch.device("cpu")), rank=8, seed=0)
    with pytest.raises(ModelError, match="does not fit this model and LoRA rank"):
        load_checkpoint(run / "checkpoints/step-00003", vlm, optimiser_of(vlm))


@fast
def test_a_checkpoint_is_a_peft_adapter(run, lora_vlm):
    saved = load_file(run / "checkpoints/step-00003/adapter_model.safetensors")
    assert {n.replace(".default", "") for n in trainable_parameters(lora_vlm)} == saved.keys()


@fast
def test_json_is_replaced_whole_and_a_torn_log_is_cut_back(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"x": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    log = tmp_path / "log.jsonl"
    trim_log(log, 0)
    assert log.read_text() == ""
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    trim_log(log, 2)
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'


@fast
def test_a_log_is_read_without_the_half_line_of_its_writer_and_its_absence_is_named(tmp_path):
    with pytest.raises(DataError, match="log.jsonl is missing or holds no step; give the folder of a run"):
        checkpoint.read_log(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.25}\n{"step": 3, "rew')
    assert checkpoint.read_log(tmp_path) == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.25}]
    with pytest.raises(DataError, match="has no checkpoints; give the folder of a run"):
        checkpoint.main([str(tmp_path)])
