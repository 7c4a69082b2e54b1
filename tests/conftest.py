"""Fixtures that several test files share. None of them needs the network or the embedded model.

Imports stand inside, so that tests without a model need not wait for torch.
"""
import os
from functools import partial

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")        # many small processes; with two threads each they crawl
os.environ["CUDA_VISIBLE_DEVICES"] = ""      # bit-for-bit claims are about the CPU, also on a machine with a GPU


@pytest.fixture(scope="session")
def tokenizer():
    import pretrain

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "corpus", partial(pretrain.corpus, 256))  # a few texts make as good a test
        return pretrain.build_tokenizer()


@pytest.fixture(scope="session")
def base(tmp_path_factory, tokenizer):
    """Folder of a random model."""
    from toy import save_base

    return save_base(tmp_path_factory.mktemp("models") / "base", 0, tokenizer)


@pytest.fixture(scope="session")
def other_base(tmp_path_factory, tokenizer):
    """The same shape with other weights."""
    from toy import save_base

    return save_base(tmp_path_factory.mktemp("models") / "other", 1, tokenizer)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """Folder of six pictures to train on and four to test on."""
    from toy import write_photos

    return write_photos(tmp_path_factory.mktemp("photos"), train=6, test=4)


@pytest.fixture
def vlm(base):
    import torch

    from model import load_vlm

    return load_vlm(base, torch.device("cpu"))


@pytest.fixture
def lora_vlm(vlm):
    """With a rank-4 adapter whose B is not zero, so that it matters."""
    import torch

    from model import add_lora

    add_lora(vlm, rank=4, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in vlm.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return vlm


@pytest.fixture
def quick(monkeypatch):
    """Runs that are about numbers: every completion parses, to answers that differ, and no pictures are drawn."""
    from toy import shortcuts

    shortcuts(monkeypatch)
