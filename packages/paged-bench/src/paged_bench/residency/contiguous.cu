// Attention over a contiguous cache: one sequence, key and value in buffers of their own, any token and head stride.
//
// The residency report needs it to read head-major and sequence-major caches alike; the operator's layouts are
// paged. One block serves one KV head: it writes the new rows, then attends for each query head of its group. Past
// and count come from device memory, the addresses from the launch: a captured graph follows a growing sequence for
// as long as its cache stays where it is.
typedef unsigned short u16;
typedef long long i64;

struct Params {
  const float* query;  // (tokens, heads, HEAD_SIZE)
  const u16* key;      // (tokens, kv_heads, HEAD_SIZE) float16, rotated
  const u16* value;    // (tokens, kv_heads, HEAD_SIZE) float16
  u16* key_cache;
  u16* value_cache;
  float* output;      // (tokens, heads, HEAD_SIZE)
  const int* extent;  // {cached tokens, new tokens}
  i64 token_stride;   // elements
  i64 head_stride;    // elements
  int group;          // query heads of a KV head
  float scale;
};

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ float widen(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ float block_reduce(float value, float* partial, bool sum) {
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, value, step);
    value = sum ? value + other : fmaxf(value, other);
  }
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = partial[0];
  for (int warp = 1; warp < kWarps; warp++) value = sum ? value + partial[warp] : fmaxf(value, partial[warp]);
  __syncthreads();
  return value;
}

extern "C" __global__ void __launch_bounds__(kThreads) contiguous_decode(const __grid_constant__ Params p) {
  __shared__ float query[HEAD_SIZE], weight[kThreads], partial[kWarps];
  const int thread = threadIdx.x, kv_head = blockIdx.x, past = p.extent[0], tokens = p.extent[1];
  const u16* keys = p.key_cache + kv_head * p.head_stride;
  const u16* values = p.value_cache + kv_head * p.head_stride;
  for (int i = thread; i < tokens * HEAD_SIZE; i += kThreads) {
    const int token = i / HEAD_SIZE, channel = i % HEAD_SIZE;
    const i64 to = kv_head * p.head_stride + (past + token) * p.token_stride + channel;
    const int from = (token * gridDim.x + kv_head) * HEAD_SIZE + channel;
    p.key_cache[to] = p.key[from];
    p.value_cache[to] = p.value[from];
  }
  __syncthreads();
  for (int item = 0; item < tokens * p.group; item++) {
    const int token = item / p.group, length = past + token + 1;
    const i64 row = ((i64)token * gridDim.x * p.group + kv_head * p.group + item % p.group) * HEAD_SIZE;
    if (thread < HEAD_SIZE) query[thread] = p.query[row + thread] * p.scale;
    __syncthreads();
    float best = __int_as_float(0xff800000), total = 0.0f, sum = 0.0f;
    for (int first = 0; first < length; first += kThreads) {
      const int position = first + thread;
      float logit = __int_as_float(0xff800000);
      if (position < length) {
        logit = 0.0f;
        for (int c = 0; c < HEAD_SIZE; c++) logit += query[c] * widen(keys[position * p.token_stride + c]);
      }
      const float highest = fmaxf(best, block_reduce(logit, partial, false));
      const float rescale = __expf(best - highest);
      weight[thread] = __expf(logit - highest);
      total = total * rescale + block_reduce(weight[thread], partial, true);
      best = highest;
      if (thread < HEAD_SIZE) {
        sum *= rescale;
        const int count = min(kThreads, length - first);
        for (int k = 0; k < count; k++) sum += weight[k] * widen(values[(first + k) * p.token_stride + thread]);
      }
      __syncthreads();
    }
    if (thread < HEAD_SIZE) p.output[row + thread] = sum / total;
    __syncthreads();
  }
}
