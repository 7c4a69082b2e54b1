"""Which pair comes when depends on (seed, step, place in the batch) alone; examples come in one order from one split."""

import hashlib
import json
import os
import runpy
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data import BOOLEAN_TASKS, TASKS, hashed
from dataset import VALIDATION_SCENE, draw_pair, draw_uniforms, evaluation_pair, folder_examples, load_examples, tasks_of
from images import DataError
from questions import prompt_text
from transforms import NOT_USED

ROOT = Path(__file__).resolve().parent.parent
MINI = Path(os.environ.get("OMNI3D_MINI", ROOT.parent / "shared" / "data" / "omni3d_mini"))
needs_mini = pytest.mark.skipif(not (MINI / "annotations").is_dir(), reason=f"no real photos in {MINI} (OMNI3D_MINI)")
fast = pytest.mark.fast


@cache
def depth(n=10):
    return load_examples("synthetic", "depth", "train", limit=n)


def fingerprint(pair):
    """Everything that a pair shows, as one string: a different pair has a different one."""
    sides = [(s.question, prompt_text(s.question, {i: o.name for i, o in s.view.objects.items()}), s.picture.tobytes())
             for s in (pair.x, pair.x_prime)]
    return hashlib.sha256(repr((pair.example.id, pair.transform, pair.negates, sides)).encode()).hexdigest()


def batch(step, world_size, per_device, seed=0, examples=None):
    """The pairs of a step as `world_size` processes would draw them, each its own share, later ranks first."""
    shares = {rank: [draw_pair(examples or depth(), seed, step, i, world_size * per_device)
                     for i in range(rank * per_device, (rank + 1) * per_device)] for rank in reversed(range(world_size))}
    return [pair for rank in range(world_size) for pair in shares[rank]]


# --- requirement 9: ranks and reruns --------------------------------------------------------------------------------

@fast
def test_four_pairs_are_the_same_for_1_x_4_2_x_2_and_4_x_1_processes_times_pairs():
    for step in (0, 7):
        one = [fingerprint(p) for p in batch(step, 1, 4)]
        np.random.seed(step)                                                     # no global generator takes part
        assert one == [fingerprint(p) for p in batch(step, 2, 2)] == [fingerprint(p) for p in batch(step, 4, 1)]
        assert len(set(one)) == 4


@fast
def test_another_seed_or_step_is_another_batch():
    prints = {(seed, step): tuple(fingerprint(p) for p in batch(step, 1, 4, seed)) for seed in (0, 1, 2) for step in (0, 1, 10)}
    assert len(set(prints.values())) == 9 and len({f for batch_ in prints.values() for f in batch_}) == 36


def test_another_process_with_another_hash_seed_draws_the_same_pairs():
    code = ("from test_dataset import *\n"
            "print(*(fingerprint(p) for p in batch(3, 2, 2)), draw_uniforms(5, 3, 1, 4, 6).sum().item(), "
            "fingerprint(evaluation_pair(depth()[2], 0)))")
    here = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **here}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*(fingerprint(p) for p in batch(3, 2, 2)), str(draw_uniforms(5, 3, 1, 4, 6).sum().item()),
                                   fingerprint(evaluation_pair(depth()[2], 0))]


@fast
def test_in_an_epoch_every_example_comes_once_in_an_order_of_its_own_and_ranks_never_share_one():
    examples, pairs = depth(), 4                                                  # 10 examples: epochs end in mid-step
    ids = [draw_pair(examples, 0, step, i, pairs).example.id for step in range(10) for i in range(pairs)]
    epochs = [ids[i:i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == sorted(e.id for e in examples) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4                           # shuffled anew
    for step in range(2):                                                        # whole steps within the first epoch
        first, second = ({p.example.id for p in batch(step, 2, 2)[k:k + 2]} for k in (0, 2))
        assert not first & second and len(first | second) == 4


@fast
def test_an_example_met_again_is_asked_and_transformed_anew():
    examples = depth(1)
    pairs = [draw_pair(examples, 0, step, 0, 1) for step in range(20)]
    assert len({p.example.id for p in pairs}) == 1 and len({fingerprint(p) for p in pairs}) == 20
    assert {p.x.question.relation for p in pairs} == {0, 1} == {int(p.negates) for p in pairs}
    assert len({(p.x.question, p.transform) for p in (draw_pair(examples, 0, 0, i, 8) for i in range(8))}) == 8  # places too


@fast
def test_uniforms_differ_between_prompts_completions_and_steps_and_are_uniform():
    u = torch.stack([draw_uniforms(0, step, i, 8, 32) for step in range(6) for i in range(4)])        # (24, 2, 8, 32)
    assert u.shape == (24, 2, 8, 32) and u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    assert len(set(u.flatten().tolist())) == u.numel()                            # x, x', completions, tokens, steps: all new
    assert abs(u.mean() - 0.5) < 3.3 / 12 ** 0.5 / u.numel() ** 0.5
    rows = u.flatten(0, 2)                                                        # (384, 32)
    assert (torch.corrcoef(rows) - torch.eye(len(rows))).abs().max() < 0.9
    assert torch.equal(draw_uniforms(0, 3, 2, 8, 32), u[14])
    assert not torch.equal(draw_uniforms(1, 3, 2, 8, 32), u[14])


@fast
def test_the_numbers_that_sample_are_not_those_that_draw_the_pair():
    u = draw_uniforms(0, 3, 1, 8, 48).flatten()
    for stream in (1, 2, 3):
        other = np.random.default_rng([0, stream, 3, 1]).random(len(u))
        assert abs(np.corrcoef(u, other)[0, 1]) < 0.15


# --- evaluation -----------------------------------------------------------------------------------------------------

@fast
def test_what_evaluation_asks_depends_on_seed_and_example_id_only():
    examples = load_examples("synthetic", "size", "test", limit=6)
    asked = {e.id: fingerprint(evaluation_pair(e, 0)) for e in examples}
    assert asked == {e.id: fingerprint(evaluation_pair(e, 0)) for e in reversed(load_examples("synthetic", "size", "test", limit=6))}
    assert len(set(asked.values())) == 6
    assert all(fingerprint(evaluation_pair(e, 1)) != asked[e.id] for e in examples)
    asked_of = Counter(evaluation_pair(e, 0).x.question.relation for e in load_examples("synthetic", "size", "test", limit=60))
    assert min(asked_of.values()) > 15


@fast
def test_the_paper_set_leaves_out_relabel_and_unnamed_in_training_and_evaluation():
    pairs = [draw_pair(depth(), 0, step, 0, 4, "paper") for step in range(30)] + [evaluation_pair(e, 0, "paper") for e in depth()]
    assert not {"relabel", "unnamed"} & {part for p in pairs for part in p.transform.parts}
    full = {part for step in range(30) for part in draw_pair(depth(), 0, step, 0, 4).transform.parts}
    assert {"relabel", "unnamed"} < full
    counting = [draw_pair(load_examples("synthetic", "counting", "train", limit=4), 0, s, 0, 1) for s in range(20)]
    assert not set(NOT_USED["counting"]) & {part for p in counting for part in p.transform.parts}


# --- examples -------------------------------------------------------------------------------------------------------

@fast
def test_synthetic_examples_have_the_task_the_split_and_the_number_asked_for_in_a_fixed_order():
    for task in TASKS:
        train, test = (load_examples("synthetic", task, split, limit=12) for split in ("train", "test"))
        assert len(train) == len(test) == 12 and {e.task for e in train + test} == {task}
        assert all(hashed("split", e.record.image_id) >= 0.2 for e in train)
        assert all(hashed("split", e.record.image_id) < 0.2 for e in test)
        assert [e.id for e in train[:5]] == [e.id for e in load_examples("synthetic", task, "train", limit=5)]
    assert all(e.record.image_id >= VALIDATION_SCENE for e in load_examples("synthetic", "depth", "val", limit=5))


@fast
def test_joint_is_the_four_boolean_tasks_in_equal_numbers_shuffled_together():
    assert tasks_of("joint") == BOOLEAN_TASKS == ("orientation", "depth", "size", "distance") and tasks_of("size") == ("size",)
    joint = load_examples("synthetic", "joint", "train", limit=8)
    assert Counter(e.task for e in joint) == dict.fromkeys(BOOLEAN_TASKS, 8)
    order = [draw_pair(joint, 0, step, i, 4).example.task for step in range(8) for i in range(4)]
    assert Counter(order) == dict.fromkeys(BOOLEAN_TASKS, 8)                       # one epoch
    assert sum(a != b for a, b in zip(order, order[1:])) > 12                     # not task after task


def omni3d_folder(folder, n=6, source="SUNRGBD", with_3d=True):
    """A folder of n pictures with a table and a lamp each, as a user would bring it."""
    images, rows = [], []
    (folder / "annotations").mkdir(parents=True)
    for i in range(n):
        file = f"{i}.png"
        Image.new("RGB", (200, 150), (40 * i, 90, 90)).save(folder / file)
        images.append({"id": i, "width": 200, "height": 150, "file_path": file, "K": [[200, 0, 100], [0, 200, 75], [0, 0, 1]]})
        for k, (name, x, z) in enumerate((("table", 10, 3.0), ("lamp", 120, 5.0))):
            row = {"id": 10 * i + k, "image_id": i, "category_name": name, "bbox2D_tight": [x, 40, x + 60, 100], "valid3D": with_3d}
            if with_3d:
                row |= {"center_cam": [x / 100 - 1, 0, z], "dimensions": [1, 1, 1 + k], "R_cam": np.eye(3).tolist()}
            rows.append(row)
    (folder / "annotations" / f"{source}_train.json").write_text(
        json.dumps({"info": {"name": source}, "images": images, "categories": [], "annotations": rows}))
    return str(folder)


@fast
def test_a_folders_examples_come_in_an_order_by_hash_and_bad_pictures_are_named_and_left_out(tmp_path, capsys):
    folder = omni3d_folder(tmp_path / "photos")
    ids = [e.record.image_id for e in load_examples(folder, "depth", "all")]
    assert sorted(ids) == list(range(6)) and ids == [e.record.image_id for e in load_examples(folder, "depth", "all")]
    (tmp_path / "photos" / "3.png").write_bytes(b"<html>")
    (tmp_path / "photos" / "4.png").unlink()
    capsys.readouterr()
    assert [e.record.image_id for e in load_examples(folder, "depth", "all")] == [i for i in ids if i not in (3, 4)]
    left_out = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert len(left_out) == 2 and "3.png" in "".join(left_out) and "4.png" in "".join(left_out)


@fast
def test_a_folder_without_examples_is_a_clear_one_line_error_with_the_mend(tmp_path):
    folder = omni3d_folder(tmp_path / "photos")
    for what in (lambda: load_examples(folder, "counting", "train"),              # no class has two instances
                 lambda: load_examples(folder, "distance", "all"),                # no three objects
                 lambda: load_examples(str(tmp_path / "nowhere"), "depth", "train"),
                 lambda: load_examples(omni3d_folder(tmp_path / "k", source="KITTI"), "depth", "train"),  # for testing only
                 lambda: load_examples(folder, "depth", "val"),
                 lambda: load_examples(omni3d_folder(tmp_path / "flat", with_3d=False), "depth", "all")):
        with pytest.raises(DataError) as caught:
            what()
        assert "\n" not in str(caught.value) and len(str(caught.value)) > 40
    with pytest.raises(DataError, match=r"photos.*counting.*train.*data\.py --check"):
        load_examples(folder, "counting", "train")


@fast
def test_pictures_with_2d_boxes_alone_can_be_drawn_for_every_task_but_counting(tmp_path):
    folder = omni3d_folder(tmp_path / "flat", with_3d=False)
    for task in ("orientation", "depth", "size", "abs_distance"):
        examples = load_examples(folder, task, "all", select="2d")
        pairs = [draw_pair(examples, 0, step, 0, 1) for step in range(12)]
        assert len(examples) == 6 and all(p.x_prime.picture.mode == "RGB" for p in pairs)


@needs_mini
@pytest.mark.parametrize("source", ["SUNRGBD", "KITTI"])
def test_pairs_of_real_photos_keep_their_boxes_inside_the_picture(source):
    for task in TASKS:
        examples = folder_examples(str(MINI), "all", "gap", (task,), (source,))
        assert examples or task == "counting"
        for e in examples[:8]:
            for side in ((pair := evaluation_pair(e, 0)).x, pair.x_prime):
                width, height = side.picture.size
                for o in side.view.objects.values():
                    x0, y0, x1, y1 = o.box2d
                    assert 0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height
                    assert min(x1 - x0, y1 - y0) >= 25                             # as they were selected
            assert set(pair.x.view.objects) == set(pair.x_prime.view.objects) == set(e.object_ids)


@fast
def test_the_demo_shows_every_task(capsys):
    runpy.run_path(str(ROOT / "dataset.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(f"{task}: T = " in printed for task in TASKS)
