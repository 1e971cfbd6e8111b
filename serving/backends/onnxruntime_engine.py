"""ONNX Runtime's session of a served file, with the settings of its model config.

The server copies this file into each backend's folder; like model.py there it imports nothing of this project. Config keys
mean what they mean to the native backend (its README, "Model Config Options"); one that is not implemented here is refused.
"""

import os

import onnxruntime as ort
from cpu_threads import streams_of, threads_of

# -1 is basic, 1 adds fusions, 2 turns everything off, and without a level all optimizations are on
LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}

TYPES = {
    "tensor(float16)": "TYPE_FP16",
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(bool)": "TYPE_BOOL",
}
SHRINK = "memory.enable_memory_arena_shrinkage"
DEVICE_ALLOCATOR = "session.use_device_allocator_for_initializers"
FOR_CUDA = (
    "arena_extend_strategy",
    "cudnn_conv_algo_search",
    "cudnn_conv_use_max_workspace",
    "do_copy_in_default_stream",
    "gpu_mem_limit",
)
"""Parameters that the native backend reads for an instance on a GPU only."""


class Engine:
    """One session. Any exception of `infer` is the runtime's; ValueError where the config cannot be followed."""

    title = "onnx runtime"
    file = "model.onnx"

    def __init__(self, path, config, args, settings, facts):
        check_config(config, settings, args["model_instance_kind"])
        # never 0 threads: ONNX Runtime would then pin its own, also to cores outside the process's CPU set
        threads = threads_of(config, settings, "intra_op_thread_count")
        # a GPU computes the runs of one session one after the other
        self.streams = streams_of(settings, threads) if args["model_instance_kind"] != "GPU" else 1
        options = session_options(config, settings, max(1, threads // self.streams))
        self.session = ort.InferenceSession(str(path), options, providers=providers(args))
        if args["model_instance_kind"] == "GPU" and "CUDAExecutionProvider" not in self.session.get_providers():
            raise ValueError("this instance is for a GPU, and ONNX Runtime could not use CUDA")
        self.run_options = ort.RunOptions()
        if SHRINK in settings:
            self.run_options.add_run_config_entry(SHRINK, settings[SHRINK])
        sides = (self.session.get_inputs(), self.session.get_outputs())
        self.inputs, self.outputs = ({tensor.name: TYPES.get(tensor.type, tensor.type) for tensor in side} for side in sides)

    def infer(self, names, feeds):
        """The arrays of the outputs `names`, in order, from {input name: array}. For several threads at a time."""
        return self.session.run(names, feeds, self.run_options)


def session_options(config, settings, threads):
    """SessionOptions of a model config. Threads never spin: between requests the cores are free for others."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = int(settings.get("inter_op_thread_count", 0))
    options.execution_mode = ort.ExecutionMode(int(settings.get("execution_mode", 0)))
    options.enable_cpu_mem_arena = settings.get("enable_mem_arena", "1") == "1"
    options.enable_mem_pattern = settings.get("enable_mem_pattern", "1") == "1"
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if DEVICE_ALLOCATOR in settings:
        options.add_session_config_entry(DEVICE_ALLOCATOR, settings[DEVICE_ALLOCATOR])
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    if level not in LEVELS:
        raise ValueError(f"graph optimization level {level}, allowed levels are -1, 1 and 2")
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[level])
    return options


def check_config(config, settings, kind):
    """Raises ValueError for settings of the native backend that are not implemented here: they would be ignored silently.

    As there, those for a GPU have no effect on the CPU.
    """
    accelerators = config.get("optimization", {}).get("execution_accelerators", {})
    side = "gpu_execution_accelerator" if kind == "GPU" else "cpu_execution_accelerator"
    if chosen := accelerators.get(side):
        raise ValueError(f"{side} '{chosen[0]['name']}' is not implemented by this backend; Triton's own has it")
    if kind == "GPU" and (unknown := [key for key in FOR_CUDA if key in settings]):
        raise ValueError(f"parameter '{unknown[0]}' is not implemented by this backend; Triton's own has it")


def providers(args):
    """The execution provider of the instance, followed by the CPU for operators that CUDA lacks.

    CUDA's libraries may be in packages of their own, which the loader does not search. fp32 is computed in fp32, as it was
    proven: by default it is multiplied in TF32. Attention is not cuDNN's, which builds kernels for each shape of a request.
    """
    if args["model_instance_kind"] != "GPU":
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        # Triton's stub ignores PYTHONPATH, so it may import another package than the process that started the server
        folder = os.path.dirname(ort.__file__)
        raise ValueError(f"this instance is for a GPU, and the server's ONNX Runtime {ort.__version__} in {folder} has no CUDA")
    os.environ.setdefault("ORT_ENABLE_CUDNN_FLASH_ATTENTION", "0")
    ort.preload_dlls()
    options = {"device_id": args["model_instance_device_id"], "use_tf32": "0"}
    return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]
