"""Claims about benchmark.py: both forms do the same step, tokens and memory are counted right, absences are said plainly."""
import json
import sys
from dataclasses import replace

import pytest
import torch

import benchmark
from benchmark_steps import FORMS, Shape, Stepper, judged, pair_advantages, peak_memory, small_config
from command import run

TOY = Shape(P=40, C=5, K=3, B=2, pixels=56)


@pytest.fixture(scope="module")
def steppers():
    """One model for both forms, with a LoRA that matters."""
    ours = Stepper("ours", TOY)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in ours.vlm.model.named_parameters():
            if "lora_B" in name:
                p.copy_(0.05 * torch.randn(p.shape, generator=generator))
    return {form: Stepper(form, TOY, ours.vlm) for form in FORMS}


def gradients(stepper, completions, advantages):
    stepper.optimiser.zero_grad(set_to_none=True)
    stepper.update(stepper.vlm, stepper.prompts(), completions, advantages, stepper.pairs)
    return [p.grad.clone() for p in stepper.parameters]


@pytest.mark.fast
def test_both_forms_have_the_same_gradient(steppers):
    ours, repeated = steppers["ours"], steppers["repeated"]
    completions = ours.sample(ours.vlm, ours.prompts(), TOY, seed=0)
    advantages = judged(ours.vlm, completions, seed=0)
    for found, expected in zip(gradients(ours, completions, advantages), gradients(repeated, completions, advantages)):
        assert expected.norm() > 0 and (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.fast
@pytest.mark.parametrize("form", FORMS)
def test_prompts_have_p_tokens_completions_c_and_none_is_an_end_or_picture_token(steppers, form):
    stepper = steppers[form]
    assert [len(p.input_ids) for p in stepper.prompts()] == [TOY.P] * TOY.B
    completions = stepper.sample(stepper.vlm, stepper.prompts(), TOY, seed=3)
    assert completions.tokens.shape == (TOY.B, TOY.K, TOY.C) and (completions.lengths == TOY.C).all()
    assert not stepper.vlm.forbidden[completions.tokens].any()
    assert stepper.vlm.forbidden[stepper.vlm.end_ids].all()


@pytest.mark.fast
@pytest.mark.parametrize("form, uncounted", [("ours", TOY.B * TOY.K), ("repeated", 0)])
def test_the_token_formula_is_what_the_first_layer_sees(steppers, form, uncounted):
    """Ours leaves out each completion's last token, which predicts nothing."""
    stepper, seen = steppers[form], []
    completions = stepper.sample(stepper.vlm, stepper.prompts(), TOY, seed=0)
    layer = stepper.vlm.base.model.language_model.layers[0]
    hook = layer.self_attn.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["hidden_states"].shape[:2].numel()),
                                                     with_kwargs=True)
    stepper.update(stepper.vlm, stepper.prompts(), completions, judged(stepper.vlm, completions, 0), stepper.pairs)
    hook.remove()
    assert sum(seen) == TOY.tokens(form) - uncounted


@pytest.mark.fast
def test_the_token_ratio_by_hand():
    assert Shape(P=293, C=64).token_ratio == pytest.approx(8 * 357 / (293 + 512))
    assert Shape(P=100, C=10, K=1).token_ratio == 1


@pytest.mark.fast
def test_peak_memory_is_the_most_alive_at_a_time_beyond_what_was_there():
    before = torch.ones(10_000)
    with peak_memory(torch.device("cpu")) as peak:
        a = torch.ones(1000, 250)                   # 1 MB
        b = a + 1                                   # 2 MB
        del a
        c = torch.ones(500, 250)                    # 1.5 MB
        del b, before
        d = torch.ones(1000, 300)                   # 1.7 MB
    assert 2_000_000 <= peak[0] < 2_000_000 + 10_000 and c.numel() + d.numel() > 0


@pytest.mark.fast
def test_memory_repeats_exactly_and_one_prompt_at_a_time_takes_less(steppers):
    ours = steppers["ours"]
    one = Stepper("ours", TOY, ours.vlm, **benchmark.ONE_PROMPT)
    assert ours.update_memory() == ours.update_memory()
    assert 0 < one.update_memory() < ours.update_memory() < steppers["repeated"].update_memory()


@pytest.mark.fast
def test_no_group_is_skipped_whatever_the_coins_say(steppers):
    completions = steppers["ours"].sample(steppers["ours"].vlm, steppers["ours"].prompts(), TOY, seed=0)
    for seed in range(5):
        advantages = judged(steppers["ours"].vlm, completions, seed)
        assert advantages.shape == (TOY.B, TOY.K) and (advantages != 0).all() and (advantages.std(1) > 0).all()
    assert all(len(a) == 4 for a in pair_advantages([True, False, True, True], [False, True, True, True]))


@pytest.mark.fast
def test_ratios_in_the_report_are_medians_within_rounds():
    row = lambda step: {"step": step, "rollout": step / 2, "reward": 0.0, "update": step / 2}    # noqa: E731
    contestants = {"ours": {"rows": [row(1.0), row(2.0), row(4.0)], "memory": 10},
                   "repeated": {"rows": [row(2.0), row(8.0), row(40.0)], "memory": 40},
                   "ours, prompt by prompt": {"rows": [row(1.0)] * 3, "memory": 2}}
    lines = benchmark.table({"shape": vars(TOY), "contestants": contestants})
    repeated = next(line for line in lines if line.startswith("repeated")).split()
    assert repeated[1:5] == ["8.00", "4.00", "4.00", "0.0"] and repeated[5:] == ["0.250", "0.250", "0.250", "0.250", "0.050"]
    assert f"{4 / TOY.token_ratio:.2f} of the token ratio" in lines[-1]


def test_the_whole_command_in_small(tmp_path, monkeypatch, capsys):
    """Without TRL it says so and goes on; every part leaves its lines, and what was measured before is kept."""
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setattr(benchmark, "SHAPES", {"long": TOY, "short": TOY})
    monkeypatch.setattr(benchmark, "SHORT", TOY)
    monkeypatch.setattr(benchmark, "SWEEPS", {"P": [TOY, replace(TOY, P=45)]})
    monkeypatch.setattr(benchmark, "GROUP_SIZES", (3,))
    out, picture = str(tmp_path / "speed"), tmp_path / "idea.png"
    flags = ["--rounds", "1", "--out", out, "--picture", str(picture), "--parts"]
    assert benchmark.main([*flags, "short", "pairing"]) == 0 and not picture.exists()
    assert benchmark.main([*flags, "long", "sweeps"]) == 0 and picture.stat().st_size > 10_000
    said, kept = capsys.readouterr().out, json.loads((tmp_path / "speed.json").read_text())
    assert "TRL was not measured" in said and "benchmark_trl.py" in said
    assert set(kept) == {"short", "long", "sweeps", "pairing", "machine"} and "TRL" not in kept["long"]["contestants"]
    text = (tmp_path / "speed.txt").read_text()
    assert text.count("of the token ratio") == 2 and "sweep of P" in text and "scipy" in text and "pairs with their advantages" in text


@pytest.mark.fast
def test_trl_asked_for_and_missing_is_one_clear_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)
    assert run(lambda: benchmark.main(["--trl"])) == 2
    assert "trl" in capsys.readouterr().err and "benchmark_trl.py" in benchmark.NO_TRL


@pytest.mark.fast
def test_real_size_refuses_without_a_gpu_and_names_the_mend(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(lambda: benchmark.main(["--real-size", "3B"])) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --real-size 3B needs a CUDA GPU") and error.count("\n") == 1


@pytest.mark.fast
@pytest.mark.parametrize("dtype, largest_gap", [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_the_real_size_path_runs_on_a_small_configuration(dtype, largest_gap, capsys):
    found = benchmark.real_size(small_config(), TOY, torch.device("cpu"), dtype, steps=2)
    assert len(found["rows"]) == 2 and all(r["update"] > 0 and r["rollout"] > 0 for r in found["rows"])
    assert 0 < found["rollout_share"] < 1 and found["peak_bytes"] is None
    assert 0 <= found["gap_mean"] <= found["gap_max"] < largest_gap
    assert capsys.readouterr().out.count("ratio_deviation") == 2
