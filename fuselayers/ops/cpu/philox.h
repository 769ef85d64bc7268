// Dropout's mask on a CPU; philox.py defines its bits.
//
// A vector holds one group of eight columns in each 64-bit lane. A word of Philox is the low half of a lane: one multiply
// of low halves gives both halves of the product, and the high half of a lane is never read. The last step compares the
// eight 16-bit numbers of each group, which become eight bfloat16 ones and zeros.
//
// An element takes 0.31 ns on one core with AVX-512 and 0.46 to 0.51 ns with AVX2 (AMD EPYC of 2024, 2048x1024).

#pragma once

#include <algorithm>
#include <cstdint>

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#include <immintrin.h>
#endif

#include "rows.h"

namespace fuselayers {

constexpr uint16_t ONE = 0x3F80;    // in bfloat16
constexpr int64_t GROUP = 8;        // columns per call of Philox

#if defined(CPU_CAPABILITY_AVX512)

using Vector = __m512i;
constexpr int64_t WIDTH = 8;

inline Vector all(uint32_t value) { return _mm512_set1_epi64(value); }
inline Vector count_up(uint32_t first) {
  return _mm512_add_epi32(all(first), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vector multiply(Vector a, Vector b) { return _mm512_mul_epu32(a, b); }
inline Vector high_half(Vector a) { return _mm512_srli_epi64(a, 32); }
inline Vector exclusive_or(Vector a, Vector b, Vector c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
inline Vector all_halves(uint16_t value) { return _mm512_set1_epi16(static_cast<short>(value)); }

// The low halves of a and b as 16-bit numbers: ONE where they are above `below`, else 0.
inline Vector are_above(Vector a, Vector b, Vector below) {
  const Vector both = _mm512_mask_blend_epi32(0xAAAA, a, _mm512_slli_epi64(b, 32));
  return _mm512_maskz_mov_epi16(_mm512_cmpgt_epu16_mask(both, below), all_halves(ONE));
}
inline void store(uint16_t* keep, Vector first, Vector second) {
  const Vector even = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), odd = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  _mm512_storeu_si512(keep, _mm512_permutex2var_epi64(first, even, second));
  _mm512_storeu_si512(keep + 32, _mm512_permutex2var_epi64(first, odd, second));
}

#elif defined(CPU_CAPABILITY_AVX2)

using Vector = __m256i;
constexpr int64_t WIDTH = 4;

inline Vector all(uint32_t value) { return _mm256_set1_epi64x(value); }
inline Vector count_up(uint32_t first) { return _mm256_add_epi32(all(first), _mm256_setr_epi64x(0, 1, 2, 3)); }
inline Vector multiply(Vector a, Vector b) { return _mm256_mul_epu32(a, b); }
inline Vector high_half(Vector a) { return _mm256_srli_epi64(a, 32); }
inline Vector exclusive_or(Vector a, Vector b, Vector c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
inline Vector all_halves(uint16_t value) { return _mm256_set1_epi16(static_cast<short>(value)); }

inline Vector are_above(Vector a, Vector b, Vector below) {
  const Vector both = _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xAA);
  const Vector dropped = _mm256_cmpeq_epi16(_mm256_subs_epu16(both, below), _mm256_setzero_si256());
  return _mm256_andnot_si256(dropped, all_halves(ONE));
}
inline void store(uint16_t* keep, Vector first, Vector second) {
  const Vector even = _mm256_unpacklo_epi64(first, second), odd = _mm256_unpackhi_epi64(first, second);
  _mm256_storeu_si256(reinterpret_cast<Vector*>(keep), _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256(reinterpret_cast<Vector*>(keep + 16), _mm256_permute2x128_si256(even, odd, 0x31));
}

#else

using Vector = uint64_t;
constexpr int64_t WIDTH = 1;

inline Vector all(uint32_t value) { return value; }
inline Vector count_up(uint32_t first) { return first; }
inline Vector multiply(Vector a, Vector b) { return (a & 0xFFFFFFFF) * b; }
inline Vector high_half(Vector a) { return a >> 32; }
inline Vector exclusive_or(Vector a, Vector b, Vector c) { return a ^ b ^ c; }
inline Vector all_halves(uint16_t value) { return value; }

inline Vector are_above(Vector a, Vector b, Vector below) {
  const auto one = [below](uint64_t word, int half) { return (word >> 16 * half & 0xFFFF) > below ? uint64_t{ONE} : 0; };
  return one(a, 0) | one(a, 1) << 16 | one(b, 0) << 32 | one(b, 1) << 48;
}
inline void store(uint16_t* keep, Vector first, Vector second) {
  for (int index = 0; index < 4; ++index) {
    keep[index] = static_cast<uint16_t>(first >> 16 * index);
    keep[4 + index] = static_cast<uint16_t>(second >> 16 * index);
  }
}

#endif

// The mask of WIDTH groups of one row, as WIDTH * 8 numbers.
inline void keep_groups(uint16_t* keep, const uint32_t (*keys)[2], uint32_t row, uint32_t group, Vector below) {
  Vector c0 = count_up(group), c1 = all(row), c2 = all(0), c3 = all(0);
  for (int round = 0; round < 10; ++round) {
    const Vector product0 = multiply(c0, all(0xD2511F53)), product1 = multiply(c2, all(0xCD9E8D57));
    c0 = exclusive_or(high_half(product1), c1, all(keys[round][0]));
    c2 = exclusive_or(high_half(product0), c3, all(keys[round][1]));
    c1 = product1;
    c3 = product0;
  }
  store(keep, are_above(c0, c1, below), are_above(c2, c3, below));
}

// The mask of a call; without a seed nothing is dropped.
class Mask {
 public:
  // row_indices: [rows] in the whole tensor of a shard, or null for 0, 1, 2, ...; first_column: in that tensor.
  // threshold: 0 to 65536, the lane value below which an element is dropped; scale: the factor of the other elements.
  Mask(const int64_t* seed, const int64_t* row_indices, int64_t first_column, int64_t threshold, float scale)
      : row_indices_(row_indices), first_column_(first_column), scale_(scale), drops_(seed != nullptr) {
    if (!drops_) return;
    keeps_all_ = threshold == 0;
    below_ = all_halves(static_cast<uint16_t>(threshold - 1));
    for (uint32_t round = 0; round < 10; ++round) {
      keys_[round][0] = static_cast<uint32_t>(*seed) + round * 0x9E3779B9;
      keys_[round][1] = static_cast<uint32_t>(static_cast<uint64_t>(*seed) >> 32) + round * 0xBB67AE85;
    }
  }
  explicit operator bool() const { return drops_; }

  // Multiply a piece of a row, of at most PIECE elements, by its mask and the scale.
  void apply(float* values, int64_t row, int64_t column, int64_t size) const {
    if (!drops_) return;
    const int64_t first = first_column_ + column, skipped = first % GROUP;
    alignas(64) uint16_t keep[PIECE + GROUP];
    fill(keep, row, first / GROUP, (skipped + size + GROUP - 1) / GROUP);
    const uint16_t* kept = keep + skipped;
    const float scale = scale_;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) values[i] *= from_bfloat16(kept[i]) * scale;
  }

  // Fill `keep` with the ones and zeros, in bfloat16, of some groups of a row.
  void fill(uint16_t* keep, int64_t row, int64_t group, int64_t groups) const {
    if (keeps_all_) {
      std::fill_n(keep, GROUP * groups, ONE);
      return;
    }
    const auto index = static_cast<uint32_t>(row_indices_ ? row_indices_[row] : row);
    for (; groups >= WIDTH; group += WIDTH, groups -= WIDTH, keep += GROUP * WIDTH)
      keep_groups(keep, keys_, index, static_cast<uint32_t>(group), below_);
    if (groups) {
      uint16_t last[GROUP * WIDTH];
      keep_groups(last, keys_, index, static_cast<uint32_t>(group), below_);
      std::copy_n(last, GROUP * groups, keep);
    }
  }

 private:
  const int64_t* row_indices_;
  int64_t first_column_;
  float scale_;
  bool drops_, keeps_all_ = false;
  uint32_t keys_[10][2];
  Vector below_;
};

}  // namespace fuselayers
