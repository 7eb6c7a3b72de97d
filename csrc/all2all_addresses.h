// Where every byte of a head exchange goes. Pure arithmetic: no torch, no CUDA runtime.
//
// Shape legend: B batch, T all tokens, t one rank's tokens, H all heads, h one rank's heads. A head is `head_bytes`
// bytes; element types do not matter to data movement. The receive slot of a rank holds its output tensors one after
// the other, each starting at a multiple of kAlign. Everything is in bytes and in 64-bit integers.
//
// sp_core/comm/native/addresses.py is the same arithmetic in Python. tests/oracles/addresses.py tells the rest another way;
// tests compare all three.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define SP_INLINE __host__ __device__ __forceinline__
#else
#define SP_INLINE inline
#endif

namespace sp {

constexpr int kMaxWorld = 16;
constexpr int64_t kAlign = 256;  // also what cudaMalloc promises, so 16-byte vectors stay possible for every tensor

enum Kind : int32_t {
  kScatterHeads = 0,  // (B, t, H, D) on every rank becomes (B, T, h, D)
  kGatherHeads = 1,   // (B, T, h, D) becomes (B, t, H, D)
  kAllGather = 2,     // (B, t, H, D) becomes (B, T, H, D) on every rank
};

// What every rank knows without asking another one.
struct Exchange {
  int32_t kind, world, tensors, reserved;
  int64_t batch, heads, head_bytes;
  int64_t token_counts[kMaxWorld], head_counts[kMaxWorld];
};

// All that one rank sends to another for one tensor: batch x tokens runs of run_bytes contiguous bytes.
struct Copy {
  int64_t batch, tokens, run_bytes;
  int64_t source, source_batch, source_token;  // start and strides in the sender's tensor
  int64_t target, target_batch, target_token;  // start and strides in the receiver's slot
};

struct Row {
  int64_t source, target;
};

struct Place {
  int32_t rank;
  int64_t offset;
};

struct Share {
  int32_t peer, index, count;  // this block is number `index` of the `count` blocks that serve `peer`
};

SP_INLINE int64_t token_start(const Exchange& x, int rank) {
  int64_t start = 0;
  for (int r = 0; r < rank; ++r) start += x.token_counts[r];
  return start;
}

SP_INLINE int64_t heads_of(const Exchange& x, int rank) { return x.head_counts[rank]; }

SP_INLINE int64_t head_start(const Exchange& x, int rank) {
  int64_t start = 0;
  for (int r = 0; r < rank; ++r) start += x.head_counts[r];
  return start;
}

SP_INLINE int head_owner(const Exchange& x, int64_t head) {
  int rank = 0;
  while (head >= x.head_counts[rank]) head -= x.head_counts[rank++];
  return rank;
}

SP_INLINE int64_t output_bytes(const Exchange& x, int rank) {
  const int64_t tokens = x.kind == kGatherHeads ? x.token_counts[rank] : token_start(x, x.world);
  const int64_t heads = x.kind == kScatterHeads ? heads_of(x, rank) : x.heads;
  return x.batch * tokens * heads * x.head_bytes;
}

SP_INLINE int64_t tensor_stride(const Exchange& x, int rank) { return (output_bytes(x, rank) + kAlign - 1) / kAlign * kAlign; }

SP_INLINE int64_t slot_bytes(const Exchange& x, int rank) { return x.tensors * tensor_stride(x, rank); }

// `source_batch` and `source_token` are the strides of the sender's tensor, whose heads lie contiguous in a token.
SP_INLINE Copy copy_between(const Exchange& x, int from, int to, int tensor, int64_t source_batch, int64_t source_token) {
  Copy c;
  const int64_t slot = tensor * tensor_stride(x, to);
  c.batch = x.batch;
  c.source_batch = source_batch;
  c.source_token = source_token;
  if (x.kind == kGatherHeads) {
    c.tokens = x.token_counts[to];
    c.run_bytes = heads_of(x, from) * x.head_bytes;
    c.source = token_start(x, to) * source_token;
    c.target_token = x.heads * x.head_bytes;
    c.target_batch = c.tokens * c.target_token;
    c.target = slot + head_start(x, from) * x.head_bytes;
    return c;
  }
  const bool scatter = x.kind == kScatterHeads;
  c.tokens = x.token_counts[from];
  c.run_bytes = (scatter ? heads_of(x, to) : x.heads) * x.head_bytes;
  c.source = scatter ? head_start(x, to) * x.head_bytes : 0;
  c.target_token = c.run_bytes;
  c.target_batch = token_start(x, x.world) * c.run_bytes;
  c.target = slot + token_start(x, from) * c.run_bytes;
  return c;
}

// Where one head of one token of `from` lands; `to` only matters for an all-gather, which sends it everywhere.
// `token` and `head` count inside the sender's tensor.
SP_INLINE Place place_of(const Exchange& x, int from, int to, int tensor, int64_t b, int64_t token, int64_t head) {
  Place p;
  int64_t tokens, heads, at_token, at_head;
  if (x.kind == kGatherHeads) {
    p.rank = 0;
    int64_t first = 0;
    while (token >= first + x.token_counts[p.rank]) first += x.token_counts[p.rank++];
    tokens = x.token_counts[p.rank], heads = x.heads;
    at_token = token - first, at_head = head_start(x, from) + head;
  } else {
    p.rank = x.kind == kScatterHeads ? head_owner(x, head) : to;
    tokens = token_start(x, x.world), at_token = token_start(x, from) + token;
    heads = x.kind == kScatterHeads ? heads_of(x, p.rank) : x.heads;
    at_head = x.kind == kScatterHeads ? head - head_start(x, p.rank) : head;
  }
  p.offset = tensor * tensor_stride(x, p.rank) + ((b * tokens + at_token) * heads + at_head) * x.head_bytes;
  return p;
}

SP_INLINE Row row_at(const Copy& c, int64_t row) {
  const int64_t b = c.batch == 1 ? 0 : row / c.tokens, token = row - b * c.tokens;
  return {c.source + b * c.source_batch + token * c.source_token, c.target + b * c.target_batch + token * c.target_token};
}

// Tokens that follow each other without a gap on both sides are one long run: what a CPU wants, and a copy engine.
SP_INLINE Copy merged(Copy c) {
  if (c.tokens > 0 && c.source_token == c.run_bytes && c.target_token == c.run_bytes) {
    c.run_bytes *= c.tokens;
    c.tokens = 1;
  }
  return c;
}

// The widest access, 1 to 16 bytes, that all runs of a copy allow; strides over one item do not count.
SP_INLINE int vector_bytes(const Copy& c, uint64_t source_address, uint64_t target_address) {
  uint64_t bits = 16 | c.run_bytes | (source_address + c.source) | (target_address + c.target);
  if (c.tokens > 1) bits |= c.source_token | c.target_token;
  if (c.batch > 1) bits |= c.source_batch | c.target_batch;
  return static_cast<int>(bits & (~bits + 1));
}

// Blocks rotate over destinations, starting behind the own rank so that no receiver is everybody's first.
SP_INLINE Share block_share(int block, int blocks, int world, int rank) {
  const int lane = block % world;
  return {(lane + rank + 1) % world, block / world, blocks / world + (lane < blocks % world ? 1 : 0)};
}

// How many blocks of `from` serve `to`: what the receiver waits for.
SP_INLINE int blocks_serving(int blocks, int world, int from, int to) {
  const int lane = (to - from - 1 + 2 * world) % world;
  return blocks / world + (lane < blocks % world ? 1 : 0);
}

}  // namespace sp
