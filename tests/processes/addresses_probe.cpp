// Makes csrc/all2all_addresses.h callable from the test of its arithmetic.
#include "all2all_addresses.h"

extern "C" {

void probe_copy(const sp::Exchange* x, int from, int to, int tensor, int64_t batch, int64_t token, int merge, sp::Copy* copy) {
  *copy = sp::copy_between(*x, from, to, tensor, batch, token);
  if (merge) *copy = sp::merged(*copy);
}

void probe_sizes(const sp::Exchange* x, int rank, int64_t* sizes) {
  sizes[0] = sp::output_bytes(*x, rank);
  sizes[1] = sp::tensor_stride(*x, rank);
  sizes[2] = sp::slot_bytes(*x, rank);
}

int probe_place(const sp::Exchange* x, int from, int to, int tensor, int64_t b, int64_t token, int64_t head, int64_t* offset) {
  const sp::Place place = sp::place_of(*x, from, to, tensor, b, token, head);
  *offset = place.offset;
  return place.rank;
}

void probe_row(const sp::Copy* copy, int64_t row, sp::Row* at) { *at = sp::row_at(*copy, row); }

int probe_vector(const sp::Copy* copy, uint64_t source, uint64_t target) { return sp::vector_bytes(*copy, source, target); }

void probe_share(int block, int blocks, int world, int rank, sp::Share* share) { *share = sp::block_share(block, blocks, world, rank); }

int probe_serving(int blocks, int world, int from, int to) { return sp::blocks_serving(blocks, world, from, to); }

}  // extern "C"
