"""`compress report RUN`: the summary again, and what is left of each layer, from what lies on disk."""

import json
import re

import pytest

from compressor.errors import UserError
from compressor.run_store import LOCK_FILE
from pipelines.cli.shown import summary
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.reporting.kept import layers_left, plan_table
from pipelines.runs.finished import plan_of
from tests.reporting.conftest import write_report
from tests.tiny import write_pipeline

FAST = {"epochs": 0.1, "batch_size": 8}
STAGES = [
    {"tune": {"method": "lora", "rank": 2, **FAST}},
    {"prune": [
        {"structure": "heads", "criterion": "random", "remove": 1},
        {"structure": "neurons", "criterion": "random", "remove": 0.5},
    ]},
    {"recover": FAST},
    {"prune": {"structure": "layers", "criterion": "random", "remove": 1}},
    {"merge": None},
]  # fmt: skip


@pytest.mark.slow
def test_what_two_prunes_left_of_a_t5(tmp_path, compress):
    """Counted from the dense model, one row a layer of it; nothing is computed again."""
    run_pipeline(load_pipeline(write_pipeline(tmp_path, stages=STAGES, model_type="t5", rows=16)), tmp_path / "out")
    run = tmp_path / "out" / "tiny"
    layers = plan_of(run)
    assert [row["units"]["heads"]["of"] for row in layers] == [4] * 4
    assert [sorted(row["units"]) for row in layers] == 2 * [["heads", "neurons"]] + 2 * [["cross_heads", "heads", "neurons"]]
    assert sum(row["gone"] for row in layers) == 1
    assert {len(row["units"]["neurons"]["left"]) for row in layers if not row["gone"]} == {12}
    code, shown, _ = compress("report", run, "--plan")
    assert code == 0
    assert "9 of 16 heads" in shown and "36 of 96 FFN neurons" in shown and shown.count("gone") in (2, 3)
    (tmp_path / "model" / "model.safetensors").unlink()
    assert compress("report", run, "--plan")[1] in shown


def test_a_character_is_a_unit_or_a_bin():
    kept = {"0": {"heads": [0, 2], "neurons": list(range(48))}}
    _, rows = plan_table(layers_left(kept, [{"heads": 3, "neurons": 64}, {"heads": 3, "neurons": 64}]))
    assert rows == [["0", "█·█ 2", f"{'█' * 24}{'·' * 8} 48"], ["1", "gone", "gone"]]
    _, rows = plan_table(layers_left({"0": {"neurons": [0, *range(4, 64)]}}, [{"neurons": 128}]))
    assert rows[0][1].startswith("▂█") and rows[0][1].endswith("· 61")


def test_the_summary_again_and_runs_that_have_none(project, out, compress):
    compress("run", project, "--out", out)
    code, shown, _ = compress("report", out / "toy")
    assert code == 0 and "accuracy" in shown and shown.splitlines()[-1] == f"report: {out / 'toy' / 'report.json'}"
    assert compress("report", out)[0] == compress("report", out, "--plan")[0] == 2
    with pytest.raises(UserError, match="E805"):
        plan_of(out)


def test_the_terminal_shows_what_is_compared_and_what_a_headline_hides(tmp_path, capsys):
    """All notes are on the page; reports of earlier versions have none in brief."""
    folder = write_report(tmp_path, edit=lambda measured: measured.update(waited=0.89))
    path = folder / "report.json"
    report = json.loads(path.read_text())
    summary(folder)
    headline, disturbed, rival, above, heads, *rows = capsys.readouterr().out.splitlines()
    assert headline == f"{report['headline']}." and disturbed.startswith("- The times are disturbed, ")
    assert rival.startswith("- Against the fastest dense file, ONNX int8: ") and rows
    assert re.split(" {2,}", heads.strip()) == ["dense PyTorch", "compressed ONNX int8", "against PyTorch"]
    path.write_text(json.dumps({key: value for key, value in report.items() if key != "brief"}))
    summary(folder)
    assert capsys.readouterr().out.splitlines() == [headline, above, heads, *rows]


def test_a_run_that_prunes_nothing(tmp_path):
    run_pipeline(load_pipeline(write_pipeline(tmp_path, stages=STAGES[:1], rows=16)), tmp_path / "out")
    assert plan_of(tmp_path / "out" / "tiny") == []


def test_a_run_that_prunes_weights_alone(tmp_path, compress):
    """Every unit is there, and that is no fault; nor is it one of ours when the lock file is damaged."""
    stages = [STAGES[0], {"prune": {"structure": "weights", "remove": 0.2}}]
    run_pipeline(load_pipeline(write_pipeline(tmp_path, stages=stages, rows=16)), tmp_path / "out")
    run = tmp_path / "out" / "tiny"
    assert plan_of(run) == []
    code, shown, _ = compress("report", run, "--plan")
    assert code == 0 and shown.endswith("no heads, neurons or layers were removed\n")
    (run / LOCK_FILE).write_text("stages: [")
    code, _, error = compress("report", run, "--plan")
    assert code == 2 and error.startswith(f"E803 {run / LOCK_FILE}: unreadable")


def test_without_measurements_zeros_that_a_merge_would_fill_are_counted_before_it(tmp_path):
    """The non-zeros of W where it is not hidden, and those of the deltas."""
    hidden = {"prune": {"structure": "weights", "criterion": "weight", "modules": "query", "remove": 0.5, "hides": "weight"}}
    run_pipeline(
        load_pipeline(write_pipeline(tmp_path, stages=[STAGES[0], hidden, {"report": None}], rows=16)), tmp_path / "out"
    )
    report = json.loads((tmp_path / "out" / "tiny" / "report.json").read_text())
    [masked] = report["density"]
    assert masked["pattern"].endswith("of W alone") and masked["nonzeros"] == masked["entries"] / 2
    [row] = [row for row in report["summary"] if row["metric"].startswith("non-zeros")]
    assert row["metric"] == "non-zeros of masked weights and deltas, not merged"
    dense, compressed = (int(row[name].replace(",", "")) for name in ("dense", "compressed"))
    deltas = 2 * 2 * 2 * (32 + 32)  # of two matrices in two blocks, each of rank 2
    assert compressed == dense - masked["entries"] / 2 + deltas
