// The exchange kernel of csrc/all2all_heads.cuh as a library for CPU ranks: a launch runs to its end before the call returns.
#include "../processes/cuda_on_cpu.h"

#include "../../csrc/all2all_heads.cuh"

#include <thread>
#include <vector>

extern "C" void push(const Launch* launch) {
  // block 0 waits for the others of its launch, which on a GPU run beside it
  for (int block = launch->blocks - 1; block >= 0; --block) {
    std::barrier<> barrier(kThreads);
    block_barrier = &barrier;
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < kThreads; ++t)
      threads.emplace_back([=] {
        threadIdx = {t}, blockIdx = {static_cast<unsigned>(block)}, blockDim = {kThreads};
        gridDim = {static_cast<unsigned>(launch->blocks)};
        push_kernel(*launch);
      });
    for (auto& thread : threads) thread.join();
  }
}
