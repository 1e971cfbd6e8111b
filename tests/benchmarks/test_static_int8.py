"""benchmarks/static_int8.py on a tiny run, in earnest but for the times."""

import pytest

pytest.importorskip("openvino", reason="the extra openvino is not installed")

from benchmarks import static_int8
from export.latency.measure import summarize
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from tests.tiny import write_pipeline

STAGES = [{"tune": {"method": "lora", "rank": 2, "epochs": 1}}, {"merge": None}]


@pytest.fixture
def ask(monkeypatch):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["static_int8.py", *map(str, arguments)])
        static_int8.main()

    return run


@pytest.mark.slow
def test_every_file_is_judged_and_timed(tmp_path, ask, monkeypatch):
    def measured(variants, shapes, rounds):
        return [summarize(one.name, *shapes[0], [10.0 * place] * rounds) for place, one in enumerate(variants, start=1)]

    run_pipeline(load_pipeline(write_pipeline(tmp_path / "project", stages=STAGES)), tmp_path / "runs")
    monkeypatch.setattr(static_int8, "measure", measured)
    ask(tmp_path / "runs" / "tiny", "--model", tmp_path / "project" / "model", "--rounds", "5", "--out", tmp_path)
    rows = [line.split(" | ") for line in (tmp_path / "static_int8.md").read_text().splitlines() if line.startswith("| O")]
    assert [row[0].removeprefix("| ") for row in rows][2:] == [*static_int8.STATIC, "OpenVINO static int8"]
    assert [row[7].removesuffix(" |") for row in rows] == ["2.00", "1.00", "0.67", "0.50", "0.40", "0.33"]
    assert (rows[0][2], rows[0][3]) == ("+0.0", "100.0%")
    assert len({row[4] for row in rows}) > 1, "files of several sizes"


def test_a_folder_that_is_no_run(tmp_path, ask, capsys):
    with pytest.raises(SystemExit) as ended:
        ask(tmp_path)
    assert ended.value.code == 2 and "give the folder of a finished run" in capsys.readouterr().err
