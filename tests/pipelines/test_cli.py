"""The command line as a user meets it: what it prints, and how it ends."""

import io
import json
import os
import re
import subprocess
import sys

import pytest

from compressor.errors import UserError
from pipelines.cli.encoding import escape_unencodable
from pipelines.engine.runner import _RunConsole
from tests.pipelines import toys

LAZY = """
import sys, click, pipelines.cli.commands as c
def ask(command, words):
    try: c.main([*words, "--help"])
    except SystemExit: pass
    for name, inner in getattr(command, "commands", {}).items(): ask(inner, [*words, name])
ask(c.main, [])
print(sorted(sys.modules))
"""


def test_no_help_imports_anything_heavy():
    """Of any command: what does its work is imported when it runs."""
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=True)
    heavy = ("torch", "transformers", "numpy", "onnxruntime", "tritonclient", "rich", "plotly", "pydantic", "yaml")
    assert done.stdout.count("Usage:") > 20
    assert [name for name in heavy if f"'{name}'" in done.stdout] == []


@pytest.mark.parametrize(
    "command", [(), ("run",), ("check",), ("list",), ("list", "stages"), ("report",), ("serve",), ("predict",), ("loadtest",)]
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
    toys.replace(monkeypatch, "prune", packages=("click", "no-such-package"))
    code, shown, error = compress("run", project, "--out", out)
    assert (code, shown, out.exists()) == (2, "", False)
    assert error == "E901 stage 'prune' needs the package no-such-package. Install it: pip install no-such-package\n"
    assert compress("run", project, "--out", out, "--until", "tune")[0] == 0


def test_list_stages(compress):
    code, shown, _ = compress("list", "stages")
    assert code == 0
    (prune,) = [line for line in shown.splitlines() if "criterion" in line]
    assert "items (structure, criterion, scope, normalize, remove, rows" in prune and "search (target, " in prune
    assert "adapted" not in prune, "a key of remove"
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


def test_list_metrics(compress):
    code, shown, _ = compress("list", "metrics")
    assert code == 0 and "regression      spearman          Spearman (default)\n" in shown and "perplexity" not in shown
    assert "text2text       ter               TER (of the texts of task.decode)\n" in shown
    rows = json.loads(compress("list", "metrics", "--json")[1])
    defaults = {row["kind"]: row["metric"] for row in rows if row["default"]}
    assert (defaults["classification"], defaults["tokens"], defaults["generation"]) == ("accuracy", "f1", "likelihood")


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


def test_a_bug_in_any_command_is_one_line(project, out, compress, monkeypatch, tmp_path):
    from pipelines.cli.work import check_work

    def bug(*_):
        raise ZeroDivisionError("a bug of ours\nin two lines")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(check_work, "check_inputs", bug)
    code, _, error = compress("check", project)
    assert code == 1 and len(error.splitlines()) == 1
    assert error.startswith(
        "E899 compress check failed unexpectedly (ZeroDivisionError: a bug of ours in two lines). This is a bug;"
    )
    (log,) = (tmp_path / "state" / "compress").iterdir()
    assert str(log) in error and "a bug of ours" in log.read_text() and "Traceback" in log.read_text()


def test_a_bug_outside_of_a_stage_is_in_the_runs_logs(project, out, compress, monkeypatch):
    from pipelines.engine.store import Store

    def bug(*_):
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(Store, "publish", bug)
    code, _, error = compress("run", project, "--out", out)
    assert code == 1 and len(error.splitlines()) == 1 and f"its traceback is in {out / 'toy' / 'logs'}" in error
    assert json.loads((out / "toy" / "run.json").read_text())["error"]["code"] == "E899"


def test_a_bug_where_nothing_can_be_written(monkeypatch, tmp_path):
    from pipelines.terminal import last_resort

    taken = tmp_path / "taken"
    taken.touch()
    monkeypatch.setattr(last_resort, "_usual_folders", lambda: [taken])
    found = str(last_resort.coded(ZeroDivisionError(), "compress check"))
    assert found.startswith("E899 compress check failed unexpectedly (ZeroDivisionError). This is a bug; ")
    assert found.endswith("its traceback could not be written anywhere")
    assert len(str(last_resort.coded(ValueError("x" * 10_000), "it"))) < 600
    assert str(last_resort.coded(MemoryError(), "it")).startswith("E908 this machine has no memory left")


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("torch", r"torch\. Run: pip install 'torch>="),
        ("torch_pruning", r"torch-pruning\. Run: pip install 'torch-pruning>="),
        ("tritonclient", r"tritonclient\. Run: pip install 'tritonclient\[grpc,http\]>="),
        ("yaml", r"pyyaml\. Run: pip install 'pyyaml>="),
        ("torch.no_such_part", None),
        ("stranger", None),
        ("pipelines.stranger", None),
    ],
)
def test_a_core_package_that_is_missing_is_no_bug(tmp_path, monkeypatch, module, package):
    from pipelines.terminal import last_resort

    monkeypatch.setattr(last_resort, "_usual_folders", lambda: [tmp_path])
    fault = last_resort.coded(ModuleNotFoundError(f"No module named '{module}'", name=module), "compress run")
    says = f"E901 compress run needs the package {package}" if package else "E899 "
    assert re.match(says, str(fault)) and fault.exit_code == (2 if package else 1), fault


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("verify", "model"), "E805 model: no pipeline.lock.yaml here"),
        (("export", "model", "--out", "onnx", "--precision", "int7"), "E109 --precision: unknown 'int7'. One or more of: fp32"),
        (("export", "nowhere", "--out", "onnx"), "E303 model 'nowhere': no such folder"),
    ],
)
def test_what_the_arguments_alone_tell_takes_no_torch(tmp_path, arguments, says):
    """Its import takes several seconds."""
    code = "import sys\nfrom pipelines.cli.commands import main\ntry:\n    main(sys.argv[1:], prog_name='compress')\n"
    code += "finally:\n    assert not {'torch', 'transformers', 'onnx'} & set(sys.modules)\n"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith(says), done.stderr


def test_nothing_is_downloaded_to_say_that_a_folder_is_taken(tmp_path, monkeypatch):
    from pipelines.cli.work.export_work import export

    (tmp_path / "mine").touch()
    monkeypatch.setattr("compressor.models.reference._hub_folder", lambda reference: pytest.fail("downloaded"))
    with pytest.raises(UserError, match=r"E620 .*is there already"):
        export("owner/name", tmp_path, "fp32", False, False, (), (), False, False)


def test_a_reader_that_leaves_is_no_error(tmp_path):
    """compress list methods | head -1"""
    command = f"{sys.executable} -m pipelines.cli list methods --json | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[", "")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_that_is_not_utf_8_gets_every_result(encoding):
    command = [sys.executable, "-m", "pipelines.cli", "list", "methods"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"") and (rb"|\u03a9|" in done.stdout or "|Ω|".encode() in done.stdout)


@pytest.mark.parametrize("name", ["export", "compressor"])
def test_a_plain_folder_with_the_name_of_a_package(tmp_path, name):
    """`python -m` and `python -c` import folders of the current one before a package that is installed from its source."""
    (tmp_path / name).mkdir()
    for command, code, error in (
        (("-m", "pipelines.cli", "check", "none.yaml"), 2, "E110 no pipeline file 'none.yaml'"),
        (("-c", "from serving.backend_files import copy_backend; copy_backend('compress_text', 'backends')"), 0, ""),
    ):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code and done.stderr.startswith(error), done.stderr
    assert (tmp_path / "backends" / "compress_text" / "padded_model.py").is_file()


def test_what_an_encoding_lacks_is_escaped_as_in_json(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    escape_unencodable()
    print('"Ω é 😀"', flush=True)
    assert json.loads(sys.stdout.buffer.getvalue()) == "Ω é 😀"


class Closed(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text):
        raise BrokenPipeError


def test_a_run_goes_on_where_nobody_reads():
    """compress run quickstart | head -1"""
    console = _RunConsole(file=Closed())
    console.print("[1/2] tune")
    console.print("[2/2] merge")
    assert console.quiet


# a process that was started in the background ignores SIGINT, and so do its children
INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "pipelines.file.config":
            {tried}signal.raise_signal(signal.SIGINT){raised}
sys.meta_path.insert(0, Slow())
from pipelines.cli.commands import main
main(["check", "quickstart"], prog_name="compress")
"""


@pytest.mark.parametrize("raised", ["", "raise ImportError('half of a module')"])
def test_ctrl_c_in_the_first_second(raised):
    """While what the command needs is still imported; a library's import may turn it into anything."""
    caught = f"\n            except BaseException: {raised}" if raised else ""
    code = INTERRUPTED.format(tried="try: " * bool(raised), raised=caught)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Stopped.\n")


@pytest.mark.parametrize("command", [("run",), ("sweep", "--seeds", "2")])
def test_an_empty_out_is_refused(project, compress, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, _, error = compress(command[0], project, *command[1:], "--out", "")
    assert (code, error) == (2, "E801 --out: the name of a folder is empty. Give a folder, or . for this one\n")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "change", ["name=" + "a" * 300, "name=" + "b" * 100_000, "tune.id=" + "c" * 300], ids=["300", "100000", "id"]
)
def test_a_name_too_long_for_a_file_leaves_nothing_behind(project, out, compress, change):
    code, _, error = compress("run", project, "--out", out, "--set", change)
    assert code == 2 and error[:4] in ("E801", "E104") and not out.exists()


@pytest.mark.parametrize("folder", ["x" * 300, "deep/" * 1000, "x\0y"])
def test_an_out_that_no_file_system_takes(project, compress, folder, tmp_path):
    code, _, error = compress("run", project, "--out", f"{tmp_path}/{folder}")
    assert code == 2 and error.startswith("E801") and len(error) < 600
