// Back-to-back exchanges of the shared-memory core with random delays, for sanitizers. Ranks are threads, so that a
// sanitizer sees both sides of every access. Prints "clean" and returns 0, or says what differed.
//
// usage: shm_stress RANKS EXCHANGES SEED
#include "../../csrc/all2all_cpu.cpp"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr size_t kFirstSlot = 1 << 16;
constexpr size_t kSlotBytes = 1 << 16;
constexpr int kSlots = 7;
constexpr size_t kFileBytes = kFirstSlot + kSlots * kSlotBytes;

static_assert(sizeof(Header) <= kFirstSlot);

// What a rank sends: a value for every byte that depends on everything that could be mixed up.
char value_of(uint64_t epoch, int from, int tensor, int64_t position) {
  return static_cast<char>((epoch * 0x9e3779b97f4a7c15u + from * 1000003u + tensor * 7919u + position * 31u) >> 3);
}

sp::Exchange exchange_of(uint64_t seed, uint64_t epoch, int world) {
  std::mt19937_64 random(seed * 1000003 + epoch);  // every rank draws the same
  sp::Exchange x = {};
  x.kind = random() % 3;
  x.world = world;
  x.tensors = 1 + random() % 3;
  x.batch = 1 + random() % 2;
  x.heads = 1 + random() % 6;
  x.head_bytes = 1 + random() % 24;
  for (int r = 0; r < world; ++r) x.token_counts[r] = random() % 5;
  for (int64_t head = 0; head < x.heads; ++head) ++x.head_counts[random() % world];
  return x;
}

struct Held {
  uint64_t epoch;
  int slot;
  std::vector<char> expected;
};

struct Rank {
  Context* context;
  char* base;
  std::vector<int> free;
  std::vector<Held> held;
  std::mt19937_64 random;
  int granted[2] = {-1, -1};  // by parity of the epoch
};

void nap(std::mt19937_64& random) {
  const int choice = random() % 16;
  if (choice == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  if (choice == 1) std::this_thread::yield();
}

void check_oldest(Rank& rank) {
  const Held held = std::move(rank.held.front());
  rank.held.erase(rank.held.begin());
  if (memcmp(rank.base + kFirstSlot + held.slot * kSlotBytes, held.expected.data(), held.expected.size()) != 0) {
    printf("rank %d: exchange %lu was overwritten or wrong\n", rank.context->rank, static_cast<unsigned long>(held.epoch));
    exit(1);
  }
  // the caller owns its output: what it writes there must reach nobody
  memset(rank.base + kFirstSlot + held.slot * kSlotBytes, 0xcc, held.expected.size());
  rank.free.push_back(held.slot);
}

int take(Rank& rank) {
  while (rank.free.empty()) check_oldest(rank);
  const int slot = rank.free.back();
  rank.free.pop_back();
  return slot;
}

void grant(Rank& rank, uint64_t epoch, int second, uint64_t capacity) {
  const int slot = rank.granted[epoch % 2] = take(rank);
  sp_grant(rank.context, epoch, second, kFirstSlot + slot * kSlotBytes, capacity);
}

void run(Rank& rank, int world, uint64_t exchanges, uint64_t seed) {
  const int me = rank.context->rank;
  for (uint64_t epoch = 1; epoch <= exchanges; ++epoch) {
    const sp::Exchange x = exchange_of(seed, epoch, world);
    const bool gather = x.kind == sp::kGatherHeads;
    const int64_t tokens = gather ? sp::token_start(x, world) : x.token_counts[me];
    const int64_t row = (gather ? sp::heads_of(x, me) : x.heads) * x.head_bytes;
    std::vector<std::vector<char>> sources(x.tensors, std::vector<char>(x.batch * tokens * row + 1));
    void* pointers[3];
    int64_t batch_strides[3], token_strides[3];
    for (int i = 0; i < x.tensors; ++i) {
      for (int64_t at = 0; at < x.batch * tokens * row; ++at) sources[i][at] = value_of(epoch, me, i, at);
      pointers[i] = sources[i].data(), batch_strides[i] = tokens * row, token_strides[i] = row;
    }
    nap(rank.random);
    sp_start(rank.context, epoch, &x, "same everywhere", pointers, batch_strides, token_strides);
    const uint64_t need = sp::slot_bytes(x, me);
    // some slots are granted ahead, some are missing or too small and are granted late
    const Grant& ahead = own(rank.context)->grants[epoch % kEpochs][0];
    if (need > 0 && (ahead.epoch.load() != epoch || ahead.capacity < need)) {
      if (rank.granted[epoch % 2] >= 0) rank.free.push_back(rank.granted[epoch % 2]);
      grant(rank, epoch, 1, kSlotBytes);
    }
    int status;
    while ((status = sp_advance(rank.context, 20)) == kWaiting) nap(rank.random);
    if (status != kDone) {
      printf("rank %d: exchange %lu ended with status %d\n", me, static_cast<unsigned long>(epoch), status);
      exit(1);
    }
    const int slot = rank.granted[epoch % 2];
    rank.granted[epoch % 2] = -1;
    if (need > 0) {
      Held held = {epoch, slot, std::vector<char>(need)};
      memcpy(held.expected.data(), rank.base + kFirstSlot + slot * kSlotBytes, need);  // also the gaps between tensors
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
                  for (int64_t byte = 0; byte < x.head_bytes; ++byte) held.expected[place.offset + byte] = value_of(epoch, from, i, at + byte);
              }
      }
      rank.held.push_back(std::move(held));
    } else if (slot >= 0) {
      rank.free.push_back(slot);
    }
    while (rank.held.size() > rank.random() % 4) check_oldest(rank);
    if (rank.random() % 4 != 0) grant(rank, epoch + 2, 0, rank.random() % 2 ? kSlotBytes : 256);
  }
  while (!rank.held.empty()) check_oldest(rank);
}

}  // namespace

int main(int, char** arguments) {
  const int world = atoi(arguments[1]);
  const uint64_t exchanges = atoll(arguments[2]), seed = atoll(arguments[3]);
  std::vector<void*> bases;
  for (int r = 0; r < world; ++r) {
    bases.push_back(mmap(nullptr, kFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    sp_prepare(bases[r], r, world, seed);
  }
  std::vector<Rank> ranks(world);
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    int culprit = -1;
    ranks[r].context = sp_join(r, world, seed, nullptr, bases.data(), kFileBytes, &culprit);
    if (ranks[r].context == nullptr) return printf("rank %d could not join\n", culprit), 1;
    ranks[r].base = static_cast<char*>(bases[r]);
    ranks[r].random.seed(seed + r);
    for (int slot = 0; slot < kSlots; ++slot) ranks[r].free.push_back(slot);
  }
  for (int r = 0; r < world; ++r) threads.emplace_back([&, r] { run(ranks[r], world, exchanges, seed); });
  for (auto& thread : threads) thread.join();
  for (auto& rank : ranks) sp_leave(rank.context);
  puts("clean");
  return 0;
}
