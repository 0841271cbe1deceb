// How long bytes stay in the L2 cache (sm_80 and later): a policy that a load or a store takes along.
#include "layout/types.cuh"

// For keys. `first`: they go before whatever else is there.
__device__ __forceinline__ u64 key_policy(bool first) {
  u64 goes, usual;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(goes));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(usual));
  return first ? goes : usual;
}

// For partials. `last`: they stay, as the combine kernel reads them next, and the next layer writes to the same place; else each layer's keys
// would drive those of the layer before out to memory. Only where they are few.
__device__ __forceinline__ u64 partial_policy(bool last) {
  u64 stays, usual;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(stays));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(usual));
  return last ? stays : usual;
}
