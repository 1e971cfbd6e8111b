"""The coded error for memory that is used up, of a GPU or of the machine, from wherever it is raised."""

from __future__ import annotations

from compressor.errors import CompressError, UserError, causes_of

CPU_WORDS = ("DefaultCPUAllocator", "bad allocation", "std::bad_alloc")
"""Messages of native code without memory on the CPU: torch, ONNX Runtime, OpenVINO."""
GPU_WORDS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA failure 2: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
)
"""The same on a GPU: torch's allocator and the rest of torch, ONNX Runtime, cuBLAS, cuSOLVER."""


def memory_fault(error: BaseException) -> UserError | None:
    """E908 for an error caused by memory that is used up, None for any other; causes are examined, too."""
    if isinstance(error, CompressError):
        return None
    for cause in causes_of(error):
        if isinstance(cause, CompressError):  # its text may contain the user's data
            continue
        words = str(cause)
        if any(word in words for word in GPU_WORDS):
            fix = "Lower batch_size or max_length, end other programs on it, or use the CPU: CUDA_VISIBLE_DEVICES= compress ..."
            return UserError("E908", "the GPU has no memory left", fix)
        if isinstance(cause, MemoryError) or any(word in words for word in CPU_WORDS):
            return UserError("E908", "this machine has no memory left", "Lower batch_size or max_length, or end other programs")
    return None
