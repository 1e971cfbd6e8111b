"""`compress delta`: look at delta files, merge them, compare them, bring them into other formats."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compressor.errors import UserError
from pipelines.terminal.console_table import table

if TYPE_CHECKING:
    from torch import nn

    from compressor.storage.delta_file import DeltaFile

FILE = click.Path(path_type=Path)
BASE_HELP = "The pretrained model: a hub id, a folder or package:NAME/PATH. By default the one that the source names."


@click.group(epilog="Example: compress delta info reviews.delta.safetensors")
def delta() -> None:
    """Work with delta files: a tuned task, without its base, in one small file (docs/deltas.md)."""


@delta.command(epilog="Example: compress delta info reviews.delta.safetensors --json")
@click.argument("file", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
def info(file: Path, as_json: bool) -> None:
    """Show what FILE changes, on which base, and what each part costs on disk."""
    from compressor.storage.delta_file import DAMAGED, damaged, read

    found = read(file)
    try:
        facts = _facts(file, found)
    except DAMAGED:
        raise damaged(file) from None
    if as_json:
        click.echo(json.dumps(facts, indent=1, ensure_ascii=False))
        return
    rows = [
        (row["kind"], row["place"], *(f"{row[key]:,}" for key in ("blocks", "scalars", "indices", "mask_entries")))
        for row in facts["changes"]
    ]
    table(("change", "place", "blocks", "scalars", "indices", "mask entries"), rows)
    stored, kept = facts["stored"], facts["kept"]
    click.echo(f"trained  {facts['trained']:,} (head apart)")
    width, scalars, indices = (stored[key] for key in ("width", "scalars", "indices"))
    entries = stored["mask_entries"] + stored["pruned_entries"]
    click.echo(f"bits     {width} x {scalars:,} + 32 x {indices:,} + {entries:,} = {stored['bits']:,}")
    parts = f"changes {stored['bytes']:,}, head {facts['head_bytes']:,}, header {facts['header_bytes']:,}"
    click.echo(f"bytes    {facts['bytes']:,}: {parts}, else {facts['other_bytes']:,}")
    click.echo(f"base     {facts['base']} (sha256 {facts['base_sha256'][:12]})")
    if kept:
        left = ", ".join(f"{layer}: {'/'.join(map(str, row.values()))}" for layer, row in kept.items())
        click.echo(f"pruned   {'/'.join(next(iter(kept.values())))} left in each layer: {left}")
    click.echo(f"labels   {', '.join(facts['labels'])}")


def _facts(file: Path, found: DeltaFile) -> dict[str, Any]:
    from compressor.storage.delta_file import header_size, stored
    from compressor.storage.layout import accounts

    size, held = file.stat().st_size, stored(found)
    with file.open("rb") as stream:
        header = header_size(stream.read(8))
    head = sum(tensor.numel() * tensor.element_size() for tensor in (found.head or {}).values())
    return {
        "file": str(file),
        "base": found.base,
        "base_sha256": found.base_sha256,
        "labels": found.labels,
        "kept": {layer: {word: len(left) for word, left in row.items()} for layer, row in found.kept.items()},
        "changes": [account._asdict() for account in accounts(found.layout)],
        "trained": held.trained,
        "stored": {**asdict(held), "bits": held.bits, "bytes": held.bytes},
        "bytes": size,
        "header_bytes": header,
        "head_bytes": head,
        "other_bytes": size - header - head - held.bytes,
    }


@delta.command(epilog="Example: compress delta apply reviews.delta.safetensors --base ./minilm --out merged")
@click.argument("file", type=FILE)
@click.option("--base", metavar="REF", help=BASE_HELP)
@click.option("--out", type=FILE, required=True, metavar="FOLDER", help="A new folder for config, weights and tokenizer.")
def apply(file: Path, base: str | None, out: Path) -> None:
    """Merge FILE into its base and write the whole model, ready for `compressor.load` (or transformers, if not pruned).

    Adapters and prefixes cannot be merged: the folder carries them beside the weights.
    """
    from compressor.checkpoint import save_checkpoint
    from compressor.deltas.links import merge_all
    from compressor.storage.delta_file import read
    from compressor.storage.live import base_of, load_on

    _check_new(out)
    found = read(file)
    with _quiet():
        model = load_on(found, base, file)
        save_checkpoint(merge_all(model), out, base_of(found, base).folder)
    click.echo(f"merged: {out}")


@delta.command(epilog="Example: compress delta diff seed0.delta.safetensors seed1.delta.safetensors")
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
def diff(a: Path, b: Path, as_json: bool) -> None:
    """Compare A and B place by place: norms of ΔW, their cosine, and the overlap of their supports (Jaccard).

    The overlap is of the sparse places, or of the masks over a shared prototype. No base is needed. Below the table stands why
    a place has no cosine.
    """
    from compressor.storage.delta_comparison import compare
    from compressor.storage.delta_file import DAMAGED, damaged, read

    found = read(a), read(b)
    try:
        rows = compare(*found)
    except DAMAGED:
        raise damaged(f"{a} or {b}") from None
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=1))
        return
    above = _above([row.place for row in rows])
    lines = [
        (row.place.removeprefix(f"{above}."), *row.kinds, *map(_figure, (*row.norms, row.cosine, row.jaccard))) for row in rows
    ]
    if above:
        click.echo(f"places below {above}")
    table(("place", "A", "B", "norm A", "norm B", "cosine", "Jaccard"), lines)
    for reason, count in Counter(row.reason for row in rows if row.reason).items():
        click.echo(f"no cosine for {count} {'place' if count == 1 else 'places'}: {reason}")


def _above(places: list[str]) -> str:
    """The outer modules that all places lie in, joined by dots: lines are wide enough without them."""
    levels = zip(*(place.split(".")[:-2] for place in places), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


@delta.command(epilog="Example: compress delta convert ./adapter reviews.delta.safetensors --base ./minilm --labels bad,good")
@click.argument("src", type=FILE)
@click.argument("dst", type=FILE)
@click.option("--base", metavar="REF", help=BASE_HELP)
@click.option("--to", "form", type=click.Choice(["delta", "peft"]), default="delta", show_default=True, help="Format of DST.")
@click.option("--labels", metavar="A,B,...", help="Names of the classes, for a peft adapter: it does not hold them.")
@click.option("--head/--no-head", default=True, show_default=True, help="Write the task head too.")
def convert(src: Path, dst: Path, base: str | None, form: str, labels: str | None, head: bool) -> None:
    """Bring SRC (a state folder, a delta file or a peft folder) into the format of DST.

    A peft folder is LoRA where every change is of low rank, and Super-Tuning where some are sparse (DSEE, selective). It names
    its base by a hub id or a folder; it holds no labels.
    """
    from compressor.storage.delta_file import write
    from compressor.storage.live import origin_of
    from compressor.storage.peft.write import write_peft

    _check_new(dst)
    with _quiet():
        model, has_head = _open(src, base, labels)
    origin, head = origin_of(model), head and has_head
    dst.parent.mkdir(parents=True, exist_ok=True)
    if form == "delta":
        names = list(model.config.id2label.values())
        write(model, dst, base=origin.reference, base_sha256=origin.sha256, label_names=names, head=head)
    else:
        form = write_peft(model, dst, base=_loadable(origin.reference, dst), head=head)
    click.echo(f"{form}: {dst}" + ("" if head else " (without a task head)"))


def _loadable(reference: str, dst: Path) -> str:
    """What transformers loads a base by: its hub id, or else its folder here, which is said."""
    from compressor.models.hub import find_folder, is_hub_id
    from compressor.storage.peft.read import CONFIG

    folder = find_folder(reference)
    if is_hub_id(reference, folder):
        return reference
    note = f"base_model_name_or_path in {dst / CONFIG} is {folder}: elsewhere, write there where the base is (or its hub id)"
    click.echo(note, err=True)
    return str(folder)


def _open(src: Path, base: str | None, labels: str | None) -> tuple[nn.Module, bool]:
    """The live model behind a source, and whether its task head is a trained one."""
    import compressor
    from compressor.checkpoint import STATE_FILE
    from compressor.storage.delta_file import read
    from compressor.storage.live import load_on
    from compressor.storage.peft.read import CONFIG

    if (src / CONFIG).is_file():
        return _open_peft(src, base, labels)
    if labels:
        raise UserError("E315", "--labels is for peft adapters: other sources name their labels", "Leave it out")
    if (src / STATE_FILE).is_file():
        return compressor.load(src, base=base), True
    if src.is_file():
        found = read(src)
        return load_on(found, base, src), found.head is not None
    mend = f"Give a delta file, or a folder with {STATE_FILE} or {CONFIG}"
    raise UserError("E315", "neither a state, a delta file nor a peft adapter", mend, str(src))


def _open_peft(src: Path, base: str | None, labels: str | None) -> tuple[nn.Module, bool]:
    from compressor.models.hub import GENERATES, build, resolve
    from compressor.storage.live import remember
    from compressor.storage.peft.attach import attach_adapter
    from compressor.storage.peft.read import read_adapter

    adapter = read_adapter(src)
    reference = base or adapter.config.get("base_model_name_or_path")
    if not reference:
        raise UserError("E315", "the adapter names no base", "Give it with --base", str(src))
    if labels and adapter.auto_class == GENERATES:
        raise UserError(
            "E315", "--labels names classes, and this adapter is of a model that generates", "Leave it out", str(src)
        )
    classes = adapter.classes or (0 if adapter.auto_class == GENERATES else 2)
    names = labels.split(",") if labels else [f"LABEL_{number}" for number in range(classes)]
    if adapter.classes not in (None, len(names)):
        raise UserError("E315", f"{len(names)} names for {adapter.classes} classes", "Give --labels one name a class", str(src))
    found = resolve(str(reference))
    model = remember(build(found.folder, names, auto_class=adapter.auto_class), found.reference, found.sha256)
    attach_adapter(model, adapter)
    return model, bool(adapter.head)


def _quiet() -> AbstractContextManager[None]:
    """transformers reports on every load of a base without a task head, which is every load here."""
    from pipelines.terminal.capture import captured

    return captured(Path(os.devnull))


def _check_new(path: Path) -> None:
    """Raises UserError E801 where something would be overwritten."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UserError("E801", f"'{path}' is there already", "Give another name, or remove it")
