// NCCL: a rank hears only itself, so each process goes on alone, and what it receives is its own data.
// Its header is not used: it needs nv/target, which is in no wheel of some PyTorch builds.
#include <cstring>

#include "shared.h"

struct UniqueId {
  char bytes[128];
};
struct Communicator {
  int ranks, rank;
};
static int make(Communicator** made, int ranks, int rank) {
  *made = new Communicator{ranks, rank};
  return 0;
}
API int ncclGetUniqueId(UniqueId* id) {
  memset(id, 7, sizeof *id);
  return 0;
}
API int ncclCommInitRank(Communicator** made, int ranks, UniqueId, int rank) { return make(made, ranks, rank); }
API int ncclCommInitRankConfig(Communicator** made, int ranks, UniqueId, int rank, void*) {
  return make(made, ranks, rank);
}
API int ncclCommInitRankScalable(Communicator** made, int ranks, int rank, int, UniqueId*, void*) {
  return make(made, ranks, rank);
}
// How many ranks share the color is not known here: a group of all ranks is assumed.
API int ncclCommSplit(Communicator* parent, int, int, Communicator** made, void*) {
  return make(made, parent->ranks, parent->rank);
}
API int ncclCommDestroy(Communicator* communicator) {
  delete communicator;
  return 0;
}
API int ncclCommAbort(Communicator* communicator) { return ncclCommDestroy(communicator); }
API int ncclCommGetAsyncError(Communicator*, int* error) {
  *error = 0;
  return 0;
}
API int ncclCommCount(Communicator* communicator, int* count) {
  *count = communicator->ranks;
  return 0;
}
API int ncclCommUserRank(Communicator* communicator, int* rank) {
  *rank = communicator->rank;
  return 0;
}

// By the numbers of ncclDataType_t: int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16,
// and two float8.
static size_t bytes_of(int type) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return bytes[type];
}
static int pass_on(const void* from, void* to, size_t count, int type) {
  size_t bytes = count * bytes_of(type);
  if (to && to != from) memmove(to, from, bytes);
  return 0;
}
API int ncclAllReduce(const void* from, void* to, size_t count, int type) { return pass_on(from, to, count, type); }
API int ncclReduce(const void* from, void* to, size_t count, int type) { return pass_on(from, to, count, type); }
API int ncclReduceScatter(const void* from, void* to, size_t count, int type) {
  return pass_on(from, to, count, type);
}
API int ncclAllGather(const void* from, void* to, size_t count, int type, Communicator* communicator) {
  for (int rank = 0; rank < communicator->ranks; ++rank) {
    pass_on(from, (char*)to + rank * count * bytes_of(type), count, type);
  }
  return 0;
}
