"""The benchmarks of generated tokens, on a tiny decoder or with times that are given: nothing timed is asserted."""

import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import first_token
from benchmarks.first_token import Stream
from benchmarks.generation import main
from compressor.checkpoint import save_checkpoint
from export.standalone.folder import export_folder
from tests.compressor.conftest import tiny
from tests.tiny import write_tokenizer


@pytest.mark.slow
def test_every_precision_has_its_row(tmp_path, capsys):
    write_tokenizer(tmp_path / "words", "gpt2")
    save_checkpoint(tiny("gpt2", torch.float32, auto=AutoModelForCausalLM), tmp_path / "model", tmp_path / "words")
    facts = export_folder(str(tmp_path / "model"), tmp_path / "onnx", precisions=["fp32", "int8"])
    assert main([str(tmp_path / "onnx"), "--prompt", "3", "--new", "4", "--rounds", "2"]) == 0
    told = capsys.readouterr().out
    assert re.findall(r"^\| (\w+) \| ([\d,]+) \|", told, re.MULTILINE) == [
        (row["precision"], f"{row['bytes']:,}") for row in facts["files"].values()
    ]


def test_few_prompts_show_the_slowest_first_token_and_no_quantile(monkeypatch):
    waits = [0.01 * number for number in range(1, 33)]
    monkeypatch.setattr(
        first_token, "streamed", lambda port, prompts, tokens: [Stream(each, 2, (waits[int(each)], 1.0)) for each in prompts]
    )
    prompts = [str(number) for number in range(32)]
    heading, _, row = first_token.rows(SimpleNamespace(tokens=2, clients=[1]), 0, prompts, prompts)
    assert heading.startswith("| clients | first token p50, ms | slowest, ms |") and row.startswith("| 1 | 165.0 | 320.0 |")


def test_another_folder_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])
    assert "E602 " in capsys.readouterr().err
