// Where kernels for several instruction sets are compiled and one is chosen at run time. Elsewhere
// (aarch64, or x86-64 with clang, which has other pragmas) the compiler's own target serves.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define STARS_DISPATCH
#endif
