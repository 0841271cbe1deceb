// A CUDA runtime without a device: memory is host memory, kernels do not run, everything succeeds.
// It lets the host code of ORT's real CUDA provider decide on a machine that has no GPU.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <driver_types.h>

struct extent {
    unsigned x, y, z;
};

static struct extent grid_, block_;
static size_t shared_;
static void *stream_;
static void *registration[8];

static int capability(void) {
    const char *given = getenv("FAKE_SM");
    return given ? atoi(given) : 90;
}

static int launch(struct extent grid, struct extent block, size_t shared) {
    int empty = !grid.x || !grid.y || !grid.z || !block.x;
    if (empty || block.x * block.y * block.z > 1024) return cudaErrorInvalidConfiguration;
    return shared > 232448 ? cudaErrorInvalidValue : cudaSuccess;
}

int cudaGetDeviceCount(int *count) { return *count = 1, 0; }
int cudaGetDevice(int *device) { return *device = 0, 0; }
int cudaDriverGetVersion(int *version) { return *version = 13000, 0; }
int cudaRuntimeGetVersion(int *version) { return *version = 13000, 0; }

int cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "no device");
    p->totalGlobalMem = (size_t)16 << 30;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 232448;
    p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = capability() / 10;
    p->minor = capability() % 10;
    p->multiProcessorCount = 132;
    p->maxThreadsPerMultiProcessor = 2048;
    return 0;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
        case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
        default: *value = 1;
    }
    return 0;
}

int cudaMalloc(void **p, size_t bytes) {
    *p = aligned_alloc(256, (bytes + 511) / 256 * 256);
    return 0;
}
int cudaMallocHost(void **p, size_t bytes) { return cudaMalloc(p, bytes); }
int cudaHostAlloc(void **p, size_t bytes, unsigned flags) { return cudaMalloc(p, bytes); }
int cudaMallocFromPoolAsync(void **p, size_t bytes, void *pool, void *stream) { return cudaMalloc(p, bytes); }
int cudaFree(void *p) { return free(p), 0; }
int cudaFreeHost(void *p) { return free(p), 0; }
int cudaFreeAsync(void *p, void *stream) { return free(p), 0; }
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { return memcpy(to, from, bytes), 0; }
int cudaMemset(void *p, int value, size_t bytes) { return memset(p, value, bytes), 0; }
int cudaMemsetAsync(void *p, int value, size_t bytes, void *stream) { return memset(p, value, bytes), 0; }
int cudaMemGetInfo(size_t *free_, size_t *total) { return *free_ = (size_t)8 << 30, *total = (size_t)16 << 30, 0; }

// What the host reads back was computed by kernels that did not run: give it lengths that make sense.
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    if (kind != cudaMemcpyDeviceToHost || bytes > 4096) return memcpy(to, from, bytes), 0;
    for (size_t i = 0; i + 4 <= bytes; i += 4) ((int *)to)[i / 4] = 23;
    return 0;
}

// XQA reads its shared-memory size from a symbol.
int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t bytes, size_t offset, int kind) {
    memset(to, 0, bytes);
    if (bytes == 4) *(int *)to = 65536;
    return 0;
}

int cudaStreamCreate(void **stream) { return *stream = registration, 0; }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return *stream = registration, 0; }
int cudaStreamIsCapturing(void *stream, int *status) { return *status = 0, 0; }
int cudaEventCreate(void **event) { return *event = registration, 0; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return *event = registration, 0; }
int cudaEventElapsedTime(float *ms, void *start, void *end) { return *ms = 1, 0; }

int cudaFuncGetAttributes(struct cudaFuncAttributes *p, const void *function) {
    memset(p, 0, sizeof *p);
    p->maxThreadsPerBlock = 1024;
    p->numRegs = 64;
    return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count) { return *count = 1, 0; }
int cudaPointerGetAttributes(struct cudaPointerAttributes *p, const void *address) {
    memset(p, 0, sizeof *p);
    p->type = cudaMemoryTypeDevice;
    p->devicePointer = p->hostPointer = (void *)address;
    return 0;
}

unsigned __cudaPushCallConfiguration(struct extent grid, struct extent block, size_t shared, void *stream) {
    return grid_ = grid, block_ = block, shared_ = shared, stream_ = stream, 0;
}
int __cudaPopCallConfiguration(struct extent *grid, struct extent *block, size_t *shared, void **stream) {
    return *grid = grid_, *block = block_, *shared = shared_, *stream = stream_, 0;
}
int cudaLaunchKernel(const void *f, struct extent grid, struct extent block, void **args, size_t shared, void *s) {
    return launch(grid, block, shared);
}
int __cudaLaunchKernel(const void *f, struct extent grid, struct extent block, void **args, size_t shared, void *s) {
    return launch(grid, block, shared);
}
int cudaLaunchCooperativeKernel(const void *f, struct extent grid, struct extent block, void **args, size_t shared,
                                void *s) {
    return launch(grid, block, shared);
}
int __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, 0; }
void **__cudaRegisterFatBinary(void *binary) { return registration; }
const char *cudaGetErrorName(int error) { return "an error of the fake runtime"; }
const char *cudaGetErrorString(int error) { return "an error of the fake runtime"; }
