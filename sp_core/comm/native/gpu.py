"""The exchange's calls on a GPU: by NVRTC where torch brings it, by a library of nvcc's where it does not."""

from __future__ import annotations

from .build import load_cuda, no_exchange_between_gpus
from .cuda import CudaError, CudaLibrary
from .cuda_runtime import CudaRuntime
from .cuda_runtime import unusable as no_runtime

#: either has the same methods
GpuCalls = CudaRuntime | CudaLibrary


def unusable() -> str:
    """Why GPUs of this process cannot exchange by peer writes, or "". May build the library."""
    if reason := no_exchange_between_gpus():
        return reason
    without_toolkit = no_runtime()
    if not without_toolkit:
        return ""
    built = load_cuda().reason
    return built and f"{without_toolkit}; {built}"


def open_device(device: int) -> GpuCalls:
    """
    Raises:
        CudaError: the device cannot be used; the message says why.
    """
    if reason := unusable():
        raise CudaError(reason)
    if not no_runtime():
        return CudaRuntime(device)
    handle = load_cuda().handle
    assert handle is not None
    return CudaLibrary(handle, device)
