// How long bytes stay in the L2 cache (sm_80 and later): a policy that a load or a store takes along.
//
// For loads none is not the same as the usual one: decode takes 2 to 3 % longer when its keys come with `evict_normal`. For stores it is.
#include "layout/types.cuh"

// They go before whatever else is there.
__device__ __forceinline__ u64 leaving_first() {
  u64 goes;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(goes));
  return goes;
}

// For what the next kernel reads and the next layer writes to the same place: if it `stays`, the keys of a layer do not drive it out to memory
// in between. Only where it is little.
__device__ __forceinline__ u64 staying_if(bool stays) {
  u64 last, usual;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(usual));
  return stays ? last : usual;
}

// All four at once: the compiler would split a plain store where registers are short.
__device__ __forceinline__ void store_words(u32* at, u64 policy, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"((u64)at), "r"(a), "r"(b), "r"(c), "r"(d), "l"(policy)
               : "memory");
}
