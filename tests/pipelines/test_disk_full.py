"""A full disk is E804 and a missing permission E801, from wherever they come; the same command then ends in equal bytes."""

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest

from compressor.errors import CheckError, CompressError, UserError
from pipelines.engine.disk import disk_fault
from pipelines.engine.runner import run_pipeline
from pipelines.engine.store import replace_files
from pipelines.file.config import load_pipeline
from tests.pipelines import toys
from tests.pipelines.toys import tree
from tests.tiny import STAGES, write_pipeline


def caused(error: Exception, cause: Exception) -> Exception:
    """The error, raised while another was handled."""
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "E804"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "E804"),
        (OSError(errno.EFBIG, "File too large"), "E804"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), "E804"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 470"), "E804"),
        (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), "E804"),
        (caused(RuntimeError("unknown"), OSError(errno.ENOSPC, "")), "E804"),
        (caused(UserError("E622", "cannot be traced", "-"), OSError(errno.ENOSPC, "")), "E804"),
        (OSError(errno.EACCES, "Permission denied"), "E801"),
        (OSError(errno.EROFS, "Read-only file system"), "E801"),
        (OSError(errno.ENOENT, "No such file"), None),
        (UserError("E207", "the label 'No space left on device'", "-"), None),
        (caused(UserError("E201", "cannot be read", "-"), OSError(errno.EACCES, "")), None),
        (CheckError("E610", "logits differ", "-"), None),
        (ValueError("disc"), None),
        (shutil.Error([("from/a", "to/a", "[Errno 2] No such file or directory: 'from/a'")]), None),
        (shutil.SameFileError("'a' and 'a' are the same file"), None),
    ],
)
def test_what_is_a_full_disk(error, code):
    fault = disk_fault(error, Path("runs"))
    assert (fault and fault.code) == code


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "from/file", None, "to/file"), "E804 to/file: the disk is full"),
        (OSError(errno.ENOSPC, "No space left on device", "to/file"), "E804 to/file: the disk is full"),
        (OSError(errno.EROFS, "Read-only file system", "to/file"), "E801 to/file: cannot be written"),
        (shutil.Error([("from/a", "to/a", "[Errno 28] No space left on device: 'to/a'")]), "E804 to/a: the disk is full"),
        (shutil.Error([("from/a", "to/a", "[Errno 122] Disk quota exceeded")]), "E804 to/a: the disk quota is used up"),
    ],
)
def test_the_file_that_is_named_is_the_one_that_was_written(error, told):
    """A copy that fails names its source first. What to do is true of every command: not all have --out."""
    fault = str(disk_fault(error, Path("runs")))
    assert fault.startswith(told) and "--out" not in fault


@pytest.mark.parametrize(("mode", "code"), [("full", "E804"), ("gone", None)])
def test_a_temporary_folder_that_cannot_be_written(mode, code):
    """tempfile asks for one when a library is imported, and says no reason."""
    ask = "import resource, tempfile; from pathlib import Path; from pipelines.engine.disk import disk_fault"
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))" if mode == "full" else "tempfile._candidate_tempdir_list = list"
    found = "fault = disk_fault(error, Path('runs')); print(fault and fault.code)"
    program = f"{ask}\n{limit}\ntry:\n    tempfile.gettempdir()\nexcept FileNotFoundError as error:\n    {found}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(code)


def test_an_error_that_holds_itself_ends(tmp_path):
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert disk_fault(first) is None


def test_files_are_replaced_together_or_not_at_all(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    replace_files({path: b"old" for path in paths})
    (tmp_path / ".c.new").mkdir()  # cannot be written
    with pytest.raises(IsADirectoryError):
        replace_files({path: b"new" for path in paths})
    assert [path.read_bytes() for path in paths] == [b"old"] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [".c.new", "a", "b", "c"]


# a process of its own: the limit, and what libraries do when they meet it, must not reach the tests beside this one
LIMITED = textwrap.dedent(
    """
    import resource, sys
    from pathlib import Path
    import pytest
    import torch  # once whole: an import that met the limit cannot be taken up by the next run in this process
    if sys.argv[4] == "toys":
        from tests.pipelines import toys
        toys.install(pytest.MonkeyPatch())
    from pipelines.cli.commands import main
    for limit in sys.argv[3].split(","):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
        try:
            main(["run", sys.argv[1], "--out", sys.argv[2] + limit], prog_name="compress")
        except SystemExit as end:
            print("ENDED", limit, end.code, file=sys.stderr, flush=True)
    """
)


def run_limited(path: Path, out: Path, limits: list[int], kind: str = "toys") -> list[tuple[int, int, list[str]]]:
    """(limit, exit code, lines on stderr) of a run at each of several limits on the size of a file."""
    command = [sys.executable, "-c", LIMITED, str(path), str(out), ",".join(map(str, limits)), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    ends, said = [], []
    for line in done.stderr.splitlines():
        if line.startswith("ENDED"):
            ends.append((*map(int, line.split()[1:]), said))
            said = []
        else:
            said.append(line)
    assert len(ends) == len(limits), done.stderr[-3000:]
    return ends


def test_files_that_may_not_grow(project, out, tmp_path):
    """From no byte at all to one that lets the lock file fail only."""
    whole = tree(run_pipeline(load_pipeline(project), tmp_path / "whole").folder.parent / ".store")
    limits, codes = [0, 1, 100, 300, 500, 700, 1000, 1500, 2000, 4000, 100_000], []
    for limit, code, said in run_limited(project, out, limits):
        codes.append(code)
        assert code in (0, 2) and not [line for line in said if "Traceback" in line], said
        if code:
            assert len(said) == 1 and said[0].startswith("E804") and "ulimit -f" in said[0], (limit, said)
        folder = Path(f"{out}{limit}")
        run_pipeline(load_pipeline(project), folder)
        assert tree(folder / ".store") == whole
        assert not [path for path in (folder / "toy").iterdir() if path.name.startswith(".")]
    assert codes[0] == 2 and codes[-1] == 0 and codes.count(2) > 5


@pytest.mark.slow
def test_real_stages_whose_files_may_not_grow(tmp_path):
    """Ten sizes, from a log to the exported graph: E804 each time, and equal bytes when there is room again."""
    path = write_pipeline(tmp_path, stages=STAGES[:7], rows=80)
    whole = tree(run_pipeline(load_pipeline(path), tmp_path / "whole").folder.parent / ".store")
    largest = max(len(content) for content in whole.values())
    limits = [256, 1024, 2048, 4096, 8192, 16_384, 24_576, 49_152, largest // 2, largest - 1]
    for limit, code, said in run_limited(path, tmp_path / "limited-", limits, "real"):
        assert code == 2 and len(said) == 1 and said[0].startswith("E804"), (limit, code, said)
        folder = tmp_path / f"limited-{limit}"
        run_pipeline(load_pipeline(path), folder)
        assert tree(folder / ".store") == whole, limit


def mounted(folder: Path, size: str) -> bool:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("size", ["12k", "16k", "32k", "48k", "64k"])
def test_a_small_disk(project, tmp_path, compress, size):
    """A real one where this user may mount it."""
    disk = tmp_path / "disk"
    if not mounted(disk, size):
        pytest.skip("only root can mount a small disk")
    try:
        code, _, error = compress("run", project, "--out", disk)
        assert code == 2 and error.startswith("E804") and len(error.splitlines()) == 1
        assert subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True).returncode == 0
        assert compress("run", project, "--out", disk)[0] == 0
        whole = tree(run_pipeline(load_pipeline(project), tmp_path / "whole").folder.parent / ".store")
        assert tree(disk / ".store") == whole
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_any_more(project, out, compress):
    run_pipeline(load_pipeline(project), out)
    (out / ".store").chmod(0o500)
    try:
        code, _, error = compress("run", project, "--out", out, "--force", "tune")
    finally:
        (out / ".store").chmod(0o700)
    assert code == 2 and error.startswith("E801") and len(error.splitlines()) == 1


@pytest.mark.parametrize("removed", ["", "toy", ".store", ".store/.work-tune-*"])
def test_a_folder_that_is_removed_while_a_run_uses_it(project, out, monkeypatch, removed):
    def remove(trouble):
        trouble.unlink()
        for folder in [*out.glob(removed)] if removed else [out]:
            shutil.rmtree(folder)

    monkeypatch.setitem(toys.TROUBLES, "remove", remove)
    out.mkdir()
    (out / "trouble-tune").write_text("remove")
    with pytest.raises(UserError, match=rf"E801 {out}.*: was removed while it was used\. Run the same command again"):
        run_pipeline(load_pipeline(project), out)
    assert run_pipeline(load_pipeline(project), out).report


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(project, out, monkeypatch, number):
    """NFS 3 without its service, Lustre without its option, a storage of objects."""

    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(UserError, match=rf"E801 {out}.*: this file system has no locks \({os.strerror(number)}\)\. Choose"):
        run_pipeline(load_pipeline(project), out)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EIO])
def test_a_file_system_that_syncs_no_folders(project, out, monkeypatch, number):
    """As shares of SMB, which other programs pass over, too; a disk that fails is told."""

    def refused(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(CompressError, match="Input/output error") if number == errno.EIO else nullcontext():
        assert run_pipeline(load_pipeline(project), out).report


def test_a_replaced_result_that_another_program_has_open(project, out, monkeypatch):
    """On NFS a file of it stays, and its folder, until the program ends: no run waits for that."""

    def busy(path, ignore_errors=False, **options):
        if ".old-tune" not in str(path):
            return remove(path, ignore_errors, **options)
        (path / ".nfs0001").touch()
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    run_pipeline(load_pipeline(project), out)
    remove = shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        for force in (["tune"], ["tune"], []):
            assert run_pipeline(load_pipeline(project), out, force=force).report
    assert len([*(out / ".store").glob(".old-tune-*")]) == 2
    run_pipeline(load_pipeline(project), out)
    assert not [*(out / ".store").glob(".old-*")]


def test_a_missing_folder_of_a_stage_is_no_removed_one(tmp_path):
    """Nobody made it: that is a bug."""
    (tmp_path / ".store" / ".work-tune-0").mkdir(parents=True)
    place = tmp_path / ".store" / ".work-tune-0" / "deep" / "file"
    assert disk_fault(FileNotFoundError(errno.ENOENT, "No such file", str(place)), tmp_path) is None


def test_native_libraries_that_say_nothing(project, out, monkeypatch):
    """A check that fails while the disk has no room left: it is the disk."""
    from pipelines.engine import runner

    monkeypatch.setattr(runner, "nothing_left", lambda folder: UserError("E804", "the disk is full", "Make room", str(folder)))
    out.mkdir()
    for trouble, code in (("check_error", "E804"), ("bug", "E804"), ("user_error", "E501")):
        (out / "trouble-tune").write_text(trouble)
        with pytest.raises(CompressError, match=code):
            run_pipeline(load_pipeline(project), out)
