// Every kernel of csrc/cpu, in every instruction set that this machine has, on memory of the exact
// size: run under the address and undefined-behaviour sanitizers. The instruction sets must agree.
#include "../../csrc/cpu/kernels.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

using namespace stars::cpu;

namespace {

constexpr int64_t kPart = 2;  // rows of a part: an odd count of rows leaves one that is not full

// Memory of its own for every operand, so that one entry too far is seen.
class Memory {
 public:
  explicit Memory(Type type) : type_(type), random_(1) {}

  size_t entry(bool computing) const {
    return type_ == Type::f64 ? 8 : type_ == Type::f32 || computing ? 4 : 2;
  }

  void* take(int64_t count, bool computing) {
    blocks_.push_back({std::vector<char>(count * entry(computing)), computing});
    std::vector<char>& block = blocks_.back().bytes;
    for (int64_t i = 0; i < count; ++i) set(block.data(), i, computing, normal_(random_));
    return block.data();
  }

  void* computing(int64_t count) { return take(count, true); }

  // The second half, where there is one, follows the first.
  Rows rows(int64_t count, int64_t width, bool dual) {
    return {take(count * width * (dual ? 2 : 1), false), width, dual ? count * width : 0};
  }

  std::vector<double> values() const {
    std::vector<double> all;
    for (const Block& block : blocks_) {
      const int64_t count = block.bytes.size() / entry(block.computing);
      for (int64_t i = 0; i < count; ++i) all.push_back(get(block.bytes.data(), i, block.computing));
    }
    return all;
  }

 private:
  struct Block {
    std::vector<char> bytes;
    bool computing;
  };

  void set(char* data, int64_t i, bool computing, float value) {
    const double wide = value;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t high = bits >> 16;
    const size_t size = entry(computing);
    const void* from = size == 8 ? static_cast<const void*>(&wide)
                       : size == 4 ? static_cast<const void*>(&value) : &high;
    std::memcpy(data + i * size, from, size);
  }

  double get(const char* data, int64_t i, bool computing) const {
    const size_t size = entry(computing);
    if (size == 8) {
      double value;
      std::memcpy(&value, data + 8 * i, 8);
      return value;
    }
    uint32_t bits = 0;
    if (size == 4) {
      std::memcpy(&bits, data + 4 * i, 4);
    } else {
      uint16_t high;
      std::memcpy(&high, data + 2 * i, 2);
      bits = static_cast<uint32_t>(high) << 16;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

  Type type_;
  std::mt19937 random_;
  std::uniform_real_distribution<float> normal_{0.5f, 2.0f};  // in the domain of log and sqrt too
  std::vector<Block> blocks_;
};

template <class Args>
void run(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t count,
         int64_t part = kPart) {
  for (int64_t i = 0; i < count; i += part) kernel(args, i, i + part < count ? i + part : count);
}

std::vector<double> everything(const Kernels& k, Type type, bool dual, int64_t count, int64_t width) {
  Memory m(type);
  const Call call{type, dual, width};
  const auto rows = [&] { return m.rows(count, width, dual); };
  const auto table = [&] { return m.computing(width); };
  const int64_t parts = (count + kPart - 1) / kPart;
  const auto partials = [&] { return m.computing(parts * width); };
  for (bool flag : {false, true}) {
    run(k.norm, Norm{call, rows(), rows(), table(), table(), 1e-5, flag}, count);
    NormBackward norm{call, rows(), rows(), rows(), table(), partials(), partials(), 1e-5, flag, kPart};
    run(k.norm_backward, norm, count);
    norm.weight_bar = norm.bias_bar = nullptr;
    run(k.norm_backward, norm, count);
    run(k.sandwich,
        Sandwich{call, rows(), rows(), rows(), rows(), flag ? table() : nullptr, table(), 1e-5, 1e-6},
        count);
    const SandwichBackward sandwich{call, rows(), rows(), rows(), rows(), rows(), rows(),
                                    flag ? table() : nullptr, table(), partials(), partials(),
                                    1e-5, 1e-6, kPart};
    run(k.sandwich_backward, sandwich, count);
    run(k.fold, Fold{call, sandwich.in_bar, table(), parts}, width, 3);
    run(k.rotary,
        Rotary{{type, false, 2 * width}, m.take(count * 6 * width, false),
               m.take(count * 6 * width, false), m.computing(2 * width * count),
               m.computing(2 * width * count), 1, 3, count, 0, 0, count * 2 * width, 2 * width,
               2 * width * count, flag},
        count);
  }
  const int64_t elements = count * width;
  for (int f = 0; f <= static_cast<int>(Function::reciprocal_result); ++f) {
    const Function function = static_cast<Function>(f);
    run(k.pointwise, Pointwise{call, rows(), rows(), function}, elements, 5);
    run(k.pointwise_backward, PointwiseBackward{call, rows(), rows(), rows(), function}, elements, 5);
    if (function > Function::identity) continue;
    run(k.gated, Gated{call, rows(), rows(), rows(), function}, elements, 5);
    run(k.gated_backward, GatedBackward{call, rows(), rows(), rows(), rows(), rows(), function},
        elements, 5);
  }
  run(k.softmax, Softmax{call, rows(), rows()}, count);
  run(k.softmax_backward, SoftmaxBackward{call, rows(), rows(), rows()}, count);
  run(k.row_squares, RowSquares{call, rows(), m.computing(count)}, count);
  run(k.row_squares_backward, RowSquaresBackward{call, m.computing(count), rows(), rows()}, count);
  // Spans that are empty, partial, whole, and beyond the row on both sides.
  std::vector<int32_t> bounds;
  for (int32_t i = 0; i < count; ++i) {
    bounds.push_back(i - 2);
    bounds.push_back(i % 2 ? i : static_cast<int32_t>(width) + 1);
  }
  const Spans spans{bounds.data(), 0, 1, count};
  const auto half = [&] { return m.rows(count, width, false); };
  run(k.attention_weights, AttentionWeights{call, half(), half(), spans}, count);
  run(k.attention_weights_backward,
      AttentionWeightsBackward{call, half(), half(), half(), half(), spans}, count);
  return m.values();
}

}  // namespace

int main() {
  const InstructionSets sets = instruction_sets();
  int compared = 0;
  for (Type type : {Type::f32, Type::bf16, Type::f64})
    for (bool dual : {false, true})
      for (int64_t count : {1, 5})
        for (int64_t width : {1, 3, 17, 64}) {
          const std::vector<double> base = everything(*sets.kernels[0], type, dual, count, width);
          for (int set = 0; set < sets.count; ++set) {
            const std::vector<double> got = everything(*sets.kernels[set], type, dual, count, width);
            const double tolerance = type == Type::f64 ? 1e-9 : type == Type::f32 ? 1e-3 : 2e-2;
            for (size_t i = 0; i < base.size(); ++i, ++compared) {
              const double size = 1 + std::fabs(base[i]);
              if (!(std::fabs(got[i] - base[i]) <= tolerance * size)) {
                std::printf("%s differs: entry %zu, width %d: %g, %g\n", sets.kernels[set]->name, i,
                            static_cast<int>(width), got[i], base[i]);
                return 1;
              }
            }
          }
        }
  for (int set = 0; set < sets.count; ++set) std::printf("%s ", sets.kernels[set]->name);
  std::printf("%d\n", compared);
  return 0;
}
