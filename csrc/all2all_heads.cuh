// Head exchange between GPUs of one machine by direct writes into the peers' memory: the device's side.
//
// Every rank owns one plain cudaMalloc allocation (the kind whose IPC handle can be exported whatever allocator the host
// program uses): a Control block, then receive slots of one size. One launch moves all tensors of an exchange: a block
// serves one peer and strides over tokens, each element goes straight to its final place in the peer's slot. Then the
// block stores the exchange's number (its epoch) in the peer's Control with a system-scope release; block 0 waits for
// everybody's stores with acquires. Peer atomics are not needed, so this also works over PCIe.
//
// Which slot to write is granted by the receiver one exchange ahead: a launch first tells the peers the slot for the
// next exchange, one whose readers were all enqueued earlier on the same stream. Nothing is reset, nothing is lapped.
//
// No wait traps: it looks at a word in host memory, and when the host has raised it (time-out, cancel, dead peer) the
// kernel notes whom it waited for and ends. The host then raises an error and delivers nothing.
#pragma once

#include <stdint.h>

#include "all2all_addresses.h"

// NVRTC gives kernels that are looked up by name; nvcc's host side in all2all_heads.cu launches its own
#ifdef __CUDACC_RTC__
#define SP_KERNEL extern "C" __global__
namespace sp_device {
#else
#define SP_KERNEL __global__
namespace {
#endif

#ifndef SP_THREADS
#define SP_THREADS 256
#endif
constexpr int kThreads = SP_THREADS;
constexpr int kUnroll = 4;
constexpr int kMaxBlocks = 512;  // and so at most 257 from one rank to one peer
constexpr int kMaxTensors = 8;
constexpr int kEpochs = 4;       // whose grants are kept

// In device memory of each rank, written by its peers.
struct Control {
  uint64_t grants[kEpochs][sp::kMaxWorld];           // by owner of the slot: epoch << 8 | slot
  uint64_t arrived[sp::kMaxWorld][kMaxBlocks];       // by source and block: epoch << 32 | signature
};

// In host memory that the device can see.
struct Status {
  uint32_t abort, started, completed, reserved;
  uint32_t late[sp::kMaxWorld];      // 1: did not arrive, 2: granted no slot
  uint32_t mismatch[sp::kMaxWorld];  // came with another signature
};

struct Launch {
  sp::Exchange exchange;
  int32_t rank, blocks, fixed_slot, next_slot;  // fixed_slot: what everybody writes, or -1 to obey the grants
  uint32_t epoch, signature;
  uint64_t slot_bytes;
  const char* sources[kMaxTensors];
  int64_t source_batch[kMaxTensors], source_token[kMaxTensors];
  char* peers[sp::kMaxWorld];  // start of each rank's allocation, as this process sees it
  Status* status;
};

constexpr uint64_t kSlots = (sizeof(Control) + 511) / 512 * 512;

#ifdef __CUDACC__
__device__ __forceinline__ void store_release(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
#else  // the tests run this file on a CPU
inline void store_release(uint64_t* address, uint64_t value) { __atomic_store_n(address, value, __ATOMIC_RELEASE); }
inline uint64_t load_acquire(const uint64_t* address) { return __atomic_load_n(address, __ATOMIC_ACQUIRE); }
#endif

// Waits until the value's upper part (by `shift`) has reached `epoch`. False if the host called it off.
__device__ bool wait_for(const uint64_t* address, int shift, uint64_t epoch, const Status* status, uint64_t* value) {
  uint32_t pause = 32;
  for (uint32_t turn = 1;; ++turn) {
    *value = load_acquire(address);
    if (*value >> shift >= epoch) return true;
    if (turn % 64 == 0 && *static_cast<const volatile uint32_t*>(&status->abort)) return false;
    __nanosleep(pause);
    if (pause < 1024) pause *= 2;
  }
}

template <typename Vector>
__device__ __forceinline__ void copy_rows(const sp::Copy& c, const char* source, char* target, const sp::Share& share) {
  const int vectors = static_cast<int>(c.run_bytes / static_cast<int64_t>(sizeof(Vector)));
  const int lanes = vectors < kThreads ? vectors : kThreads;
  const int rows_at_once = kThreads / lanes, lane = threadIdx.x % lanes, sub = threadIdx.x / lanes;
  if (sub >= rows_at_once) return;
  const int64_t stride = static_cast<int64_t>(share.count) * rows_at_once;
  const int64_t source_step = stride * c.source_token, target_step = stride * c.target_token;
  for (int64_t b = 0; b < c.batch; ++b) {
    int64_t token = static_cast<int64_t>(share.index) * rows_at_once + sub;
    const char* from = source + c.source + b * c.source_batch + token * c.source_token;
    char* to = target + c.target + b * c.target_batch + token * c.target_token;
    for (; token < c.tokens; token += kUnroll * stride) {
      for (int v = lane; v < vectors; v += lanes) {
        Vector held[kUnroll];  // several loads under way at once hide the latency
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
          if (token + i * stride < c.tokens) held[i] = reinterpret_cast<const Vector*>(from + i * source_step)[v];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
          if (token + i * stride < c.tokens) reinterpret_cast<Vector*>(to + i * target_step)[v] = held[i];
      }
      from += kUnroll * source_step;
      to += kUnroll * target_step;
    }
  }
}

__device__ void copy_to_peer(const sp::Copy& c, const char* source, char* target, const sp::Share& share) {
  if (c.run_bytes == 0 || c.batch * c.tokens == 0) return;
  switch (sp::vector_bytes(c, reinterpret_cast<uint64_t>(source), reinterpret_cast<uint64_t>(target))) {
    case 16: return copy_rows<uint4>(c, source, target, share);
    case 8: return copy_rows<uint2>(c, source, target, share);
    case 4: return copy_rows<uint32_t>(c, source, target, share);
    case 2: return copy_rows<uint16_t>(c, source, target, share);
    default: return copy_rows<uint8_t>(c, source, target, share);
  }
}

__device__ __forceinline__ Control* control_of(const Launch& p, int rank) { return reinterpret_cast<Control*>(p.peers[rank]); }

__device__ __forceinline__ uint64_t stamp(const Launch& p) { return static_cast<uint64_t>(p.epoch) << 32 | p.signature; }

// One block: until every rank's blocks have arrived. `blocks` is how many blocks a launch has, 0 for one per pair.
__device__ void wait_for_all(const Launch& p, int blocks) {
  const int world = p.exchange.world;
  const Control* own = control_of(p, p.rank);
  for (int flag = threadIdx.x; flag < world * kMaxBlocks; flag += blockDim.x) {
    const int from = flag % world, index = flag / world;
    const int serving = blocks ? sp::blocks_serving(blocks, world, from, p.rank) : 1;
    if (index >= (blocks ? blocks / world + 1 : 1)) break;
    if (index >= serving) continue;
    uint64_t value;
    if (!wait_for(&own->arrived[from][index], 32, p.epoch, p.status, &value)) {
      p.status->late[from] = 1;
    } else if (value >> 32 == p.epoch && static_cast<uint32_t>(value) != p.signature) {
      p.status->mismatch[from] = 1;
    }
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) *static_cast<volatile uint32_t*>(&p.status->completed) = p.epoch;
}

SP_KERNEL void __launch_bounds__(kThreads, 2) push_kernel(const __grid_constant__ Launch p) {
  __shared__ int slot;
  const int world = p.exchange.world;
  const sp::Share share = sp::block_share(blockIdx.x, gridDim.x, world, p.rank);
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) *static_cast<volatile uint32_t*>(&p.status->started) = p.epoch;
    const uint64_t next = static_cast<uint64_t>(p.epoch) + 1;
    if (threadIdx.x < world) store_release(&control_of(p, threadIdx.x)->grants[next % kEpochs][p.rank], next << 8 | p.next_slot);
  }
  if (threadIdx.x == 0) {
    uint64_t grant;
    if (p.fixed_slot >= 0) {
      slot = p.fixed_slot;
    } else if (wait_for(&control_of(p, p.rank)->grants[p.epoch % kEpochs][share.peer], 8, p.epoch, p.status, &grant)) {
      slot = static_cast<int>(grant & 0xff);
    } else {
      slot = -1;
      p.status->late[share.peer] = 2;
    }
  }
  __syncthreads();
  if (slot >= 0) {
    char* target = p.peers[share.peer] + kSlots + slot * p.slot_bytes;
    for (int tensor = 0; tensor < p.exchange.tensors; ++tensor) {
      const sp::Copy copy =
          sp::copy_between(p.exchange, p.rank, share.peer, tensor, p.source_batch[tensor], p.source_token[tensor]);
      copy_to_peer(copy, p.sources[tensor], target, share);
    }
    __threadfence_system();  // every thread's stores, before thread 0 says that they are there
    __syncthreads();
    if (threadIdx.x == 0) store_release(&control_of(p, share.peer)->arrived[p.rank][share.index], stamp(p));
  }
  if (blockIdx.x == 0) wait_for_all(p, gridDim.x);
}

// What goes around copies that the copy engines make: nothing moves before the kernel, or after it, on a stream.
SP_KERNEL void signal_kernel(const __grid_constant__ Launch p) {
  if (threadIdx.x == 0) *static_cast<volatile uint32_t*>(&p.status->started) = p.epoch;
  __threadfence_system();
  if (threadIdx.x < p.exchange.world) store_release(&control_of(p, threadIdx.x)->arrived[p.rank][0], stamp(p));
}

SP_KERNEL void wait_kernel(const __grid_constant__ Launch p) { wait_for_all(p, 0); }

}  // namespace sp_device, or none
