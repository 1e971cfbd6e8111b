"""What was tuned on one base is refused by another of the same architecture, on every architecture and in both formats."""

import pytest
import torch

import compressor
from compressor.checkpoint import save_state
from compressor.errors import UserError
from compressor.models.build import build
from compressor.models.reference import resolve
from compressor.storage import delta_file
from tests.compressor.conftest import logits, tiny, tuned
from tests.tiny import write_tokenizer

LABELS = ["a", "b", "c"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Architecture -> two bases whose weights differ, each written when it is first asked for."""
    made = {}

    def pair(architecture: str):
        if architecture not in made:
            made[architecture] = [_base(tmp_path_factory.mktemp(architecture), architecture, seed) for seed in (0, 1)]
        return made[architecture]

    return pair


def _base(folder, architecture: str, seed: int):
    tiny(architecture, torch.float32, seed).base_model.save_pretrained(folder)
    write_tokenizer(folder, architecture)
    return resolve(str(folder))


@pytest.mark.parametrize("case", ["lora", "selective", "id3", "propetl"])
def test_another_base_is_refused(case, architecture, bases, tmp_path):
    own, other = bases(architecture)
    model = tuned(build(own.folder, LABELS), case)
    about = {"base": own.reference, "base_sha256": own.sha256, "label_names": LABELS}
    state, delta = tmp_path / "state", tmp_path / "delta.safetensors"
    save_state(model, state, **about)
    delta_file.write(model, delta, **about)
    on_live = compressor.load(own.folder, delta=delta)
    assert torch.equal(logits(on_live), logits(model)) and torch.equal(logits(compressor.load(state)), logits(model))
    about_other = {"base": other.reference, "base_sha256": other.sha256, "label_names": LABELS}
    delta_file.write(tuned(build(other.folder, LABELS), case), tmp_path / "other", **about_other)
    for wrong in (
        {"folder": state, "base": other.folder},
        {"base": other.folder, "delta": delta},
        {"base": on_live, "delta": tmp_path / "other"},
    ):
        with pytest.raises(UserError, match="E306"):
            compressor.load(**wrong)
    assert torch.equal(logits(on_live), logits(model)), "a refusal leaves the live model as it was"
