// Head exchange between CPU ranks of one machine, by shared memory. Linux; no torch.
//
// Every rank owns one shared file: a header, then receive slots. A sender writes each run straight to its final place in
// the receiver's slot, then stores the exchange's number (its epoch) in the receiver's header. Numbers only grow, so
// nothing is ever reset and a fast rank cannot be mistaken for a slow one.
//
// Which slot to write is *granted* by the receiver one exchange ahead: between exchanges e and e + 1 it grants a slot for
// e + 2. A rank that finished e has seen everybody arrive in e, so everybody's grant for e + 1 is in place, and no
// exchange has a barrier at its start. A slot that is still in use by a caller is simply not granted. Only when the
// granted slot turns out too small (sizes changed) the receiver grants a second, larger one when it enters.
//
// Waits sleep on a futex in the own header: there may be more ranks than cores.
#include <errno.h>
#include <linux/futex.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <new>

#include "all2all_addresses.h"

namespace {

constexpr uint64_t kMagic = 0x3130656772616863;
constexpr int kEpochs = 4;  // kept of the last exchanges: at most three are in use, e to e + 2
constexpr int kSignatureBytes = 384;
constexpr int kMaxTensors = 8;
constexpr int kMessageBytes = 768;

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

enum Status : int { kDone = 0, kWaiting = 1, kMismatch = 2, kPeerFailed = 3, kNoMemory = 4 };
enum State : uint32_t { kOpen = 0, kClosed = 1, kFailed = 2 };

struct Grant {
  std::atomic<uint64_t> epoch;
  uint64_t offset, capacity;
};

struct alignas(64) Arrival {
  std::atomic<uint64_t> epoch;
};

struct Header {
  uint64_t magic, nonce;
  int32_t rank, world;
  alignas(64) std::atomic<uint32_t> bell;  // counts what happened to this rank; it sleeps on this word
  std::atomic<uint32_t> wake_at;           // value of the bell from which a sleeper wants to be woken
  std::atomic<uint32_t> asleep;
  alignas(64) std::atomic<uint64_t> entered;
  std::atomic<uint32_t> state;
  alignas(64) Grant grants[kEpochs][2];  // [0] granted ahead, [1] granted on entry because [0] was too small
  Arrival arrived[sp::kMaxWorld];
  char signature[kEpochs][kSignatureBytes];
  char message[kMessageBytes];
};

struct Peer {
  Header* header;
  char* base;
  size_t mapped;
  bool fixed;  // the mapping belongs to the caller and holds the whole file
};

struct Context {
  int rank, world;
  Peer peers[sp::kMaxWorld];
  // the exchange under way
  uint64_t epoch;
  sp::Exchange exchange;
  const char* sources[kMaxTensors];
  int64_t source_batch[kMaxTensors], source_token[kMaxTensors];
  bool sent[sp::kMaxWorld];
  int culprit;
};

Header* own(Context* c) { return c->peers[c->rank].header; }

void ring_bell(Header* header, bool always) {
  const uint32_t count = header->bell.fetch_add(1) + 1;
  if (!always) {
    if (header->asleep.load() == 0) return;
    if (static_cast<int32_t>(count - header->wake_at.load(std::memory_order_relaxed)) < 0) return;
  }
  syscall(SYS_futex, &header->bell, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

// Sleeps until the bell has rung `rings` times after `seen`, or for the time given. Returns false on time-out.
bool wait_for_bell(Header* header, uint32_t seen, uint32_t rings, int64_t nanoseconds) {
  header->wake_at.store(seen + rings, std::memory_order_relaxed);
  header->asleep.store(1);
  bool woken = true;
  if (header->bell.load() == seen) {
    const timespec slice = {static_cast<time_t>(nanoseconds / 1000000000), static_cast<long>(nanoseconds % 1000000000)};
    const long result = syscall(SYS_futex, &header->bell, FUTEX_WAIT, seen, &slice, nullptr, 0);
    woken = !(result == -1 && errno == ETIMEDOUT);
  }
  header->asleep.store(0);
  return woken;
}

int64_t now_nanoseconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1000000000} + time.tv_nsec;
}

bool ensure_mapped(Peer& peer, uint64_t end) {
  if (end <= peer.mapped) return true;
  if (peer.fixed) return false;
  // room for the next slots too; pages past the end of the file are never touched
  const size_t size = (end + end / 2 + 0x1fffff) & ~size_t{0x1fffff};
  void* base = mremap(peer.base, peer.mapped, size, MREMAP_MAYMOVE);
  if (base == MAP_FAILED) return false;
  madvise(base, size, MADV_HUGEPAGE);
  peer.base = static_cast<char*>(base);
  peer.header = static_cast<Header*>(base);
  peer.mapped = size;
  return true;
}

const Grant* find_grant(const Header* header, uint64_t epoch, uint64_t need) {
  const Grant* pair = header->grants[epoch % kEpochs];
  for (int second = 1; second >= 0; --second)
    if (pair[second].epoch.load(std::memory_order_acquire) == epoch && pair[second].capacity >= need) return &pair[second];
  return nullptr;
}

struct Job {
  sp::Copy copy;
  char* target;
};

// Copies one tensor to several receivers. Rows that a sender has in common (scatter, all-gather) are read once, in order,
// and fan out while they are in cache: reading the tensor once per receiver takes twice as long.
void copy_rows(const Job* jobs, int count, const char* source) {
  constexpr int64_t kPiece = 32 << 10;
  const int64_t rows = jobs[0].copy.batch * jobs[0].copy.tokens;
  int64_t longest = 0;
  for (int i = 0; i < count; ++i) longest = jobs[i].copy.run_bytes > longest ? jobs[i].copy.run_bytes : longest;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t done = 0; done < longest; done += kPiece) {
      for (int i = 0; i < count; ++i) {
        const sp::Copy& c = jobs[i].copy;
        const int64_t left = c.run_bytes - done;
        if (left <= 0) continue;
        const sp::Row at = sp::row_at(c, row);
        memcpy(jobs[i].target + at.target + done, source + at.source + done, left < kPiece ? left : kPiece);
      }
    }
  }
}

// Copies every tensor's part for each of `count` receivers into its slot; a receiver without a slot gets nothing.
void copy_tensors(Context* c, const int* ready, char* const* slots, int count) {
  for (int tensor = 0; tensor < c->exchange.tensors; ++tensor) {
    Job jobs[sp::kMaxWorld];
    int used = 0;
    for (int i = 0; i < count; ++i) {
      if (slots[i] == nullptr) continue;
      const sp::Copy copy =
          sp::copy_between(c->exchange, c->rank, ready[i], tensor, c->source_batch[tensor], c->source_token[tensor]);
      // rows of a gather belong to one receiver each
      if (c->exchange.kind == sp::kGatherHeads) {
        const Job job = {sp::merged(copy), slots[i]};
        copy_rows(&job, 1, c->sources[tensor]);
      } else {
        jobs[used++] = {copy, slots[i]};
      }
    }
    if (c->exchange.kind == sp::kAllGather)
      for (int i = 0; i < used; ++i) jobs[i].copy = sp::merged(jobs[i].copy);
    if (used > 0) copy_rows(jobs, used, c->sources[tensor]);
  }
}

// Writes to every rank that has granted a slot. Returns kDone if all have been served.
int push(Context* c) {
  int ready[sp::kMaxWorld], count = 0, status = kDone;
  char* slots[sp::kMaxWorld];
  for (int i = 1; i <= c->world; ++i) {
    const int to = (c->rank + i) % c->world;  // ranks start with different receivers
    if (c->sent[to]) continue;
    Peer& peer = c->peers[to];
    const uint64_t need = sp::slot_bytes(c->exchange, to);
    const Grant* grant = need > 0 ? find_grant(peer.header, c->epoch, need) : nullptr;
    if (need > 0 && grant == nullptr) {
      status = kWaiting;
      continue;
    }
    slots[count] = nullptr;
    if (grant != nullptr) {
      const uint64_t offset = grant->offset;  // mapping more of the file may move the grant
      if (!ensure_mapped(peer, offset + need)) {
        c->culprit = to;
        return kNoMemory;
      }
      slots[count] = peer.base + offset;
    }
    ready[count++] = to;
  }
  if (count == 0) return status;
  copy_tensors(c, ready, slots, count);
  for (int i = 0; i < count; ++i) {
    Header* header = c->peers[ready[i]].header;
    c->sent[ready[i]] = true;
    header->arrived[c->rank].epoch.store(c->epoch, std::memory_order_release);
    if (ready[i] != c->rank) ring_bell(header, false);
  }
  return status;
}

// Looks at everybody; `missing` becomes the number of ranks that have not arrived, at least 1 while anything is unsent.
int survey(Context* c, uint32_t* missing) {
  *missing = 0;
  const char* mine = own(c)->signature[c->epoch % kEpochs];
  bool unsent = false;
  int failed = -1;
  for (int r = 0; r < c->world; ++r) {
    Header* header = c->peers[r].header;
    const bool arrived = own(c)->arrived[r].epoch.load(std::memory_order_acquire) >= c->epoch;
    // who has entered has told what it brings; a rank of another shape may never be able to arrive
    if (arrived || header->entered.load(std::memory_order_acquire) >= c->epoch) {
      if (memcmp(header->signature[c->epoch % kEpochs], mine, kSignatureBytes) != 0) {
        c->culprit = r;
        return kMismatch;
      }
    }
    const uint32_t state = header->state.load(std::memory_order_acquire);
    if (state == kFailed || (state == kClosed && (!arrived || !c->sent[r]))) failed = r;
    *missing += !arrived;
    unsent |= !c->sent[r];
  }
  if (*missing == 0 && unsent) *missing = 1;
  if (*missing == 0) return kDone;
  if (failed < 0) return kWaiting;
  c->culprit = failed;
  return kPeerFailed;
}

}  // namespace

extern "C" {

int sp_header_bytes() { return sizeof(Header); }

// Writes a fresh header into the start of an own shared file that is mapped at `base`.
void sp_prepare(void* base, int rank, int world, uint64_t nonce) {
  Header* header = new (base) Header();
  header->rank = rank;
  header->world = world;
  header->nonce = nonce;
  header->magic = kMagic;
}

// Maps the files of all ranks (`files` may be closed afterwards), or takes their mappings where `bases` is given.
// Returns null, with the rank at fault in `culprit`, if a file cannot be mapped or is not that rank's.
Context* sp_join(int rank, int world, uint64_t nonce, const int* files, void* const* bases, uint64_t mapped, int* culprit) {
  Context* c = new Context();
  c->rank = rank;
  c->world = world;
  for (int r = 0; r < world; ++r) {
    void* base = bases ? bases[r] : mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, files[r], 0);
    Header* header = static_cast<Header*>(base);
    const bool usable =
        base != MAP_FAILED && header->magic == kMagic && header->nonce == nonce && header->rank == r && header->world == world;
    c->peers[r] = {header, static_cast<char*>(base), mapped, bases != nullptr};
    if (usable) continue;
    *culprit = r;
    for (int other = 0; other <= r; ++other)
      if (!bases && c->peers[other].base != MAP_FAILED) munmap(c->peers[other].base, mapped);
    delete c;
    return nullptr;
  }
  return c;
}

// Ends the membership; others read `message` if they still wait for this rank. `failed` ends their exchange in any case.
void sp_tell(Context* c, int failed, const char* message) {
  Header* header = own(c);
  if (header->state.load() != kOpen) return;
  strncpy(header->message, message, kMessageBytes - 1);
  header->state.store(failed ? kFailed : kClosed);
  for (int r = 0; r < c->world; ++r) ring_bell(c->peers[r].header, true);
}

void sp_leave(Context* c) {
  for (int r = 0; r < c->world; ++r)
    if (!c->peers[r].fixed) munmap(c->peers[r].base, c->peers[r].mapped);
  delete c;
}

// Lets everybody write `capacity` bytes at `offset` of the own file in exchange `epoch`.
void sp_grant(Context* c, uint64_t epoch, int second, uint64_t offset, uint64_t capacity) {
  Grant& grant = own(c)->grants[epoch % kEpochs][second];
  grant.offset = offset;
  grant.capacity = capacity;
  grant.epoch.store(epoch, std::memory_order_release);
  if (!second) return;  // nobody can wait for a slot that was granted ahead
  for (int r = 0; r < c->world; ++r)
    if (r != c->rank) ring_bell(c->peers[r].header, false);
}

// Begins an exchange. Sources must stay valid until sp_advance returns something other than kWaiting.
void sp_start(Context* c, uint64_t epoch, const sp::Exchange* exchange, const char* signature, void* const* sources,
              const int64_t* source_batch, const int64_t* source_token) {
  c->epoch = epoch;
  c->exchange = *exchange;
  memset(c->sent, 0, sizeof(c->sent));
  for (int i = 0; i < exchange->tensors; ++i) {
    c->sources[i] = static_cast<const char*>(sources[i]);
    c->source_batch[i] = source_batch[i];
    c->source_token[i] = source_token[i];
  }
  Header* header = own(c);
  strncpy(header->signature[epoch % kEpochs], signature, kSignatureBytes - 1);
  header->entered.store(epoch, std::memory_order_release);
}

// Moves the exchange on for at most `milliseconds`. Returns a Status.
int sp_advance(Context* c, int milliseconds) {
  const int64_t deadline = now_nanoseconds() + milliseconds * int64_t{1000000};
  for (;;) {
    const uint32_t seen = own(c)->bell.load();
    const int pushed = push(c);
    if (pushed == kNoMemory) return kNoMemory;
    uint32_t missing;
    const int status = survey(c, &missing);
    if (status != kWaiting) return status;
    const int64_t left = deadline - now_nanoseconds();
    // a sender that waits for a slot must see every ring; one that waits for arrivals only the last
    if (left <= 0 || !wait_for_bell(own(c), seen, pushed == kDone ? missing : 1, left)) return kWaiting;
  }
}

// Bit r: rank r has not arrived, or has not granted a slot.
uint32_t sp_late(Context* c) {
  uint32_t late = 0;
  for (int r = 0; r < c->world; ++r)
    if (own(c)->arrived[r].epoch.load(std::memory_order_acquire) < c->epoch || !c->sent[r]) late |= 1u << r;
  return late & ~(1u << c->rank);
}

int sp_culprit(Context* c) { return c->culprit; }
const char* sp_signature(Context* c, int rank) { return c->peers[rank].header->signature[c->epoch % kEpochs]; }
const char* sp_message(Context* c, int rank) { return c->peers[rank].header->message; }

}  // extern "C"
