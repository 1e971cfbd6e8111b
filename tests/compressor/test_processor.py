"""How many cores are ours: what the environment and the container say counts, not what the machine has."""

import pytest

from compressor import processor


@pytest.mark.parametrize(("said", "threads"), [("2", 2), ("3,1", 3), ("", 4), ("0", 4), ("many", 4), ("64", 4)])
def test_omp_num_threads_is_respected(monkeypatch, said, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    monkeypatch.setattr(processor, "physical_cores", lambda: 4)
    assert processor.default_threads() == threads


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
    (tmp_path / "ours").write_text(membership)
    for name, text in files.items():
        (tmp_path / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mount" / name).write_text(text)
    quota = processor.cpu_quota(tmp_path / "mount", tmp_path / "ours")
    assert quota == cores
    monkeypatch.setattr(processor, "cpu_quota", lambda: 0.5)
    assert processor.physical_cores() == 1
