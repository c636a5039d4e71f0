// CUDA on the CPU, as much of it as csrc/cuda uses: the threads of a block are fibers that take turns
// at barriers and shuffles, blocks run one after another. It checks indexing and synchronisation, not
// speed. `emulator::backwards` reverses the turns: results that depend on it lack a barrier.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, gridDim, blockDim;

enum cudaError_t { cudaSuccess = 0 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
using cudaStream_t = void*;

namespace emulator {

inline int multiprocessors = 2;
inline bool backwards = false;

struct Barrier {
  int size, arrived = 0, generation = 0;
};

class Block {
 public:
  static constexpr size_t kStack = 128 << 10;

  template <class Body>
  static void run(int threads, Body body) {
    Block block(threads);
    static Body* current;
    current = &body;
    static std::vector<char> stacks;
    if (stacks.size() < threads * kStack) stacks.resize(threads * kStack);
    for (int t = 0; t < threads; ++t) {
      ucontext_t& fiber = block.fibers_[t];
      getcontext(&fiber);
      fiber.uc_stack.ss_sp = &stacks[t * kStack];
      fiber.uc_stack.ss_size = kStack;
      fiber.uc_link = nullptr;
      makecontext(&fiber, +[] {
        (*current)();
        here->finish();
      }, 0);
    }
    here = &block;
    volatile bool ran = false;  // getcontext returns twice
    getcontext(&block.outside_);
    if (ran) return;
    ran = true;
    block.enter(backwards ? threads - 1 : 0);
  }

  void wait(Barrier& barrier) {
    const int generation = barrier.generation;
    if (++barrier.arrived == barrier.size) {
      barrier.arrived = 0;
      ++barrier.generation;
      idle_ = 0;
      return;
    }
    // A warp goes as far as it can before others do: writes that come too early then show.
    while (barrier.generation == generation) yield(&barrier == &all_ ? threads_ : 32);
  }

  Barrier& all() { return all_; }
  Barrier& warp() { return warps_[threadIdx.x / 32]; }
  float (&slots())[2][32] { return slots_[threadIdx.x / 32].values; }
  int& turn() { return turns_[threadIdx.x]; }

  static inline Block* here = nullptr;

 private:
  struct Place {
    jmp_buf buffer;
  };

  struct Slots {
    float values[2][32];
  };

  explicit Block(int threads)
      : threads_(threads), unfinished_(threads), fibers_(threads), places_(threads),
        started_(threads), done_(threads), turns_(threads),
        warps_((threads + 31) / 32), slots_((threads + 31) / 32), all_{threads} {
    for (size_t w = 0; w < warps_.size(); ++w) warps_[w].size = std::min(32, threads - 32 * int(w));
  }

  // The next thread that is not done, among the `size` around this one.
  int next(int thread, int size) const {
    const int first = thread / size * size;
    const int count = std::min(size, threads_ - first);
    do {
      thread = first + (thread - first + (backwards ? count - 1 : 1)) % count;
    } while (done_[thread]);
    return thread;
  }

  void yield(int size) {
    if (++idle_ > 2 * threads_) {
      std::fprintf(stderr, "runtime error: a barrier that not every thread reaches\n");
      std::abort();
    }
    const int self = threadIdx.x, other = next(self, size);
    if (other == self) return;
    if (_setjmp(places_[self].buffer) == 0) enter(other);
    threadIdx.x = self;
  }

  // setjmp, because swapcontext asks the kernel at every turn; it only starts fibers.
  void enter(int thread) {
    threadIdx.x = thread;
    if (started_[thread]) _longjmp(places_[thread].buffer, 1);
    started_[thread] = true;
    setcontext(&fibers_[thread]);
  }

  void finish() {
    done_[threadIdx.x] = true;
    idle_ = 0;
    if (--unfinished_ == 0) setcontext(&outside_);
    enter(next(threadIdx.x, threads_));
  }

  int threads_, unfinished_, idle_ = 0;
  std::vector<ucontext_t> fibers_;
  std::vector<Place> places_;
  std::vector<char> started_, done_;
  std::vector<int> turns_;
  std::vector<Barrier> warps_;
  std::vector<Slots> slots_;
  Barrier all_;
  ucontext_t outside_;
};

}  // namespace emulator

inline void __syncthreads() { emulator::Block::here->wait(emulator::Block::here->all()); }

inline float __shfl_xor_sync(unsigned, float value, int offset) {
  auto& block = *emulator::Block::here;
  const int lane = threadIdx.x % 32;
  const int turn = block.turn() ^= 1;  // two buffers, so that one barrier is enough
  block.slots()[turn][lane] = value;
  block.wait(block.warp());
  return block.slots()[turn][lane ^ offset];
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulator::multiprocessors;
  return cudaSuccess;
}

template <class Args>
cudaError_t cudaLaunchKernel(void (*kernel)(Args), dim3 blocks, dim3 threads, void** args, size_t,
                             cudaStream_t) {
  gridDim = blocks;
  blockDim = threads;
  for (unsigned y = 0; y < blocks.y; ++y) {
    for (unsigned x = 0; x < blocks.x; ++x) {
      blockIdx = dim3(x, y);
      emulator::Block::run(threads.x, [&] { kernel(*static_cast<Args*>(args[0])); });
    }
  }
  return cudaSuccess;
}
