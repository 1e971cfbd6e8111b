"""What a load test sends: one request for each row, as the bytes of an HTTP body or a gRPC message, and answers as arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor, triton_to_np_dtype

from compressor.errors import UserError
from serving.answer_bounds import IN_BATCHES, TOLERANCE
from serving.deployment.answers import ANSWERS_FILE, read_answers
from serving.layout.text_outputs import PAIR, TEXT

Row = Mapping[str, np.ndarray]
"""The inputs of one request, each with the batch axis."""
TEXT_INPUTS = (TEXT, PAIR)
MOST_TEXTS = 100_000
SHOWN = 60
"""Characters of a row in an error."""


Outputs = Mapping[str, np.ndarray]
"""The outputs of one request, each with the batch axis."""


@dataclass(frozen=True)
class Traffic:
    """The rows that are sent, again and again in random order; `source` says where they come from. `recorded` are the outputs
    that the first rows had when the model was deployed, from which those of the rows alone may differ by `alone`, times
    max(1, |value|); an answer under load is wrong where it differs by more than `bound` from that of the row alone. `names` are
    where the rows stand, for errors; without them a row is shown itself."""

    rows: list[Row]
    source: str
    recorded: Sequence[Outputs] = ()
    bound: float = IN_BATCHES
    alone: float = TOLERANCE
    names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def name_of(self, row: int) -> str:
        """How an error names the row of this number, which no user knows: the rows are in random order."""
        return self.names[row] if self.names else _shown(self.rows[row])

    @property
    def mean_tokens(self) -> float | None:
        """Mean number of tokens of a row; None for rows of text."""
        if any(name in TEXT_INPUTS for name in self.rows[0]):
            return None
        return float(np.mean([next(iter(row.values())).size for row in self.rows]))


def _shown(row: Row) -> str:
    """The beginning of a row's texts, or of its tokens."""
    # of a row of choices, the first one's
    texts = tuple(values.item(0).decode(errors="replace") for values in row.values() if values.dtype == object)
    if texts:
        return repr(texts[0] if len(texts) == 1 else texts)[:SHOWN]
    name, tokens = next(iter(row.items()))
    return f"{name} {tokens[0].tolist()}"[:SHOWN]


def takes_texts(config: Mapping[str, Any]) -> bool:
    """Whether the model of this config takes TEXT rather than tokens."""
    return any(tensor["name"] in TEXT_INPUTS for tensor in config["input"])


def check_testable(model: str, config: Mapping[str, Any]) -> None:
    """Raises UserError E745 for a model with other inputs than texts or tokens, or whose answers come in parts."""
    if config.get("model_transaction_policy", {}).get("decoupled"):
        what = f"'{model}' generates text, which comes in parts"
        raise UserError("E745", what, "Test a model that gives one answer for a request")
    if takes_texts(config) and (odd := [tensor["name"] for tensor in config["input"] if _is_odd(tensor)]):
        raise UserError("E745", f"the model expects an input '{odd[0]}'", "Load tests send texts, or their tokens")


def _is_odd(tensor: Mapping[str, Any]) -> bool:
    return tensor["name"] not in TEXT_INPUTS and not tensor.get("optional")


def text_rows(config: Mapping[str, Any], texts: Sequence[Sequence[str]]) -> list[Row]:
    """One row for each text, or pair of texts. Raises UserError E745 where a text has too few or too many parts."""
    names = [name for name in TEXT_INPUTS if any(tensor["name"] == name for tensor in config["input"])]
    check_parts(texts, len(names), " and ".join(names))
    arrays = [[np.array([[part.encode()]], dtype=object) for part in text] for text in texts]
    return [dict(zip(names, row, strict=True)) for row in arrays]


def check_parts(texts: Sequence[Sequence[str]], parts: int, takes: str) -> None:
    """Raises UserError E745 where a text has another number of `parts` than the model `takes`."""
    if odd := next((text for text in texts if len(text) != parts), None):
        what = f"the model takes {takes}, and a row has {len(odd)} texts"
        raise UserError("E745", what, "Give as many, separated by a tab", repr(odd)[:SHOWN])


def token_rows(config: Mapping[str, Any], tokens: Sequence[Mapping[str, Sequence[int]]]) -> list[Row]:
    """One row for each dict of token lists. Raises UserError E745 for an input that the tokens do not have."""
    types = {tensor["name"]: triton_to_np_dtype(tensor["data_type"].removeprefix("TYPE_")) for tensor in config["input"]}
    if missing := types.keys() - tokens[0].keys():
        raise UserError("E745", f"the model expects an input '{min(missing)}'", "Load tests send texts, or their tokens")
    return [{name: np.array([row[name]], dtype=type_) for name, type_ in types.items()} for row in tokens]


def recorded_rows(version: Path) -> tuple[list[Row], list[Outputs]]:
    """Rows and outputs that were recorded in a version's folder when it was deployed; none where there is no record."""
    if not (version / ANSWERS_FILE).is_file():
        return [], []
    answers = read_answers(version)
    rows, outputs = ([_arrays(getattr(answer, side)) for answer in answers] for side in ("inputs", "outputs"))
    return rows, outputs


def _arrays(tensors: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Tensors of JSON as arrays; texts are bytes."""
    arrays = {}
    for tensor in tensors:
        texts = tensor["datatype"] == "BYTES"
        values = [value.encode() for value in tensor["data"]] if texts else tensor["data"]
        arrays[tensor["name"]] = np.array(values, triton_to_np_dtype(tensor["datatype"])).reshape(tensor["shape"])
    return arrays


def read_texts(path: Path) -> dict[int, tuple[str, ...]]:
    """The texts of a file by their lines, counted from 1, the two of a pair separated by a tab; empty lines are left out.
    Raises UserError E745."""
    try:
        # only line feeds end a line, as in compress predict --file: texts may hold other separators, such as U+2028
        lines = [line.strip("\r") for line in path.read_bytes().decode("utf-8-sig").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("E745", f"no file of texts ({error})", "Give a UTF-8 file with one text a line", str(path)) from error
    numbers = [number for number, line in enumerate(lines, start=1) if line.strip()][:MOST_TEXTS]
    if not numbers:
        raise UserError("E745", "there is no text in the file", "Give a UTF-8 file with one text a line", str(path))
    return {number: tuple(lines[number - 1].split("\t")) for number in numbers}


def http_body(row: Row) -> tuple[bytes, int]:
    """The body of an HTTP request with binary tensors both ways, and the length of its JSON part."""
    contents = {name: _raw(array) for name, array in row.items()}
    inputs = [
        {**_described(name, array), "parameters": {"binary_data_size": len(contents[name])}} for name, array in row.items()
    ]
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}, separators=(",", ":")).encode()
    return header + b"".join(contents.values()), len(header)


def grpc_message(model: str, row: Row) -> bytes:
    """A ModelInferRequest."""
    from tritonclient.grpc.service_pb2 import ModelInferRequest  # imported here: slow, and HTTP does not need it

    request = ModelInferRequest(model_name=model, raw_input_contents=[_raw(array) for array in row.values()])
    for name, array in row.items():
        request.inputs.add(**_described(name, array))
    return request.SerializeToString()


def _described(name: str, array: np.ndarray) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "datatype": np_to_triton_dtype(array.dtype)}


def _raw(array: np.ndarray) -> bytes:
    return serialize_byte_tensor(array).item() if array.dtype == object else array.tobytes()


def outputs_of(body: bytes, header: int) -> dict[str, np.ndarray]:
    """The outputs in an answer: an HTTP body whose JSON part has `header` bytes, or a gRPC message where that is -1."""
    if header < 0:
        from tritonclient.grpc import InferResult
        from tritonclient.grpc.service_pb2 import ModelInferResponse

        message = ModelInferResponse.FromString(body)
        result, names = InferResult(message), [output.name for output in message.outputs]
    else:
        from tritonclient.http import InferenceServerClient

        result = InferenceServerClient.parse_response_body(body, header_length=header or None)
        names = [output["name"] for output in result.get_response()["outputs"]]
    return {name: result.as_numpy(name) for name in names}
