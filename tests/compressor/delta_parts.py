"""What the tests of delta files share."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compressor.errors import UserError
from compressor.storage import delta_file
from compressor.storage.live import remember
from tests.compressor.conftest import tiny

THREE = ("query", "value", "ffn_out")
LABELS = ["a", "b", "c"]


def write(model, path, *, sha256="0", labels=LABELS, head=True):
    delta_file.write(model, path, base="here", base_sha256=sha256, label_names=labels, head=head)
    return path


def live(architecture="bert", dtype=torch.float32, sha256="0"):
    """A bare base that knows what it is, as `compressor.load` gives it."""
    return remember(tiny(architecture, dtype), "here", sha256)


def bits_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def sealed(source, path, change):
    """A copy of a delta file whose description went through `change`, its checksum made anew; returns the path."""
    with safe_open(source, "pt") as stream:
        description = json.loads(stream.metadata()[delta_file.KEY])
        flat = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    del description["sha256"]
    description = change(description)
    text = json.dumps({**description, "sha256": delta_file._digest(description, flat)})
    save_file(flat, path, {delta_file.KEY: text})
    return path


def refused(code: str, call, *arguments, **named) -> str:
    with pytest.raises(UserError) as error:
        call(*arguments, **named)
    assert error.value.code == code
    return str(error.value)
