"""The work of `compress delta`: read, merge, compare and convert delta files."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
from torch import nn

import compressor
from compressor.checkpoint import STATE_FILE, read_description, save_checkpoint
from compressor.deltas.links import merge_all
from compressor.errors import UserError
from compressor.load_run import last_state
from compressor.models.build import GENERATIVE, build, config_of, head_origin
from compressor.models.reference import find_folder, is_hub_id, resolve
from compressor.new_folder import SCRATCH, becoming
from compressor.pruning.weights import require_zeros_kept
from compressor.run_store import is_run
from compressor.storage.delta_comparison import compare_deltas
from compressor.storage.delta_file import DAMAGED, DeltaFile, changes_of, damaged, header_size, read, stored, write
from compressor.storage.layout import accounts
from compressor.storage.live import base_of, load_on, origin_of, remember
from compressor.storage.peft.attach import attach_adapter
from compressor.storage.peft.read import CONFIG, AdapterFolder, read_adapter
from compressor.storage.peft.write import changed_layers, write_peft
from compressor.tasks.task_kind import kind_of, kind_recorded
from pipelines.cli.shown import note, say
from pipelines.engine.disk import require_writable
from pipelines.terminal.capture import captured
from pipelines.terminal.console_table import table


def info(file: Path, as_json: bool) -> None:
    """Print the account of a delta file."""
    delta = read(file)
    try:
        facts = _facts(file, delta)
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
    say(f"trained  {facts['trained']:,} (without the task head)")
    width, scalars, indices = stored["width"], stored["scalars"] + stored["untrained"], stored["indices"]
    entries = stored["mask_entries"] + stored["pruned_entries"]
    say(f"bits     {width} x {scalars:,} + 32 x {indices:,} + {entries:,} = {stored['bits']:,}")
    parts = f"changes {stored['bytes']:,}, head {facts['head_bytes']:,}, header {facts['header_bytes']:,}"
    say(f"bytes    {facts['bytes']:,}: {parts}, else {facts['other_bytes']:,}")
    say(f"base     {facts['base']} (sha256 {facts['base_sha256'][:12]})")
    if kept:
        counts = ", ".join(f"{layer}: {'/'.join(map(str, row.values()))}" for layer, row in kept.items())
        say(f"pruned   {'/'.join(next(iter(kept.values())))} left in each layer: {counts}")
    say(f"labels   {', '.join(facts['labels'])}")
    if facts["kind"]:
        say(f"kind     {facts['kind']}")


def _facts(file: Path, delta: DeltaFile) -> dict[str, Any]:
    size, held = file.stat().st_size, stored(delta)
    with file.open("rb") as stream:
        header = header_size(stream.read(8))
    head = sum(tensor.numel() * tensor.element_size() for tensor in (delta.head or {}).values())
    return {
        "file": str(file),
        "base": delta.base,
        "base_sha256": delta.base_sha256,
        "labels": delta.labels,
        "kind": delta.kind,
        "kept": {layer: {word: len(units) for word, units in row.items()} for layer, row in delta.kept.items()},
        "changes": [account._asdict() for account in accounts(delta.layout)],
        "trained": held.trained,
        "stored": {**asdict(held), "bits": held.bits, "bytes": held.bytes},
        "bytes": size,
        "header_bytes": header,
        "head_bytes": head,
        "other_bytes": size - header - head - held.bytes,
    }


def apply(file: Path, base: str | None, out: Path) -> None:
    """Write the merged model."""
    _check_new(out)
    delta = read(file)
    with _quiet():
        model = load_on(delta, base, file)
        require_zeros_kept(model)
        with _becoming_new(out) as made:
            save_checkpoint(merge_all(model), made, base_of(delta, base, file).folder)
    say(f"merged: {out}")


def diff(a: Path, b: Path, as_json: bool) -> None:
    """Print what two delta files have in common, place by place."""
    deltas = read(a), read(b)
    try:
        rows = compare_deltas(*deltas)
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
        say(f"places below {above}")
    table(("place", "A", "B", "norm A", "norm B", "cosine", "Jaccard"), lines)
    for reason, count in Counter(row.reason for row in rows if row.reason).items():
        say(f"no cosine for {count} {'place' if count == 1 else 'places'}: {reason}")


def _above(places: list[str]) -> str:
    """The outer modules that all paths share, joined by dots: they are left out to keep lines short."""
    levels = zip(*(place.split(".")[:-2] for place in places), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def convert(src: Path, dst: Path, base: str | None, form: str, labels: str | None, kind: str | None, head: bool) -> None:
    """Write the source in the other format; of a run it is the last state, before the merge."""
    _check_new(dst, of_a_file=form == "delta")
    recorded = place = None
    if is_run(src):
        src, found, named = last_state(src)
        if base is None and found is not None:
            base = place = found
            recorded = named or read_description(src)["base"]["reference"]
    with _quiet():
        model, has_head = _open(src, base, labels, kind)
    # before the base is asked for: a model that was fully tuned has none any more
    (changes_of if form == "delta" else changed_layers)(model)
    origin, head = origin_of(model), head and has_head
    names = list(model.config.id2label.values())
    recorded_kind = kind_recorded(kind_of(kind), len(names)) if kind else _kind(src)
    if form == "delta":
        dst.parent.mkdir(parents=True, exist_ok=True)
        reference = recorded or origin.reference
        _check_new(dst, of_a_file=True)  # again: loading the model may have taken minutes
        write(model, dst, base=reference, base_sha256=origin.sha256, label_names=names, head=head, kind=recorded_kind)
    else:
        reference, told = _loadable(recorded or origin.reference, dst, place)
        with _becoming_new(dst) as made:
            form = write_peft(model, made, base=reference, head=head)
        note(told)
        if recorded_kind:
            text = f"peft stores no kind of task, and this is {recorded_kind}: convert it back with --kind {recorded_kind}"
            note(text)
    say(f"{form}: {dst}" + ("" if head else " (without a task head)"))


def _loadable(reference: str, dst: Path, place: str | None = None) -> tuple[str, str]:
    """The reference by which transformers loads a base: its hub id, or else its local folder; and for that a note to the user.
    `place` is where it is, if that is known."""
    folder = find_folder(reference) if place is None else Path(place)
    if is_hub_id(reference, folder):
        return reference, ""
    text = f"base_model_name_or_path in {dst / CONFIG} is {folder}: elsewhere, write there where the base is (or its hub id)"
    return str(folder), text


def _open(src: Path, base: str | None, labels: str | None, kind: str | None) -> tuple[nn.Module, bool]:
    """The live model of a source, and whether the source has its task head, or needs none."""
    if (src / CONFIG).is_file():
        return _open_peft(src, base, labels, kind)
    if labels:
        raise UserError("E315", "--labels is for peft adapters: other sources name their labels", "Leave it out")
    if kind:
        raise UserError("E315", "--kind is for peft adapters: other sources name their kind of task", "Leave it out")
    if (src / STATE_FILE).is_file():
        return compressor.load(src, base=base), True
    if src.is_file():
        delta = read(src)
        return load_on(delta, base, src, answers=False), delta.head is not None
    fix = f"Give a delta file, the folder of a run, or one with {STATE_FILE} or {CONFIG}"
    raise UserError("E315", "neither a state, a delta file nor a peft adapter", fix, str(src))


def _kind(src: Path) -> str:
    """The kind of task that a source records; an adapter of peft records none."""
    if src.is_file():
        return read(src).kind
    return read_description(src).get("kind", "") if (src / STATE_FILE).is_file() else ""


def _open_peft(src: Path, base: str | None, labels: str | None, kind: str | None) -> tuple[nn.Module, bool]:
    adapter = read_adapter(src)
    reference = base or adapter.config.get("base_model_name_or_path")
    if not reference:
        raise UserError("E315", "the adapter names no base", "Give it with --base", str(src))
    if not base and (revision := adapter.config.get("revision")) not in (None, "main"):
        what = f"the adapter was trained on revision {revision!r:.60} of '{reference}'"
        raise UserError("E315", what, "Download that revision, and give its folder with --base", str(src))
    generates = adapter.auto_class in GENERATIVE
    if labels and generates:
        raise UserError(
            "E315", "--labels names classes, and this adapter is of a model that generates", "Leave it out", str(src)
        )
    if kind and kind_of(kind).auto_class != adapter.auto_class:
        what = f"--kind {kind} is of an {kind_of(kind).auto_class}, and this adapter of an {adapter.auto_class}"
        raise UserError("E315", what, "Give another kind, or leave it out", str(src))
    base_model = resolve(str(reference))
    names = _named(labels) if labels else _usual_names(adapter, base_model.folder)
    if adapter.classes not in (None, len(names)):
        raise UserError("E315", f"{len(names)} names for {adapter.classes} classes", "Give --labels one name a class", str(src))
    model = remember(build(base_model.folder, names, auto_class=adapter.auto_class), base_model.reference, base_model.sha256)
    attach_adapter(model, adapter, base=base_model.folder)
    return model, bool(adapter.head) or generates


def _usual_names(adapter: AdapterFolder, base: Path) -> list[str]:
    """The names of the classes where none are given: LABEL_0 and so on, for peft stores none. An adapter without a task head
    answers by that of its base, if that has one: then they are the base's."""
    if adapter.classes is None and adapter.auto_class in GENERATIVE:
        return []
    own = [str(name) for name in config_of(base).id2label.values()]
    if adapter.classes is None and len({*own}) == len(own) and head_origin(base, own, adapter.auto_class) == "kept":
        return own
    return [f"LABEL_{number}" for number in range(adapter.classes or 2)]


def _named(labels: str) -> list[str]:
    """The names in --labels. Raises UserError E315."""
    try:
        names = next(csv.reader([labels], strict=True))
    except csv.Error as error:
        raise UserError("E315", f"--labels cannot be read ({error})", "Write them with commas, in one line") from None
    if "" in names or len(set(names)) < len(names):
        raise UserError("E315", "--labels has a name twice, or an empty one", "Give every class a name of its own")
    return names


def _quiet() -> AbstractContextManager[None]:
    """Suppress transformers' report on loading a base without a task head, which occurs in every load here."""
    return captured(Path(os.devnull))


def _check_new(path: Path, *, of_a_file: bool = False) -> None:
    """Raises UserError E801 where something would be overwritten, or nothing can be written; a folder may be there if it is
    empty."""
    if os.path.lexists(path) and (
        of_a_file or not path.is_dir() or any(not inner.name.startswith(SCRATCH) for inner in path.iterdir())
    ):
        raise UserError("E801", f"'{path}' is there already", "Give another name, or remove it")
    require_writable(path, "Give another name")


@contextmanager
def _becoming_new(out: Path) -> Iterator[Path]:
    """`becoming`. Raises UserError E801 where another program has written to `out` meanwhile, too."""
    with becoming(out) as made:
        yield made
        _check_new(out)
