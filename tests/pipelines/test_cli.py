"""The command line as a user meets it: what it prints, and how it ends."""

import json
import subprocess
import sys

import pytest

LAZY = "import sys, pipelines.cli\ntry: pipelines.cli.main(['--help'])\nexcept SystemExit: pass\nprint(sorted(sys.modules))"


def test_help_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=True)
    heavy = ("torch", "transformers", "numpy", "onnxruntime", "tritonclient", "rich", "plotly", "pydantic", "yaml")
    assert "Usage:" in done.stdout
    assert [name for name in heavy if f"'{name}'" in done.stdout] == []


@pytest.mark.parametrize(
    "command", [(), ("run",), ("check",), ("list",), ("list", "stages"), ("report",), ("serve",), ("predict",)]
)
def test_every_help_has_an_example(compress, command):
    code, shown, _ = compress(*command, "--help")
    assert code == 0
    assert f"Example: compress {' '.join(command)}".rstrip() in shown


def test_a_run_ends_with_the_summary_and_the_reports_path(project, out, compress):
    code, shown, error = compress("run", project, "--out", out)
    assert (code, error) == (0, "")
    lines = shown.splitlines()
    assert "select" in lines[0] and lines[-1] == f"report: {out / 'toy' / 'report.json'}"
    assert "accuracy" in shown and "-1.0 points" in shown
    code, shown, _ = compress("run", project, "--out", out, "--until", "tune")
    assert shown.splitlines()[-1] == f"run: {out / 'toy'}"
    assert not (out / "toy" / "report.json").exists()


def test_a_dry_run_says_what_would_run(project, out, compress):
    compress("run", project, "--out", out)
    code, shown, _ = compress("run", project, "--out", out, "--set", "prune.text=y", "--dry-run")
    assert code == 0
    assert [line.split()[1:] for line in shown.splitlines()] == [
        ["select", "reuse"],
        ["tune", "reuse"],
        ["prune", "run"],
        ["report", "run"],
    ]


def test_check_speaks_of_faults_only(project, compress):
    code, shown, _ = compress("check", project)
    assert (code, shown) == (0, f"{project}: no faults in 4 stages, the model and the data\n")
    code, shown, error = compress("check", project, "--set", "tune.fils=2")
    assert (code, shown) == (2, "")
    assert error == "E102 --set tune.fils=2: unknown key. Did you mean 'files'?\n"


@pytest.mark.parametrize(("trouble", "code"), [("user_error", 2), ("check_error", 3), ("bug", 1)])
def test_exit_codes(project, out, compress, trouble, code):
    out.mkdir()
    (out / "trouble-tune").write_text(trouble)
    found, _, error = compress("run", project, "--out", out)
    assert found == code
    assert len(error.splitlines()) == 1 and error.startswith("E") and "Traceback" not in error


def test_a_package_that_is_missing_is_named_before_anything_runs(project, out, compress, monkeypatch):
    import dataclasses

    from tests.pipelines import toys

    lacking = dataclasses.replace(toys.STAGES[2], packages=("click", "no-such-package"))
    monkeypatch.setattr(sys.modules["pipelines.stages.prune"], "STAGE", lacking)
    code, shown, error = compress("run", project, "--out", out)
    assert (code, shown, out.exists()) == (2, "", False)
    assert error == "E901 stage 'prune' needs the package no-such-package. Install it: pip install no-such-package\n"
    assert compress("run", project, "--out", out, "--until", "tune")[0] == 0


def test_list_stages(compress):
    code, shown, _ = compress("list", "stages")
    assert code == 0
    assert "structure, criterion, scope, normalize, remove" in shown
    rows = json.loads(compress("list", "stages", "--json")[1])
    assert [row["name"] for row in rows][:3] == ["select", "tune", "prune"]
    assert rows[1]["config"]["properties"]["rank"]["description"]


def test_list_methods(compress):
    code, shown, _ = compress("list", "methods")
    assert code == 0 and "r(m+n) per matrix + |Ω|" in shown
    rows = {row["name"]: row for row in json.loads(compress("list", "methods", "--json")[1])}
    assert rows["selective"]["strategies"] == ["static", "increment", "repeat"] and "fish" in rows["dsee"]["scores"]
    assert all(bool(row["scores"]) >= row["uses_omega"] for row in rows.values()) and not rows["lora"]["scopes"]
    assert rows["selective"]["uses_omega"] and rows["selective"]["reads"][0] == "modules" and rows["full"]["trains_base"]


def test_list_architectures(compress):
    code, shown, _ = compress("list", "architectures")
    assert code == 0 and "tested: tiny random models through every stage; pretrained: MiniLM-L6" in shown
    rows = json.loads(compress("list", "architectures", "--json")[1])
    assert [row["model_type"] for row in rows if "cross_heads" in row["structures"]] == ["t5"]


def test_serve_wants_a_run_that_deployed(project, out, compress):
    code, _, error = compress("serve", out)
    assert (code, error[:4]) == (2, "E805")
    compress("run", project, "--out", out)
    code, _, error = compress("serve", out / "toy")
    assert (code, "has deployed nothing" in error) == (2, True)


def test_predict_needs_a_pair_for_each_text(compress):
    code, _, error = compress("predict", "127.0.0.1:1", "m", "a", "b", "--pair", "c")
    assert (code, error) == (2, "E112 1 --pair for 2 texts. Give --pair once for each text, in order\n")


def test_usage_errors_and_version(compress):
    assert compress("run")[0] == 2
    assert compress("run", "x", "--nonsense")[0] == 2
    assert compress("--version")[1].startswith("compress ")
