"""benchmarks/unpadded.py answers as the padded model does; on a CPU each row's attention is computed alone."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from benchmarks import unpadded
from benchmarks.runtimes import narrowed
from compressor.tasks.features import torch_forward
from tests.tiny import write_model

SHAPE = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def batch_of(lengths: list[int]) -> dict[str, np.ndarray]:
    """Rows of these lengths, padded with tokens that would change the answers if they were read."""
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.random.default_rng(0).integers(1, 50, mask.shape)
    return {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": ids % 2}


@pytest.mark.parametrize("share", unpadded.PLANS.values())
@pytest.mark.parametrize("lengths", [[5, 9, 1], [4], [7, 7]])
def test_without_padding_the_logits_are_the_same(share, lengths):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SHAPE, initializer_range=0.3)).double().eval()
    model = narrowed(model, share) if share < 1 else model
    expected = torch_forward(copy.deepcopy(model), accelerate=False)(batch_of(lengths))
    found = unpadded.unpadded(model)(batch_of(lengths))
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_row_depends_on_no_other():
    torch.manual_seed(0)
    forward = unpadded.unpadded(BertForSequenceClassification(BertConfig(**SHAPE, initializer_range=0.3)).eval())
    both, alone = batch_of([6, 8]), {name: values[1:] for name, values in batch_of([6, 8]).items()}
    np.testing.assert_allclose(forward(both)[1:], forward(alone), rtol=1e-4, atol=1e-5)


class InPlace(ThreadPoolExecutor):
    """Runs what a process of its own would."""

    def __init__(self, *_):
        super().__init__(1)


def test_every_table_has_contenders_that_have_met_no_shape(tmp_path, monkeypatch):
    """... but that of one untimed call; the control's second copy is the same session, so it makes no first pass."""
    names = [f"{plan} {way}" for plan in unpadded.PLANS for way in (unpadded.FILE, unpadded.PADDED, unpadded.UNPADDED)]
    batches, processes = [batch_of([5, 9]), batch_of([4, 4])], []

    def contenders(paths, options):
        met = {name: [] for name in names}
        processes.append(met)

        def forward(name, encoding):
            met[name].append(encoding["input_ids"].shape)
            return np.arange(2.0 * len(encoding["input_ids"])).reshape(-1, 2)

        ways = {name: partial(forward, name) for name in names}
        return {**ways, unpadded.AGAIN: ways[unpadded.CONTROL]}

    monkeypatch.setattr(unpadded, "ProcessPoolExecutor", InPlace)
    monkeypatch.setattr(unpadded, "write", lambda reference, folder, precision: {})
    monkeypatch.setattr(unpadded, "contenders", contenders)
    monkeypatch.setattr(unpadded, "streams", lambda options: ({"2, as they come": batches, "2, sorted": batches[::-1]}, [4, 9]))
    assert unpadded.main(["--out", str(tmp_path), "--device", "cpu", "--rounds", "6", "--time-limit", "60"]) in (0, 3)
    assert len(processes) == 2
    for met in processes:
        assert {shapes[0] for shapes in met.values()} == {(1, 2)}
        passes = {name: shapes.count((2, 9)) for name, shapes in met.items()}
        assert passes == {name: 13 if name == unpadded.CONTROL else 7 for name in names}
    assert {path.name for path in tmp_path.iterdir()} == {"unpadded-on-cpu.json", "unpadded-on-cpu.md"}, "the GPU's stay"
    told = (tmp_path / "unpadded-on-cpu.md").read_text()
    assert told.startswith("# With padding and without it, on a CPU in fp32\n") and "fp16" not in told
    assert "Command: `python benchmarks/unpadded.py --out docs/results --rounds 6 --device cpu --time-limit 60`" in told


@pytest.mark.slow
def test_a_tiny_model_on_a_cpu(tmp_path):
    """Without a stand-in: the weights are the same in every process, or the logits would be apart."""
    model = write_model(tmp_path / "model", vocab_size=30522)
    options = ["--model", str(model), "--device", "cpu", "--batches", "4", "--rows", "16", "--rounds", "6", "--threads", "1"]
    unpadded.main(["--out", str(tmp_path), *options])
    told = (tmp_path / "unpadded-on-cpu.md").read_text()
    assert (
        told.count("## Batches of 4, ") == 2 and "TOO FAR APART" not in told and "--model model --rows 16 --batches 4" in told
    )
