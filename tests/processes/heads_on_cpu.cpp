// Runs the GPU kernel of csrc/all2all_heads.cuh on CPU processes and judges every byte it delivers.
//
// usage: heads_on_cpu RANKS EXCHANGES SEED [STAY_AWAY]   or   heads_on_cpu sizes
// With STAY_AWAY the last rank never starts and the others are called off, as the host does after a time-out.
#include "cuda_on_cpu.h"

#include "../../csrc/all2all_heads.cuh"

#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

constexpr int kSlotCount = 4;
constexpr size_t kSlotBytes = 1 << 16;

char value_of(uint64_t epoch, int from, int tensor, int64_t position) {
  return static_cast<char>((epoch * 0x9e3779b97f4a7c15u + from * 1000003u + tensor * 7919u + position * 31u) >> 3);
}

sp::Exchange exchange_of(uint64_t seed, uint64_t epoch, int world) {
  std::mt19937_64 random(seed * 1000003 + epoch);  // every rank draws the same
  const int head_bytes[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 80};
  sp::Exchange x = {};
  x.kind = random() % 3;
  x.world = world;
  x.tensors = 1 + random() % 3;
  x.batch = 1 + random() % 2;
  x.heads = 1 + random() % 7;
  x.head_bytes = head_bytes[random() % 12];
  for (int r = 0; r < world; ++r) x.token_counts[r] = random() % 3 ? random() % 24 : 0;
  for (int64_t head = 0; head < x.heads; ++head) ++x.head_counts[random() % world];
  return x;
}

template <typename Kernel>
void run_block(Kernel kernel, const Launch& launch, unsigned block, unsigned blocks, unsigned threads) {
  std::barrier<> barrier(threads);
  block_barrier = &barrier;
  std::vector<std::thread> pool;
  for (unsigned t = 0; t < threads; ++t)
    pool.emplace_back([&, t] {
      threadIdx = {t}, blockIdx = {block}, blockDim = {threads}, gridDim = {blocks};
      kernel(launch);
    });
  for (auto& thread : pool) thread.join();
}

struct Held {
  uint64_t epoch;
  int slot;
  std::vector<char> expected;
};

int run_rank(int me, int world, uint64_t exchanges, uint64_t seed, const std::vector<char*>& bases, Status* status) {
  std::mt19937_64 random(seed + me);
  std::vector<int> free = {1, 2, 3};
  std::vector<Held> held;
  int granted = -1;
  for (uint64_t epoch = 1; epoch <= exchanges; ++epoch) {
    const sp::Exchange x = exchange_of(seed, epoch, world);
    const bool gather = x.kind == sp::kGatherHeads;
    const int64_t tokens = gather ? sp::token_start(x, world) : x.token_counts[me];
    const int64_t row = (gather ? sp::heads_of(x, me) : x.heads) * x.head_bytes;
    Launch launch = {};
    launch.exchange = x, launch.rank = me, launch.epoch = epoch, launch.signature = 77;
    launch.blocks = world + epoch % 5, launch.slot_bytes = kSlotBytes, launch.status = &status[me];
    std::vector<std::vector<char>> sources(x.tensors, std::vector<char>(x.batch * tokens * row + 1));
    for (int i = 0; i < x.tensors; ++i) {
      for (int64_t at = 0; at < x.batch * tokens * row; ++at) sources[i][at] = value_of(epoch, me, i, at);
      launch.sources[i] = sources[i].data(), launch.source_batch[i] = tokens * row, launch.source_token[i] = row;
    }
    for (int r = 0; r < world; ++r) launch.peers[r] = bases[r];
    const int slot = granted < 0 ? 0 : granted;
    launch.fixed_slot = granted < 0 ? 0 : -1;
    granted = launch.next_slot = free.front();
    free.erase(free.begin());
    if (random() % 8 == 0) usleep(random() % 3000);
    // block 0 waits for the others of its launch, which on a GPU run beside it
    for (int block = launch.blocks - 1; block >= 0; --block) run_block(push_kernel, launch, block, launch.blocks, kThreads);
    if (status[me].abort) return 0;
    Held now = {epoch, slot, std::vector<char>(sp::slot_bytes(x, me))};
    const char* delivered = bases[me] + kSlots + slot * kSlotBytes;
    memcpy(now.expected.data(), delivered, now.expected.size());  // the gaps between tensors
    for (int from = 0; from < world; ++from) {
      const int64_t their_tokens = gather ? sp::token_start(x, world) : x.token_counts[from];
      const int64_t their_heads = gather ? sp::heads_of(x, from) : x.heads;
      for (int i = 0; i < x.tensors; ++i)
        for (int64_t b = 0; b < x.batch; ++b)
          for (int64_t token = 0; token < their_tokens; ++token)
            for (int64_t head = 0; head < their_heads; ++head) {
              const sp::Place place = sp::place_of(x, from, me, i, b, token, head);
              const int64_t at = ((b * their_tokens + token) * their_heads + head) * x.head_bytes;
              if (place.rank == me)
                for (int64_t byte = 0; byte < x.head_bytes; ++byte) now.expected[place.offset + byte] = value_of(epoch, from, i, at + byte);
            }
    }
    held.push_back(std::move(now));
    // as peer.py does: one slot must stay free for the next launch
    while (held.size() > random() % 3 || free.empty()) {
      char* memory = bases[me] + kSlots + held.front().slot * kSlotBytes;
      if (memcmp(memory, held.front().expected.data(), held.front().expected.size()) != 0)
        return printf("rank %d: exchange %lu is wrong or was overwritten\n", me, static_cast<unsigned long>(held.front().epoch)), 1;
      memset(memory, 0xcc, kSlotBytes);
      free.push_back(held.front().slot);
      held.erase(held.begin());
    }
  }
  return status[me].completed == exchanges ? 0 : 1;
}

int main(int count, char** arguments) {
  if (count == 2) return printf("%zu %zu %zu\n", sizeof(Launch), sizeof(Status), size_t{kSlots}), 0;
  const int world = atoi(arguments[1]);
  const uint64_t exchanges = atoll(arguments[2]), seed = atoll(arguments[3]);
  const bool stay_away = count > 4;
  auto shared = [](size_t size) { return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0); };
  Status* status = static_cast<Status*>(shared(world * sizeof(Status)));
  std::vector<char*> bases;
  for (int r = 0; r < world; ++r) bases.push_back(static_cast<char*>(shared(kSlots + kSlotCount * kSlotBytes)));
  const int started = stay_away ? world - 1 : world;
  for (int r = 0; r < started; ++r)
    if (fork() == 0) {
      const int result = run_rank(r, world, exchanges, seed, bases, status);
      fflush(stdout);
      _exit(result);
    }
  const auto call_off = [&] {
    for (int r = 0; r < started; ++r) *static_cast<volatile uint32_t*>(&status[r].abort) = 1;
  };
  if (stay_away) {
    usleep(300000);
    call_off();
  }
  int failed = 0, code;
  for (int r = 0; r < started; ++r) {
    wait(&code);
    failed |= code;
    if (code != 0) call_off();
  }
  for (int r = 0; r < started; ++r)
    for (int from = 0; from < world; ++from) {
      if (status[r].mismatch[from]) failed = 1;
      if ((status[r].late[from] != 0) != (stay_away && from == world - 1)) failed = 1;
    }
  puts(failed ? "failed" : "clean");
  return failed != 0;
}
