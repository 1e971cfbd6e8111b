"""The work of stage `export`: the dense and the compressed model as files, each compared with PyTorch before it is shipped."""

from __future__ import annotations

from typing import Any

from compressor.deltas.factored import apart_of, require_factorable
from compressor.deltas.links import merge_all
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.export.config import ExportConfig
from pipelines.stages.export.exported import Exported, export_one
from pipelines.stages.export.generators import export_generator
from pipelines.stages.export.precision import choose_precision
from pipelines.stages.export.proving import COMPRESSED
from pipelines.stages.loading import load_data, load_model


def run(config: ExportConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Export the dense model (`dense_of`, merged) and the compressed one, and check the files that are shipped.

    A compressed file that fails is repaired, or left out and listed in `failures`; a dense one is repaired, or a row in the
    report. Raises CheckError E610, E611 if fp32 fails, or if no compressed file is left.
    """
    data = load_data(inputs)
    dense = merge_all(load_model(inputs.dense, inputs.base))
    compressed = load_model(inputs.nearest("model"), inputs.base)
    apart = {}
    if not config.merge:
        require_factorable(compressed)
        size = apart_of(compressed)
        apart = {"apart": {"parameters": size, "macs": size}}
    if not config.auto:
        export = export_generator if data.kind.generates else export_one
        made = {
            name: export(name, model, config, data, workspace, inputs)
            for name, model in (("dense", dense), (COMPRESSED, compressed))
        }
        facts = {"labels": data.label_names, "runtimes": config.runtime, **apart}
        return {**_together(made), **facts}
    ours, account = choose_precision(compressed, config, data, workspace, inputs)
    theirs = export_one("dense", dense, baseline_of(config, ours.files), data, workspace, inputs)
    facts = {"labels": data.label_names, "runtimes": list(ours.files), "auto": account, **apart}
    return {**_together({"dense": theirs, COMPRESSED: ours}), **facts}


def baseline_of(config: ExportConfig, files: dict[str, dict[str, Any]]) -> ExportConfig:
    """The config by which the dense model is exported beside the compressed `files` (runtime -> precision -> file) that
    `precision: auto` keeps: as them, so that the report tells the gain of compression from that of the precision."""
    precisions = dict.fromkeys(precision for written in files.values() for precision in written)
    return config.model_copy(update={"precision": list(precisions), "runtime": list(files)})


def _together(made: dict[str, Exported]) -> dict[str, Any]:
    """The metadata of both models. `failures` is present only if there are any."""
    failures = [failure for exported in made.values() for failure in exported.failures]
    return {
        "files": {name: exported.files for name, exported in made.items()},
        "parity": [record for exported in made.values() for record in exported.parity],
        **({"failures": failures} if failures else {}),
    }
