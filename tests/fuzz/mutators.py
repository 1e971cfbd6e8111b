"""What can be wrong in a file: bytes of any file, values of JSON and YAML, headers of safetensors, rows of data, graphs.

`mutate(name, content, draw)` gives (what was done, the other content). Everything follows from `draw`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Draw = random.Random
Change = Callable[[bytes, Draw], bytes]

DEEP = 3_000

# --- bytes ---


def flip(content: bytes, draw: Draw) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def delete(content: bytes, draw: Draw) -> bytes:
    start = draw.randrange(len(content))
    return content[:start] + content[start + draw.choice((1, 2, 16, len(content) // 3)) :]


def insert(content: bytes, draw: Draw) -> bytes:
    start = draw.randrange(len(content) + 1)
    odd = (b"\0", b"\xff", b"\xef\xbb\xbf", b"\r", b"\x85", b"\xe2\x80\xa8", b"\x1b[31m", b'"', b"'", b"\t", b"{", b"[", b"\n")
    return content[:start] + draw.choice((*odd, draw.randbytes(draw.choice((1, 8, 64))))) + content[start:]


def truncate(content: bytes, draw: Draw) -> bytes:
    return content[: draw.choice((draw.randrange(len(content)), len(content) - 1, 0))]


def duplicate(content: bytes, draw: Draw) -> bytes:
    start = draw.randrange(len(content))
    block = content[start : start + draw.choice((1, 16, len(content)))]
    return content[:start] + block + content[start:]


def swap_blocks(content: bytes, draw: Draw) -> bytes:
    first, second, third, fourth = sorted(draw.randrange(len(content) + 1) for _ in range(4))
    return content[:first] + content[third:fourth] + content[second:third] + content[first:second] + content[fourth:]


def encode(content: bytes, draw: Draw) -> bytes:
    text = content.decode("utf-8", errors="replace")
    return text.encode(draw.choice(("utf-16", "utf-8-sig", "utf-32", "utf-7")), errors="replace")


BYTES: dict[str, Change] = {one.__name__: one for one in (flip, delete, insert, truncate, duplicate, swap_blocks, encode)}

# --- values ---

RAW = {
    "deep list": "[" * DEEP + "]" * DEEP,
    "deep mapping": '{"a":' * DEEP + "1" + "}" * DEEP,
    "many digits": "9" * 5_000,
    "many digits in a fraction": f"0.{'3' * 5_000}",
    "huge exponent": "1e999999999",
    "NaN": "NaN",
    "-Infinity": "-Infinity",
    "lone surrogate": '"\\ud800"',
    "key twice": '{"a": 1, "a": 2}',
    "no value": "",
    "half a string": '"',
}
"""Text that no parsed value stands for: it takes the place of a mark in the text that is written."""
MARK = "MARK{}OF"

PLAIN = (
    None, True, False, "", " ", "32", "-1", "evil", "../../../etc/passwd", "\0", "a\nb", "é", "😀", "x" * 300, "x" * 100_000,
    "<script>", "{{ 1/0 }}", "%s%n", -1, 0, 1, 2, 3, 2**31, 2**32, 2**63, 2**64, 10**9, 10**12, 10**19, -(10**9), 0.0, -0.5,
    0.5, 1.5, 1e-300, 1e300, 5e-324, [], {}, [None], [[]], {"a": None}, [1, "a"], {"": ""}, list(range(2_000)),
)  # fmt: skip
KEYS = ("", "a", "__class__", "auto_map", "model_type", "format", "x" * 300, "null", "é", "id", "items", "1", "\ud800")
CODE = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
"""What a hostile folder asks to be run."""


class Values:
    """A tree of plain values, and one change somewhere in it. Raw text stands as marks until it is written."""

    def __init__(self, tree: Any, draw: Draw):
        self.root, self.draw = {"root": tree}, draw
        self.marks: list[str] = []
        self.done = ""

    def places(self, node: Any = None, path: str = "") -> list[tuple[Any, Any, str]]:
        """Every (container, key, its path in words)."""
        node = self.root if node is None else node
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        found = []
        for key, value in pairs:
            here = f"{path}.{key}".removeprefix(".root")
            found.append((node, key, here))
            if isinstance(value, dict | list) and value:
                found += self.places(value, here)
        return found

    def odd(self) -> Any:
        """A value that nobody expects."""
        if self.draw.random() < 0.25:
            return self.mark(self.draw.choice(list(RAW)))
        return self.draw.choice(PLAIN)

    def mark(self, word: str) -> str:
        self.marks.append(RAW[word])
        return MARK.format(len(self.marks) - 1)

    def change(self) -> None:
        """One change at one place."""
        place, key, path = self.draw.choice(self.places())
        name = self.draw.choice(("replace", "replace", "near", "near", "drop", "add", "rename", "exchange", "wrap", "twice"))
        self.done = f"{name} {path[-60:]}"
        getattr(self, name)(place, key)

    def replace(self, place: Any, key: Any) -> None:
        place[key] = self.odd()

    def near(self, place: Any, key: Any) -> None:
        """Another value of the same type, or nearly: what a check of types lets through."""
        value = place[key]
        if isinstance(value, bool):
            place[key] = self.draw.choice((not value, int(value), str(value)))
        elif isinstance(value, int):
            close = (value + 1, value - 1, -value, value * 2, value * 1000, value**5, float(value), value + 0.5, str(value))
            place[key] = self.draw.choice(close)
        elif isinstance(value, float):
            place[key] = self.draw.choice((-value, value * 1e6, int(value), str(value), 1 / (value or 1)))
        elif isinstance(value, str):
            close = (value + "x", value[:-1], value.upper(), value * 2, [value], {value: value}, f" {value} ", value[::-1])
            place[key] = self.draw.choice(close)
        elif isinstance(value, list) and value:
            close = (value[:-1], value * 2, value[::-1], value[0], dict(enumerate(map(str, value))), [value])
            place[key] = self.draw.choice(close)
        else:
            self.replace(place, key)

    def drop(self, place: Any, key: Any) -> None:
        if place is self.root:
            self.replace(place, key)
        else:
            del place[key]

    def add(self, place: Any, _key: Any) -> None:
        if isinstance(place, list):
            place.insert(self.draw.randrange(len(place) + 1), self.odd())
        elif place is not self.root:
            name = self.draw.choice(KEYS)
            place[name] = CODE if name == "auto_map" else self.odd()

    def rename(self, place: Any, key: Any) -> None:
        if isinstance(place, dict) and place is not self.root:
            place[self.draw.choice((f"{key}s", f" {key}", str(key).upper(), *KEYS))] = place.pop(key)
        else:
            self.replace(place, key)

    def exchange(self, place: Any, key: Any) -> None:
        other, name, _ = self.draw.choice(self.places())
        mine, theirs = json.loads(json.dumps([place[key], other[name]]))
        place[key], other[name] = theirs, mine

    def wrap(self, place: Any, key: Any) -> None:
        place[key] = self.draw.choice(([place[key]], {"a": place[key]}, [place[key], place[key]]))

    def twice(self, place: Any, key: Any) -> None:
        """The same key twice, with two values."""
        self.marks.append("{" + f"{json.dumps(str(key))}: 1, {json.dumps(str(key))}: {json.dumps(place[key])}" + "}")
        place[key] = MARK.format(len(self.marks) - 1)

    def written(self, text: str) -> bytes:
        """The text with what the marks stand for."""
        for number, raw in enumerate(self.marks):
            text = re.sub(
                f"\"{MARK.format(number)}\"|'{MARK.format(number)}'|{MARK.format(number)}", lambda _, raw=raw: raw, text
            )
        return text.encode("utf-8", errors="surrogatepass")


def _changed(tree: Any, draw: Draw, write: Callable[[Any], str]) -> tuple[str, bytes]:
    values = Values(tree, draw)
    values.change()
    if draw.random() < 0.1:
        values.change()
    return values.done, values.written(write(values.root["root"]))


def json_values(content: bytes, draw: Draw) -> tuple[str, bytes]:
    return _changed(json.loads(content), draw, lambda tree: json.dumps(tree, indent=draw.choice((None, 1))))


def yaml_values(content: bytes, draw: Draw) -> tuple[str, bytes]:
    def write(tree: Any) -> str:
        if draw.random() < 0.3:
            return json.dumps(tree)
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=draw.choice((None, False)))

    return _changed(yaml.safe_load(content), draw, write)


BRACKETS = ("[", "{", "- ", "? ", "&a [", "!!x ", "*a ", "'", '"', "{a: ", "|\n", "#", ": ", "a: &b {<<: *b, ", "%", "@", "`")


def yaml_text(content: bytes, draw: Draw) -> bytes:
    """Marks of YAML itself: brackets that never close, anchors, tags, tabs, documents, aliases that multiply."""
    lines = content.decode().split("\n")
    place = draw.randrange(len(lines))
    kind = draw.randrange(6)
    if kind == 0:
        lines[place] += draw.choice(BRACKETS) * draw.choice((1, 2, 40, DEEP))
    elif kind == 1:
        lines[place] = draw.choice(("  ", "\t", " ")) + lines[place]
    elif kind == 2:
        lines.insert(
            place,
            draw.choice(("---", "...", "<<: *a", "a: &a [*a]", "%YAML 9.9", "? [a]", "\ufeff", "!!python/name:os.system x")),
        )
    elif kind == 3:
        bomb = ["a: &a [x, x]", *(f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]" for n in range(20))]
        lines[place:place] = bomb
    elif kind == 4:
        key, _, _ = lines[place].partition(":")
        odd = ("0x1F", "0o17", "1_000", "12:30", "no", "~", "2001-01-01", ".inf", ".nan", "=", "<<", "1e400", "!!int 3", "&x 3")
        lines[place] = f"{key}: {draw.choice(odd)}"
    else:
        lines.insert(place, lines[draw.randrange(len(lines))])
    return "\n".join(lines).encode("utf-8", errors="surrogatepass")


# --- safetensors ---


def safetensors(content: bytes, draw: Draw) -> tuple[str, bytes]:
    """The length of the header, a value in it, where the tensors lie, their types and shapes, the numbers themselves."""
    size = int.from_bytes(content[:8], "little")
    header, data = tensor_header(content), content[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    done = draw.choice(("length", "values", "metadata", "offsets", "dtype", "shape", "lose", "rename", "data", "numbers"))
    if done == "length":
        length = draw.choice((0, 1, 7, size - 1, size + 1, size + len(data), 2**31, 2**63 - 1, 2**63, 2**64 - 1))
        return done, length.to_bytes(8, "little") + content[8:]
    if done == "data":
        return done, content[: 8 + size] + draw.choice((data[:-1], data + b"\0", b"", data * 2, data[: len(data) // 2]))
    if done == "numbers" and len(data) >= 4:
        odd = draw.choice((b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\0\0\xc0\x7f", b"\xff\xff\x7f\x7f", b"\0\0\0\0"))
        place = 4 * draw.randrange(len(data) // 4)
        return done, content[: 8 + size] + data[:place] + odd + data[place + 4 :]
    if done in ("values", "numbers") or not names:
        told, text = json_values(json.dumps(header).encode(), draw)
        return f"header: {told}", len(text).to_bytes(8, "little") + text + data
    name = draw.choice(names)
    row = header[name]
    if done == "metadata":
        header["__metadata__"] = draw.choice(
            ({"a": 1}, [], "x", None, {"format": "tf"}, {"compress_delta": "{}"}, {"format": "pt"})
        )
    elif done == "offsets":
        start, end = row["data_offsets"]
        other = header[draw.choice(names)]["data_offsets"]
        odd = ([end, start], [start, end + 4], [start + 1, end], other, [0, len(data)], [-4, end], [2**62, 2**63], [start], [])
        row["data_offsets"] = draw.choice(odd)
    elif done == "dtype":
        row["dtype"] = draw.choice(("F16", "BF16", "F64", "I8", "BOOL", "I64", "F8_E4M3", "evil", "", "F4", "C64"))
    elif done == "shape":
        shape, axis = list(row["shape"]), draw.randrange(len(row["shape"]) or 1)
        odd = (
            shape[::-1],
            [*shape, 1],
            shape[:-1],
            [10**12, *shape[1:]],
            [-1, *shape[1:]],
            [0, *shape[1:]],
            [2**40, 2**40],
            [1] * 80,
        )
        row["shape"] = draw.choice((*odd, [*shape[:axis], (shape[axis] if shape else 1) + 1, *shape[axis + 1 :]]))
    elif done == "lose":
        del header[name]
    else:
        header[draw.choice((f"{name}x", "", name.upper(), "x" * 5_000, "../a", "bert"))] = header.pop(name)
    return f"{done} of {name[-40:]}", with_header(content, header)


def delta(content: bytes, draw: Draw) -> tuple[str, bytes]:
    """A value of a delta file's description, under a checksum that holds: what someone writes who knows the format."""
    told = []

    def change(description: Any) -> str:
        done, changed = json_values(json.dumps(description).encode(), draw)
        told.append(f"sealed {done}")
        return changed.decode("utf-8", errors="replace")

    changed = described(content, change)
    return told[0], changed


def described(content: bytes, change: Callable[[Any], str]) -> bytes:
    """A delta file whose description is what `change` makes of it, sealed anew where it is JSON."""
    import torch
    from safetensors.torch import load, save

    from compressor.storage.delta_file import HEADER_LIMIT, KEY, _digest

    flat, text = load(content), tensor_header(content)["__metadata__"][KEY]
    inside = not text
    if inside:
        text = bytes(flat.pop("description").numpy()).decode()
    description = json.loads(text)
    description.pop("sha256")
    text = change(description)
    try:
        description = json.loads(text)
        text = json.dumps({**description, "sha256": _digest(description, flat)}, separators=(",", ":"))
    except (ValueError, RecursionError, TypeError):  # it stays as it is, and is refused earlier
        pass
    if inside or len(text) > HEADER_LIMIT // 2:
        flat["description"] = torch.frombuffer(bytearray(text.encode("utf-8", errors="replace")), dtype=torch.uint8)
        text = ""
    return save(flat, {KEY: text})


def tensor_header(content: bytes) -> dict[str, Any]:
    """The JSON before the tensors of a safetensors file."""
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def with_header(content: bytes, header: Any) -> bytes:
    """The same tensors behind another header."""
    data = content[8 + int.from_bytes(content[:8], "little") :]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# --- rows of data ---

FIELDS = (
    "", " ", "0", "1", "1.5", "nan", "inf", "-inf", "1e999", "9" * 5_000, "x" * 200_000, "\0", '"', '""', "'", "\\", "<unk>",
    "é", "\u2028", "\ufeff", "class0", "O", "I-", "B-GOOD", "null", "[]", "{}", "-DOCSTART-", "word " * 5_000, "\u202e", "٣",
)  # fmt: skip


def rows(content: bytes, draw: Draw) -> bytes:
    """Lines and fields of a table."""
    ending = draw.choice(("\n", "\n", "\n", "\r\n", "\r", "\x0b", "\x85"))
    lines = content.decode().split("\n")
    split = "\t" if "\t" in lines[0] else "," if "," in lines[0] else " "
    place = draw.choice((0, 0, 1, draw.randrange(len(lines))))
    fields = lines[place].split(split)
    field = draw.randrange(len(fields))
    kind = draw.randrange(8)
    if kind == 0:
        fields[field] = draw.choice(FIELDS)
    elif kind == 1:
        fields.insert(field, draw.choice((*FIELDS, fields[field])))
    elif kind == 2:
        del fields[field]
    elif kind == 3:
        fields = fields[::-1]
    lines[place] = split.join(fields)
    if kind == 4:
        lines = lines[: draw.choice((0, 1, 2))]
    elif kind == 5:
        column = draw.randrange(len(lines[0].split(split)))
        value = draw.choice(FIELDS[:6])
        lines[1:] = [
            split.join([*row[:column], value, *row[column + 1 :]]) for row in (line.split(split) for line in lines[1:])
        ]
    elif kind == 6:
        lines[place:place] = [draw.choice(("", split, split * 50, lines[0], "#", "\0"))] * draw.choice((1, 1, 500))
    elif kind == 7:
        del lines[place]
    return ending.join(lines).encode("utf-8", errors="surrogatepass")


def json_lines(content: bytes, draw: Draw) -> tuple[str, bytes]:
    lines = content.decode().rstrip("\n").split("\n")
    place = draw.choice((0, draw.randrange(len(lines))))
    done, changed = json_values(lines[place].encode(), draw)
    lines[place] = changed.replace(b"\n", b" ").decode("utf-8", errors="replace")
    return f"line {place + 1}: {done}", ("\n".join(lines) + "\n").encode()


# --- graphs ---


def onnx_graph(content: bytes, draw: Draw) -> tuple[str, bytes]:
    """One node, weight, input or output of an ONNX file."""
    import onnx

    model = onnx.load_from_string(content)
    graph = model.graph
    node, weight = draw.choice(graph.node), draw.choice(graph.initializer)
    done = draw.choice(
        (
            "operator",
            "domain",
            "input",
            "output",
            "lose",
            "circle",
            "attribute",
            "dims",
            "type",
            "data",
            "graph input",
            "graph output",
            "opset",
            "external",
            "size",
        )
    )
    if done == "operator":
        node.op_type = draw.choice(("Loop", "If", "Scan", "NoSuchThing", "MatMul", "Gather", "", "Reshape", "ConstantOfShape"))
    elif done == "domain":
        node.domain = draw.choice(("com.microsoft", "evil", "ai.onnx.ml", ""))
    elif done in ("input", "output"):
        names = node.input if done == "input" else node.output
        names[draw.randrange(len(names))] = draw.choice(("", "nowhere", weight.name, draw.choice(graph.node).output[0]))
    elif done == "lose":
        graph.node.remove(node)
    elif done == "circle":
        node.input.append(graph.node[-1].output[0])
    elif done == "attribute" and node.attribute:
        one = draw.choice(node.attribute)
        one.type = draw.randrange(1, 11)
        one.i = draw.choice((-1, 0, 99, 2**62))
        one.ints[:] = [draw.choice((-1, 0, 7, 2**62))]
    elif done == "dims":
        weight.dims[:] = draw.choice(([], [0], [-1], [2**40, 2**20], [*weight.dims, 2], [1] * 200, list(weight.dims)[::-1]))
    elif done == "type":
        weight.data_type = draw.choice((0, 2, 6, 7, 8, 9, 10, 11, 16, 99))
    elif done == "data":
        weight.raw_data = draw.choice(
            (b"", weight.raw_data[:-1], weight.raw_data * 2, b"\0\0\xc0\x7f" * (len(weight.raw_data) // 4))
        )
    elif done in ("graph input", "graph output"):
        value = draw.choice(graph.input if done == "graph input" else graph.output)
        value.name = draw.choice((value.name, "logits", "input_ids", "x"))
        value.type.tensor_type.elem_type = draw.choice((1, 6, 7, 8, 9))
        dims = value.type.tensor_type.shape.dim
        dims[draw.randrange(len(dims))].dim_value = draw.choice((0, 1, -1, 2, 2**40))
    elif done == "opset":
        model.opset_import[0].version = draw.choice((-1, 0, 1, 7, 99, 2**40))
    elif done == "external":
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.ClearField("raw_data")
        for key, value in (
            ("location", draw.choice(("../../../../etc/passwd", "/dev/zero", "none.data", "model.onnx", ""))),
            ("offset", draw.choice(("0", "-1", str(2**62), "x"))),
            ("length", draw.choice(("4", str(2**40), "-1"))),
        ):
            entry = weight.external_data.add()
            entry.key, entry.value = key, value
    else:
        big = onnx.helper.make_tensor(
            "big_shape", onnx.TensorProto.INT64, [2], [2 ** draw.choice((10, 15, 31)), 2 ** draw.choice((5, 14, 31))]
        )
        graph.initializer.append(big)
        graph.node.insert(0, onnx.helper.make_node("ConstantOfShape", ["big_shape"], ["big"]))
        graph.output.append(onnx.helper.make_tensor_value_info("big", 1, [None, None]))
    return f"graph: {done}", model.SerializeToString()


def xml(content: bytes, draw: Draw) -> bytes:
    """One attribute of an OpenVINO model."""
    found = list(re.finditer(rb'="([^"]*)"', content))
    one = draw.choice(found)
    odd = (
        b"",
        b"-1",
        b"0",
        b"1",
        b"99999999999999999999",
        b"evil",
        b"i64",
        b"f32",
        b"1,-1",
        b"x" * 5_000,
        draw.choice(found)[1],
    )
    return content[: one.start(1)] + draw.choice(odd) + content[one.end(1) :]


STRUCTURE: dict[str, tuple[Change, ...]] = {
    ".json": (json_values,),
    ".yaml": (yaml_values, yaml_text),
    ".safetensors": (safetensors,),
    ".tsv": (rows,),
    ".csv": (rows,),
    ".conll": (rows,),
    ".jsonl": (json_lines,),
    ".onnx": (onnx_graph,),
    ".xml": (xml,),
}
"""What else than bytes can be wrong in a file of this ending."""


def mutate(name: str, content: bytes, draw: Draw, structure: tuple[Change, ...] = ()) -> tuple[str, bytes]:
    """(what was done, the content afterwards). Two thirds of the changes are of the file's structure where it has one.

    `structure` stands for STRUCTURE's row where a file is more than its ending says.
    """
    known = structure or STRUCTURE.get(Path(name).suffix, ())
    if not content:
        return "insert", insert(content, draw)
    change = draw.choice(known) if known and draw.random() < 2 / 3 else draw.choice(list(BYTES.values()))
    result = change(content, draw)
    return result if isinstance(result, tuple) else (change.__name__, result)
