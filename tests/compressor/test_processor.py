"""How many cores and how much memory are ours: what the environment and the container say counts, not what the machine has."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from compressor import processor


@pytest.mark.parametrize(("said", "threads"), [("2", 2), ("3,1", 3), ("", 4), ("0", 4), ("many", 4), ("64", 4)])
def test_omp_num_threads_is_respected(monkeypatch, said, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    monkeypatch.setattr(processor, "physical_cores", lambda: 4)
    assert processor.default_threads() == threads


def test_what_keeps_libraries_from_kernels_is_told(monkeypatch):
    for name in processor.LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "")
    without = processor.processor()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert processor.processor() == {**without, "limits": {"ONEDNN_MAX_CPU_ISA": "AVX2"}} and "limits" not in without


ARM = "processor\t: {}\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: {}\n\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (ARM.format(0, "0xd40") + ARM.format(1, "0xd40"), "aarch64 0x41/0xd40"),
        (ARM.format(0, "0xd0c") + ARM.format(1, "0xd40"), "aarch64 0x41/0xd0c"),
        ("processor\t: 0\nmodel name\t: AMD EPYC\n", "AMD EPYC"),
        ("processor\t: 0\n", "aarch64"),
    ],
)
def test_a_processor_without_a_name_has_its_numbers(tmp_path, monkeypatch, text, name):
    """Else the latency tables of all ARM processors with the same instructions and cores are one."""
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor.platform, "machine", lambda: "aarch64")
    assert processor.processor()["cpu"] == name


@pytest.mark.parametrize(
    ("machine", "instructions", "bits"),
    [
        ("x86_64", ["avx", "avx2"], 7),
        ("x86_64", ["avx2", "avx512f"], 7),
        ("AMD64", ["avx2", "avx512_vnni"], 8),
        ("x86_64", ["avx2", "avx_vnni"], 8),
        ("aarch64", ["asimd"], 8),
    ],
)
def test_without_vnni_weights_have_a_bit_less(monkeypatch, machine, instructions, bits):
    """Products of 8 bits would overflow there, silently."""
    monkeypatch.setattr(processor.platform, "machine", lambda: machine)
    assert processor.weight_bits(instructions) == bits


def write_groups(folder: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Where the control groups are mounted, and the file that lists ours."""
    (folder / "ours").write_text(membership)
    for name, text in files.items():
        (folder / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mount" / name).write_text(text)
    return folder / "mount", folder / "ours"


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/pod/box\n", {"pod/cpu.max": "200000 100000", "pod/box/cpu.max": "max 100000"}, 2.0),
        ("0::/pod/box\n", {"pod/cpu.max": "200000 100000", "pod/box/cpu.max": "50000 100000"}, 0.5),
        (
            "4:cpu,cpuacct:/box\n",
            {"cpu,cpuacct/box/cpu.cfs_quota_us": "300000", "cpu,cpuacct/box/cpu.cfs_period_us": "100000"},
            3,
        ),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("", {}, None),
        ("0::/../outside\n", {"cpu.max": "damaged"}, None),
    ],
)
def test_a_containers_quota_is_a_limit(tmp_path, monkeypatch, membership, files, cores):
    assert processor.cpu_quota(*write_groups(tmp_path, membership, files)) == cores
    monkeypatch.setattr(processor, "cpu_quota", lambda: 0.5)
    assert processor.physical_cores() == 1


JOB = {"job/memory.max": "1000000000\n", "job/task/memory.max": "max\n"}
V1 = "5:memory:/job\n0::/\n"


@pytest.mark.parametrize(
    ("membership", "files", "limit", "free"),
    [
        ("0::/job\n", {"job/memory.max": "2000000", "job/memory.current": "500000"}, 2_000_000, 1_500_000),
        ("0::/job/task\n", JOB, 10**9, 10**9),
        ("0::/job/task\n", {**JOB, "job/memory.current": "1200000000"}, 10**9, 0),
        (
            "0::/job/task\n",
            {**JOB, "job/memory.current": "900000000", "job/memory.stat": "anon 1\ninactive_file 300000000\n"},
            10**9,
            400_000_000,
        ),
        (
            "0::/job\n",
            {"memory.max": "1000", "job/memory.max": "800", "job/memory.current": "10", "memory.current": "900"},
            800,
            100,
        ),
        (  # files that were read twice, too
            "0::/job/task\n",
            {
                **JOB,
                "job/memory.current": "900000000",
                "job/memory.stat": "active_anon 7\ninactive_file 300000000\nactive_file 500000000\n",
            },
            10**9,
            900_000_000,
        ),
        (V1, {"memory/job/memory.limit_in_bytes": "5000", "memory/job/memory.usage_in_bytes": "1000"}, 5000, 4000),
        (
            V1,
            {
                "memory/job/memory.limit_in_bytes": "5000",
                "memory/job/memory.usage_in_bytes": "4000",
                "memory/job/memory.stat": "active_file 1\ntotal_inactive_file 1000\ntotal_active_file 2000\n",
            },
            5000,
            4000,
        ),
        (V1, {"memory/memory.limit_in_bytes": "5000", "memory/job/memory.limit_in_bytes": str(2**63 - 4096)}, 5000, 5000),
        ("0::/job\n", {"job/memory.max": "max"}, None, None),
        ("", {}, None, None),
    ],
)
def test_memory_is_limited_by_every_control_group_above(tmp_path, membership, files, limit, free):
    places = write_groups(tmp_path, membership, files)
    assert processor.memory_limit(*places) == limit
    assert processor.free_memory(*places) == free if limit else processor.free_memory(*places) > 10**6


def test_a_system_that_tells_neither_the_cores_of_a_process_nor_free_memory(tmp_path, monkeypatch):
    """All of them count; Linux alone tells both."""
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert list(processor.allowed_cores()) == [0, 1, 2] and 1 <= processor.physical_cores() <= 3
    known = {name: os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_PHYS_PAGES")}

    def sysconf(name):
        if name not in known:
            raise ValueError("unrecognized configuration name")
        return known[name]

    monkeypatch.setattr("os.sysconf", sysconf)
    groups = write_groups(tmp_path, "", {})
    everything = known["SC_PAGE_SIZE"] * known["SC_PHYS_PAGES"]
    assert processor.free_memory(*groups, meminfo=tmp_path / "none") == everything > processor.free_memory(*groups)


@pytest.mark.parametrize("library", ["glibc", "musl"])
@pytest.mark.parametrize(("grown", "asked"), [(processor.WORTH_RELEASING - 1, []), (processor.WORTH_RELEASING, ["gc", "trim"])])
def test_memory_that_work_has_freed_is_given_back(monkeypatch, library, grown, asked):
    """By the C library, where it has a function for it; after the objects in reference cycles are gone."""
    said = []
    functions = {"malloc_trim": lambda pad: said.append("trim")} if library == "glibc" else {}
    monkeypatch.setattr(processor, "ctypes", SimpleNamespace(CDLL=lambda name: SimpleNamespace(**functions)))
    monkeypatch.setattr(processor, "gc", SimpleNamespace(collect=lambda: said.append("gc")))
    monkeypatch.setattr(processor, "resident_memory", lambda: 1000 + grown)
    processor.release_memory(1000)
    assert said == [word for word in asked if word != "trim" or functions]


def test_the_memory_that_this_process_holds(tmp_path):
    assert processor.resident_memory(tmp_path / "nowhere") == 0
    (tmp_path / "statm").write_text("900 70 30 1 0 200 0\n")
    assert processor.resident_memory(tmp_path / "statm") == 70 * os.sysconf("SC_PAGE_SIZE")
