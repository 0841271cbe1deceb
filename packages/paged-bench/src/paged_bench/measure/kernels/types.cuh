// Names of the integer types; NVRTC brings no headers, and none are wanted.
#pragma once
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
