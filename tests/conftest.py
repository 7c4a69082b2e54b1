"""Fixtures that several test files share. None of them needs the network or the embedded model."""

from functools import partial

import pretrain
import pytest
import toy
import torch

from model import add_lora, load_vlm


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The models are tiny: a second thread only costs."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "corpus", partial(pretrain.corpus, 256))       # a few texts make as good a test
        return pretrain.build_tokenizer()


@pytest.fixture(scope="session")
def base(tmp_path_factory, tokenizer):
    """Folder of a random model."""
    return toy.save_base(tmp_path_factory.mktemp("models") / "base", 0, tokenizer)


@pytest.fixture(scope="session")
def other_base(tmp_path_factory, tokenizer):
    """The same shape with other weights."""
    return toy.save_base(tmp_path_factory.mktemp("models") / "other", 1, tokenizer)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """Folder of six pictures to train on and four to test on."""
    return toy.write_photos(tmp_path_factory.mktemp("photos"), train=6, test=4)


@pytest.fixture
def vlm(base):
    return load_vlm(base, torch.device("cpu"), max_pixels=pretrain.NATIVE_PIXELS)


@pytest.fixture
def lora_vlm(vlm):
    """With a rank-4 adapter whose B is not zero, so that it matters."""
    add_lora(vlm, rank=4, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in vlm.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return vlm
