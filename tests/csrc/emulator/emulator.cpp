// The launchers of csrc/cuda for ctypes.
#include "launch.h"

using namespace stars::cuda;

extern "C" {

void emulate_device(int multiprocessors, bool backwards) {
  emulator::multiprocessors = multiprocessors;
  emulator::backwards = backwards;
}

int64_t emulate_partial_rows(int64_t rows) { return partial_rows(rows); }

int emulate_norm(const NormArgs* p, Type type, bool dual) { return norm(*p, type, dual, nullptr); }

int emulate_norm_backward(const NormBackwardArgs* p, Type type, bool dual) {
  return norm_backward(*p, type, dual, nullptr);
}

int emulate_sandwich(const SandwichArgs* p, Type type, bool dual) {
  return sandwich(*p, type, dual, nullptr);
}

int emulate_sandwich_backward(const SandwichBackwardArgs* p, Type type, bool dual) {
  return sandwich_backward(*p, type, dual, nullptr);
}

}  // extern "C"
