// Head exchange between GPUs of one machine: the host's side. Plain C interface, no torch.
#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>

#include "all2all_heads.cuh"

#define SP_TRY(call)                                 \
  do {                                               \
    const cudaError_t error = (call);                \
    if (error != cudaSuccess) {                      \
      cudaGetLastError(); /* the host's own checks */ \
      return error;                                  \
    }                                                \
  } while (0)

// `arguments` is a Launch: a type of this file in a signature would hide the function
extern "C" {

const char* spg_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
uint64_t spg_slots_offset() { return kSlots; }
uint64_t spg_launch_bytes() { return sizeof(Launch); }
uint64_t spg_status_bytes() { return sizeof(Status); }

int spg_multiprocessors(int device, int* count) {
  SP_TRY(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device));
  return 0;
}

// A buffer that others can open: `handle` gets its 64-byte IPC handle. Its Control block is zero.
int spg_allocate(int device, uint64_t bytes, void** base, void* handle) {
  SP_TRY(cudaSetDevice(device));
  SP_TRY(cudaMalloc(base, bytes));
  cudaIpcMemHandle_t exported;
  cudaError_t error = cudaMemset(*base, 0, kSlots);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(&exported, *base);
  if (error != cudaSuccess) {
    cudaGetLastError();
    cudaFree(*base);
    return error;
  }
  memcpy(handle, &exported, sizeof(exported));
  return 0;
}

int spg_free(int device, void* base) {
  SP_TRY(cudaSetDevice(device));
  SP_TRY(cudaFree(base));
  return 0;
}

int spg_open(int device, const void* handle, void** base) {
  cudaIpcMemHandle_t exported;
  memcpy(&exported, handle, sizeof(exported));
  SP_TRY(cudaSetDevice(device));
  SP_TRY(cudaIpcOpenMemHandle(base, exported, cudaIpcMemLazyEnablePeerAccess));
  return 0;
}

int spg_close(int device, void* base) {
  SP_TRY(cudaSetDevice(device));
  SP_TRY(cudaIpcCloseMemHandle(base));
  return 0;
}

int spg_allocate_status(int device, void** host, void** seen_by_device) {
  SP_TRY(cudaSetDevice(device));
  SP_TRY(cudaHostAlloc(host, sizeof(Status), cudaHostAllocMapped | cudaHostAllocPortable));
  memset(*host, 0, sizeof(Status));
  SP_TRY(cudaHostGetDevicePointer(seen_by_device, *host, 0));
  return 0;
}

int spg_free_status(int device, void* host) {
  SP_TRY(cudaSetDevice(device));
  SP_TRY(cudaFreeHost(host));
  return 0;
}

// The exchange by stores of the multiprocessors. Asynchronous on `stream`.
int spg_push(int device, const void* arguments, void* stream) {
  const Launch* launch = static_cast<const Launch*>(arguments);
  SP_TRY(cudaSetDevice(device));
  if (launch->blocks < launch->exchange.world || launch->blocks > kMaxBlocks) return cudaErrorInvalidValue;
  push_kernel<<<launch->blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*launch);
  SP_TRY(cudaGetLastError());
  return 0;
}

// The exchange by copy engines into `fixed_slot` of every peer. Asynchronous on `stream`.
int spg_copy(int device, const void* arguments, void* stream_handle) {
  SP_TRY(cudaSetDevice(device));
  const Launch& p = *static_cast<const Launch*>(arguments);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const int world = p.exchange.world;
  for (int i = 1; i <= world; ++i) {
    const int to = (p.rank + i) % world;
    char* target = p.peers[to] + kSlots + p.fixed_slot * p.slot_bytes;
    for (int tensor = 0; tensor < p.exchange.tensors; ++tensor) {
      const sp::Copy c =
          sp::merged(sp::copy_between(p.exchange, p.rank, to, tensor, p.source_batch[tensor], p.source_token[tensor]));
      if (c.run_bytes == 0 || c.tokens == 0) continue;
      for (int64_t b = 0; b < c.batch; ++b) {
        char* into = target + c.target + b * c.target_batch;
        const char* from = p.sources[tensor] + c.source + b * c.source_batch;
        if (c.tokens == 1)
          SP_TRY(cudaMemcpyAsync(into, from, c.run_bytes, cudaMemcpyDefault, stream));
        else if (c.source_token >= c.run_bytes)
          SP_TRY(cudaMemcpy2DAsync(into, c.target_token, from, c.source_token, c.run_bytes, c.tokens, cudaMemcpyDefault, stream));
        else  // a broadcast token: a pitch cannot say that
          for (int64_t t = 0; t < c.tokens; ++t)
            SP_TRY(cudaMemcpyAsync(into + t * c.target_token, from + t * c.source_token, c.run_bytes, cudaMemcpyDefault, stream));
      }
    }
  }
  signal_kernel<<<1, 32, 0, stream>>>(p);
  SP_TRY(cudaGetLastError());
  wait_kernel<<<1, 32, 0, stream>>>(p);
  SP_TRY(cudaGetLastError());
  return 0;
}

}  // extern "C"
