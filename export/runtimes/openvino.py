"""ONNX -> OpenVINO: fp32 as it is, and static int8 by NNCF, calibrated on real rows. The files are model.xml with model.bin.

A graph with int8 weights and calibrated activations is the fastest way to run a dense encoder on a CPU with VNNI.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.errors import UserError
from export.graph.trace import save

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import openvino

PACKAGES = ("openvino", "nncf")
"""What the extra `openvino` installs."""
AUTOMATIC_NAME = re.compile(r"\w+_\d+")
"""What OpenVINO calls a node that has no name of its own: Type_NUMBER, counted over the life of the process."""


def require_openvino() -> None:
    """Raises UserError E901 with the extra to install where OpenVINO or NNCF is missing."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        mend = "Run: pip install 'compress-pipeline[openvino]'"
        raise UserError("E901", f"the runtime openvino needs the package {' and '.join(missing)}", mend)


def file_name(precision: str) -> str:
    """The graph's file of a precision inside an exported folder; its weights lie beside it, as .bin."""
    return "model.xml" if precision == "fp32" else f"model_{precision}.xml"


def export_openvino(
    graph: onnx.ModelProto,
    folder: Path,
    *,
    precisions: Sequence[str],
    rows: Sequence[dict[str, np.ndarray]] = (),
    excluded: Sequence[str] = (),
) -> dict[str, Path]:
    """Write FOLDER/model.xml and FOLDER/model_int8.xml as asked; returns precision -> path.

    `graph` is the unfused fp32 graph (`export.graph.trace.trace`): the fused operators exist in ONNX Runtime only. `rows`
    are padded batches, int64 (batch, length), that int8 is calibrated on; the matrices `excluded` (names of
    `export.graph.trace.matrices`) stay fp32 in it. Equal inputs give equal bytes.
    Raises UserError E901 (extra missing), E605 (int8 without rows).
    """
    require_openvino()
    if "int8" in precisions and not rows:
        raise UserError("E605", "static int8 needs rows to calibrate on", "Give training rows, or leave out int8")
    import openvino

    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    with tempfile.TemporaryDirectory() as scratch:
        # a file and not bytes: above 2 GB the weights lie beside the graph. Weights stay mapped from it until they are saved
        save(graph, Path(scratch, "model.onnx"))
        for precision in precisions:
            model = openvino.Core().read_model(Path(scratch, "model.onnx"))
            if precision == "int8":
                model = quantized_static(model, rows, excluded)
            name_nodes(model)
            paths[precision] = folder / file_name(precision)
            # without the argument fp32 weights are stored as fp16
            openvino.save_model(model, paths[precision], compress_to_fp16=False)
    return paths


def quantized_static(
    model: openvino.Model, rows: Sequence[dict[str, np.ndarray]], excluded: Sequence[str] = ()
) -> openvino.Model:
    """int8 weights (one scale a channel) and activations with scales that were calibrated, by NNCF: SmoothQuant, then bias
    correction. Embeddings are int8 too. The nodes `excluded`, by name, stay as they are."""
    names = [value.get_any_name() for value in model.inputs]
    # its bars and its log go to stdout
    with contextlib.redirect_stdout(io.StringIO()):
        import nncf

        dataset = nncf.Dataset(rows, lambda row: {name: row[name] for name in names})
        options = {"subset_size": len(rows), "model_type": nncf.ModelType.TRANSFORMER}
        # a Gemm becomes the nodes NAME/WithoutBiases and NAME; and a name that was fused away is none that was misspelt
        both = [name for one in excluded for name in (one, f"{one}/WithoutBiases")]
        return nncf.quantize(model, dataset, ignored_scope=nncf.IgnoredScope(names=both, validate=False), **options)


def name_nodes(model: openvino.Model) -> None:
    """Number the nodes that have no name of their own from 0, so that equal models are equal bytes."""
    for number, node in enumerate(model.get_ordered_ops()):
        if AUTOMATIC_NAME.fullmatch(node.get_friendly_name()):
            node.set_friendly_name(f"{node.get_type_name()}_{number}")
