// Just enough of CUDA to run a kernel on a CPU: the threads of a block are threads, its blocks run one after the other.
#pragma once

#include <sched.h>
#include <stdint.h>

#include <atomic>
#include <barrier>

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

inline std::barrier<>* block_barrier;
inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) { sched_yield(); }
