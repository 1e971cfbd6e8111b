"""Results that stages compute once for all runs of a store: latency tables, losses of units, a teacher's outputs."""

from __future__ import annotations

from collections.abc import Callable

from compressor.errors import UserError
from pipelines.engine.stage import Workspace
from pipelines.engine.store import lock, replace_files, sealed


def once(
    name: str,
    make: Callable[[], bytes],
    workspace: Workspace,
    ending: str = "json",
    refused: Callable[[bytes], str] = lambda content: "",
) -> bytes:
    """The result of `make`, from the file `name` of the cache if it was made before and not requested again.

    A file without its checksum is made again, and one for which `refused` has a reason, which is told. Raises UserError E803 if
    it was changed.
    """
    path = workspace.cache / f"{name}.{ending}"
    seal = path.with_suffix(".sha256")
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock(path.with_suffix(".lock"), lambda pid: workspace.say(f"waiting for process {pid}, which measures the same")):
        if path.is_file() and seal.is_file() and not workspace.again:
            content = path.read_bytes()
            if seal.read_bytes() != sealed(content, path.name):
                raise UserError("E803", "has changed since it was measured", "Delete it: it is measured again", str(path))
            if not (why := refused(content)):
                workspace.say(f"{name} is there")
                return content
            workspace.say(f"{name} is made again: {why}")
        content = make()
        seal.unlink(missing_ok=True)  # killed between the two files, it would be that of the old content
        replace_files({path: content, seal: sealed(content, path.name)})
    return content
