"""What a report of a generating model says of the tokens that are written one at a time."""

import json

import pytest

SPEEDS = {"dense PyTorch fp32": 30.0, "dense ONNX fp32": 20.0, "dense ONNX int8": 12.0}


def written(measured):
    """Adds further tokens: compressed files take half of what dense ones do."""
    for row in measured["candidates"]:
        ms = SPEEDS.get(row["name"]) or SPEEDS[row["name"].replace("compressed", "dense")] / 2
        row["further_tokens"] = [
            {
                "batch": batch, "length": 128, "p50": ms, "p95": ms, "p99": ms, "iqr": 0.5, "throughput": 1000 * batch / ms,
                "samples_ms": [ms * (1 + number / 100) for number in range(-2, 3)], "limit_share": 0.5, "limit": "memory",
            }
            for batch in (1, 8)
        ]  # fmt: skip


def test_headline_summary_and_table_have_them(write):
    folder = write(edit=written)
    report = json.loads((folder / "report.json").read_text())
    alone = "2.00 × faster against the fastest dense file, ONNX int8"
    assert f", 5.00 × faster for each further token ({alone}), " in report["headline"]
    one, eight = (row for row in report["summary"] if row["metric"].startswith("p50 of a further token"))
    assert (one["metric"], eight["metric"]) == tuple(f"p50 of a further token, batch {n} behind 128" for n in (1, 8))
    assert (one["dense"], one["runtime"], one["compressed"]) == ("30.0 ms", "20.0 ms", "6.00 ms")
    assert one["change"].startswith("5.00 × faster (") and one["change_runtime"].startswith("3.33 × faster (")
    assert "samples_ms" not in json.dumps(report)
    page = (folder / "report.md").read_text()
    assert "| compressed ONNX int8 | 8 | 128 | 6.00 | 0.500 | 1,330 | 5.00 × |" in page
    assert "of the limit" not in page.partition("tokens one at a time")[2].partition("##")[0]


def test_a_share_of_the_limit_is_shown_where_it_was_measured(write):
    def edit(measured):
        written(measured)
        measured["limits"] = {"fp32": 1e11, "memory": 1e10, "how": {"fp32": "torch.mm", "memory": "copy"}}

    page = (write(edit=edit) / "report.md").read_text()
    assert "| compressed ONNX int8 | 8 | 128 | 6.00 | 0.500 | 1,330 | 5.00 × | 50.0 % (memory) |" in page


@pytest.mark.parametrize(
    ("kind", "timed"), [("generation", "of one pass over a prompt"), ("text2text", "that of the first token")]
)
def test_only_further_tokens_that_were_timed_are_told(write, kind, timed):
    """With further_tokens: false, and on CUDA, there are none."""
    for edit in (None, written):
        report = json.loads((write(kind=kind, edit=edit) / "report.json").read_text())
        (note,) = [note for note in report["notes"] if timed in note]
        assert note.endswith(" The tokens generated behind it, on a cache, are timed apart.") is (edit is written)
        assert ("timed apart" in note) is (edit is written)


def test_a_model_that_writes_nothing_has_none(write):
    folder = write()
    assert "further token" not in (folder / "report.md").read_text() + (folder / "report.json").read_text()
