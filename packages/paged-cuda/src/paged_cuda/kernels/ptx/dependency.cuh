// Programmatic dependent launch (sm_90 and later; nothing elsewhere).
//
// Every thread that touches a shared buffer waits first. And a kernel has a block that waits before it ends, or the order would not carry
// over to the kernel after the next: that one waits until all blocks of this kernel have ended.

__device__ __forceinline__ void wait_for_previous_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For a block with nothing to do, once the kernels before this one are complete: long enough for the next kernel's blocks, one of which fits
// beside each of this kernel's, to find their places. If it left at once, several of them would share its multiprocessor while others have
// none. Where registers are shared out like that: on Hopper.
__device__ __forceinline__ void hold_place() {
#if __CUDA_ARCH__ == 900
  asm volatile("nanosleep.u32 2000;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
