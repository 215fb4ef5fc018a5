#include "sums.hpp"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && !defined(BATON_ONE_WIDTH)
// The loops are the same, so are their results: only the width differs.
#define BATON_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define BATON_WIDE
#endif

namespace baton {
namespace {

// Fits the first cache beside the pieces that it is made of.
constexpr std::size_t kBlock = 1024;

BATON_WIDE void add_float32(float* __restrict sum, const float* __restrict piece, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum[i] += piece[i];
}

BATON_WIDE void add_bfloat16(float* __restrict sum, const std::uint16_t* __restrict piece, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = std::uint32_t{piece[i]} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    sum[i] += value;
  }
}

BATON_WIDE void round_to_bfloat16(std::uint16_t* __restrict out, const float* __restrict sum, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, &sum[i], sizeof bits);
    const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    // Rounding would turn some NaNs into infinity.
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    out[i] = static_cast<std::uint16_t>(is_nan ? bits >> 16 | 0x40 : rounded);
  }
}

}  // namespace

std::size_t element_bytes(Element element) { return element == Element::float32 ? 4 : 2; }

void add_up(Element element, const std::vector<const std::byte*>& pieces, std::byte* out, std::size_t count) {
  float sum[kBlock];
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t block = count - first < kBlock ? count - first : kBlock;
    if (element == Element::float32) {
      std::memcpy(sum, pieces[0] + first * 4, block * 4);
      for (std::size_t rank = 1; rank < pieces.size(); ++rank) {
        add_float32(sum, reinterpret_cast<const float*>(pieces[rank]) + first, block);
      }
      std::memcpy(out + first * 4, sum, block * 4);
    } else {
      // Minus zero is the one that changes nothing, not even the sign of a zero.
      for (std::size_t i = 0; i < block; ++i) sum[i] = -0.0F;
      for (const std::byte* piece : pieces) {
        add_bfloat16(sum, reinterpret_cast<const std::uint16_t*>(piece) + first, block);
      }
      round_to_bfloat16(reinterpret_cast<std::uint16_t*>(out) + first, sum, block);
    }
  }
}

}  // namespace baton
